"""Slices: a range of a table, such as a day, rebuilt while its stream goes on. Read `rebuild.py` first."""
