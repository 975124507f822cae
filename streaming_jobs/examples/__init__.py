"""The streams that come with Recourse. Read `flights/streams.py` first."""
