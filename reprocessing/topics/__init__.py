"""The topics that a recovered stream writes: corrected records come after the wrong ones, which become void.

Read `written_topics.py` first.
"""
