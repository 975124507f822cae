"""One run of a suite: its slice, its engine, its table checks, its first failing batch, its pages. Read `runner.py`."""
