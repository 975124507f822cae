"""What a batch did: the entry of each commit and positions. Read `entry.py` first."""
