"""Where rows go: what a batch asks of every sink, and what all others ask of a table at rest.

Read `base.py` first, then `stored.py`.
"""
