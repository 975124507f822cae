"""The report of a recovery, as data and as a page with plots, from plan and journal alone. Read `facts.py` first."""
