"""Recoveries as a person starts them, from the command line or from Dagster's Launchpad. Read `carry_out.py` first.

`plan_request.py` and `carry_out.py` are what both do. The job `recover` (`job.py`) does it in a child process
(`child.py`), so that the end of its run is the end of the recovery's process, and a new run continues it.
"""
