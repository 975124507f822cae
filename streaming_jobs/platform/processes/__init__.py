"""Child processes, from start to end, also when we end first, and the identity of a pid. Read `child.py` first."""
