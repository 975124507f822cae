"""Archives: Delta tables with every record of a topic as Kafka had it, read where Kafka no longer has it."""
