"""What any Kafka-to-Delta job of Spark has done, from its files alone; and its adoption by a stream.

Read `inspection.py` first. `checkpoint_history.py` and `table_history.py` read files; everything between these and the
findings is pure. Only `adoption.py` writes.
"""
