"""Archives: all records of a topic in a Delta table, read where Kafka no longer has them. Read `declaration.py` first."""
