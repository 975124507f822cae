"""Checks before every start of a stream that checkpoint, tables and topics agree. Read `rules.py` first."""
