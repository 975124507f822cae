"""What a batch did: the entry of each commit, positions, and the file that keeps entries. Read `entry.py` first."""
