"""All streams of a home together: one table of what happened to them, and how each is. Read `events.py` first."""
