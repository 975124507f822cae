"""Streams whose records name schemas of a registry, for tests of its checks."""

from __future__ import annotations

from pyspark.sql import DataFrame

from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.formats import Avro, Debezium
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

ORDER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
EVENT = {
    "type": "record",
    "name": "Event",
    "fields": [
        {"name": "before", "type": ["null", ORDER]},
        {"name": "after", "type": ["null", "Order"]},
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"]},
    ],
}
ORDERS = KafkaTopic("orders", value=Avro(ORDER))
COPIES = KafkaTopic("copies", value=Avro(ORDER))
CHANGES = KafkaTopic("changes", value=Debezium(Avro(EVENT, subject="changes")))
ALONE = KafkaTopic("alone", value=Avro(ORDER, ids="none"))


@stream(source=ORDERS, sink=DeltaTable("orders"))
def orders(orders: DataFrame) -> DataFrame:
    return orders.drop("_source")


@stream(source=ORDERS, sink=KafkaSink(COPIES))
def copied_orders(orders: DataFrame) -> DataFrame:
    return orders


@stream(source=CHANGES, sink=DeltaTable("changed"))
def changed(changes: DataFrame) -> DataFrame:
    return changes.drop("_source")


@stream(source=ALONE, sink=DeltaTable("alone"))
def alone(alone: DataFrame) -> DataFrame:
    return alone.drop("_source")
