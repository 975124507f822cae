"""Delta tables: made, committed to exactly once, kept small. Read `sink.py` first, then `writers.py`."""
