"""The topology as a graph of topics, streams and tables, as text and as pictures. Read `graph.py` first."""
