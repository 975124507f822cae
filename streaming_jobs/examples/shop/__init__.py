"""A shop in three streams, each of which reads the topic that the previous one writes. Read `streams.py` first."""
