"""Previews: what a change of the code would do to a stream's newest rows, without touching the running stream.

Read `run.py` first.
"""
