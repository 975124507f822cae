"""Streams that are declared but never run by Spark: two tables from one topic."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.declare.format import BlockReader
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

ORDER = StructType(
    [
        StructField("id", LongType(), False, {"comment": "number of the order"}),
        StructField("customer", StringType(), True),
    ]
)


class Anything:
    """A format that is only declared."""

    schema = ORDER
    reasons: frozenset[str] = frozenset()

    def reader(self, fields: Sequence[str] | None = None) -> BlockReader:
        raise NotImplementedError("no stream of it ever runs")


ORDERS = KafkaTopic("shop.orders-v1", value=Anything(), description="Orders as they come.", owners=["shop"])


@stream(source=ORDERS, sink=DeltaTable("orders", schema=ORDER, keys=["id"]), owners=["a@b.example"])
def orders(source: DataFrame) -> DataFrame:
    """Every order, by its number."""
    return source


@stream(source=ORDERS, sink=DeltaTable("customers", schema=ORDER, partition_by=["customer"]), owners=["team:shop"])
def customers(source: DataFrame) -> DataFrame:
    """Orders by customer."""
    return source


@stream(source=ORDERS, sink=DeltaTable("idle", description="Of a stream without a job."))
def idle(source: DataFrame) -> DataFrame:
    return source
