"""Five-minute totals of payments in two streams with a topic between them, hot accounts salted. Read `streams.py` first."""
