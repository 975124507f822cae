"""Where rows go. Read `delta/sink.py` first."""
