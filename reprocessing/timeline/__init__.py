"""The timeline of a stream: batches, deploys, sessions, recoveries and savepoints. Read `timeline.py` first."""
