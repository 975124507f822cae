"""The flights of New York in 2013: the data, the feeder that sends them, and the truth to compare with.

Read `streams.py` first.
"""
