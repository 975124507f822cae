"""The outputs of a stream: a sink, as its batches see it, and a table at rest, as everything else sees it.

Read `base.py` first, then `stored.py`.
"""
