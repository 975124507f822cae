"""Topics as sinks: each batch is one transaction, with a marker that says which batch it is. Read `writer.py` first."""
