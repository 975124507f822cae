"""Where records come from. Read `base.py` first, then `kafka.py`."""
