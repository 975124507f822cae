"""What evaluates a suite on a slice: pandas for small ones, Spark for large ones. Read `pandas_engine.py`."""
