"""Delta tables: creation, exactly-once commits, maintenance. Read `sink.py` first, then `writers.py`."""
