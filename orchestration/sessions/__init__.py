"""A Dagster run is a session: started, watched, reported, ended in every case. Read `supervisor.py` first."""
