"""The outputs of a stream: the sink that its batches write, and the stored table that everything else uses.

Read `base.py` first, then `stored.py`.
"""
