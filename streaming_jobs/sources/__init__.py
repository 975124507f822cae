"""Where records come from. Read `kafka.py` first."""
