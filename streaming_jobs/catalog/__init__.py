"""All declared streams together: topology, graph, archives, truths. Read `topology.py` first."""
