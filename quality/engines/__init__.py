"""What evaluates a suite on a sample: pandas for small samples, Spark for large ones. Read `pandas_engine.py`."""
