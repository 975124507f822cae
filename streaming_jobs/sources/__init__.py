"""The inputs of a stream: topics, their decoded records, the connection to the cluster. Read `base.py` first."""
