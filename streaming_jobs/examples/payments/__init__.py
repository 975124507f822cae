"""Five-minute totals of payments in two streams, hot accounts salted. Read `streams.py` first."""
