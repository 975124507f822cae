"""The streams that Recourse ships. Read `flights/streams.py` first."""
