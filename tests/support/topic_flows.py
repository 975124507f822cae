"""Streams that write topics, for tests; `thing(i)` of `things.py` makes their i-th record."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream
from tests.support.things import THINGS

COPY = StructType(
    [
        StructField("k", StringType(), nullable=False),
        StructField("n", LongType(), nullable=False),
        StructField("t", TimestampType()),
        StructField("part", IntegerType()),
        StructField("off", LongType()),
    ]
)
COPIES = KafkaTopic("copies", value=Json(COPY))
SHARDED = KafkaTopic("sharded-copies", value=Json(COPY))
HALVES = KafkaTopic("halves", value=Json(COPY))
TOTAL = StructType([StructField("k", StringType()), StructField("c", LongType())])
TOTALS = KafkaTopic("total-changes", value=Json(TOTAL))


def _copy(things: DataFrame) -> DataFrame:
    place = (F.col("_source.partition").alias("part"), F.col("_source.offset").alias("off"))
    return things.select("k", "n", "t", *place, "_source")


@stream(source=THINGS, sink=KafkaSink(COPIES, key="k", timestamp="t"))
def copied(things: DataFrame) -> DataFrame:
    """Every record in a topic."""
    return _copy(things)


@stream(source=THINGS, sink=KafkaSink(SHARDED, key="k", timestamp="t", shards=4))
def sharded(things: DataFrame) -> DataFrame:
    """Every record in a topic that the executors write."""
    return _copy(things)


@stream(source=COPIES, sink=DeltaTable("read_copies"))
def read_copies(copies: DataFrame) -> DataFrame:
    """The records of the topic that `copied` writes, in a table."""
    return copies.select("k", "n", "t", "part", "off")


@stream(source=THINGS, sink={"table": DeltaTable("both_table"), "topic": KafkaSink(HALVES, key="k")})
def both(things: DataFrame) -> Mapping[str, DataFrame]:
    """Even numbers in a table, odd ones in a topic."""
    rows = _copy(things)
    return {"table": rows.where("n % 2 = 0").drop("_source"), "topic": rows.where("n % 2 = 1")}


@stream(source=THINGS, sink=KafkaSink(TOTALS, key="k", emit="update"))
def total_changes(things: DataFrame) -> DataFrame:
    """Counts by key, each change of one."""
    return things.groupBy("k").agg(F.count(F.lit(1)).alias("c"))
