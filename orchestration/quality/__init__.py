"""Checks of what the streams have written, as Dagster shows and runs them. Read `suites.py` first.

The suites themselves, and their runs, are the package `quality`; nothing here imports Great Expectations.
"""
