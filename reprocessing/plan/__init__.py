"""From a request to a frozen plan on disk, with its journal. Read `planner.py` first."""
