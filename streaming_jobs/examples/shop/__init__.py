"""A shop in three streams, each of which reads what the one before it writes. Read `streams.py` first."""
