"""Where rows go: what a batch asks of every sink. Read `base.py` first."""
