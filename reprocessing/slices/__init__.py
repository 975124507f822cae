"""Slices: a range of a table, such as a day, rebuilt while its stream runs. Read `rebuild.py` first."""
