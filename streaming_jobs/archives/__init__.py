"""Archives: every record of a topic in a Delta table, read where Kafka no longer has it. Read `declaration.py` first."""
