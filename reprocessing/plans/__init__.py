"""What a recovery is on disk: its plan, and the journal of what was done. Read `plan.py` first."""
