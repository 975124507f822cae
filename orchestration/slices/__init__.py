"""Slices from the command line and from Dagster. Read `job.py` first."""
