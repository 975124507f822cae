"""Redrives from the command line and from Dagster. Read `definitions.py` first."""
