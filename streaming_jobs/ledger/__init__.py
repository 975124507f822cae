"""The ledger: the entry of each commit, and positions in sources. Read `entry.py` first."""
