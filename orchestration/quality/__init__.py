"""Checks of the streams' output, as Dagster shows and runs them. Read `suites.py` first.

The package `quality` has the suites and their runs; no module here imports Great Expectations.
"""
