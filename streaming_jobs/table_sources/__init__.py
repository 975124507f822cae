"""A Delta table as a source of a stream. Read `versions.py` first."""
