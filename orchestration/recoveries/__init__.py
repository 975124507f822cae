"""Recoveries that a person starts, from the command line or from Dagster's Launchpad. Read `request.py` first.

Command line and job share that module. The job `recover` (`definitions.py`) runs it in a child process (`child.py`), so
that the process ends with the run, and a new run resumes the recovery.
"""
