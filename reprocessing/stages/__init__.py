"""The stages of a recovery, and what they do to tables, topics and state. Read `stages.py` first."""
