"""Each module is one scenario: its text says what it measures, its function `run` does it. See `benchmarks/run.py`."""
