"""Dagster's own processes as children of `recourse up`. Read `processes.py` first."""
