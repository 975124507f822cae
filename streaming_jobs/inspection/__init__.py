"""Inspection: what any Kafka-to-Delta job of Spark has done, from its checkpoint and the logs of its tables alone."""
