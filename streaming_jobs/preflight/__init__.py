"""Before every start: do checkpoint, tables and topics tell the same story? Read `rules.py` first."""
