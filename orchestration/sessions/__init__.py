"""Sessions as Dagster runs: start, watch and report them, and end them in every case. Read `supervisor.py` first."""
