"""Recoveries as a person starts them, from the command line or from Dagster's Launchpad. Read `request.py` first.

It is what both do. The job `recover` (`definitions.py`) does it in a child process (`child.py`), so that the end of its
run is the end of the recovery's process, and a new run continues it.
"""
