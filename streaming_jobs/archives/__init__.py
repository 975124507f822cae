"""Archives: all records of topics in Delta tables, read when Kafka has them no longer. Read `declaration.py` first."""
