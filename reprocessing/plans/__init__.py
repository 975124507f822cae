"""A recovery on disk: its plan, and the journal of its stages. Read `plan.py` first."""
