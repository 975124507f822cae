"""Child processes: start, end (even if the parent dies first), identity of a pid. Read `child.py` first."""
