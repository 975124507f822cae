"""Redrives: records that were set aside, sent through the code of today, exactly once. Read `redrive.py` first."""
