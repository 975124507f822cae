"""Suites on the tables of the shipped streams. Read `flights.py`."""
