"""A stock of products, for the demonstration of a recovery: its streams, its movements, and the truth about them.

Read `streams.py` first.
"""
