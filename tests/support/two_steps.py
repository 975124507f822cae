"""Two streams, one of which reads the table that the other one writes: each row with its places, for tests."""

from __future__ import annotations

import os

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.stream import DeltaTable, stream
from tests.support.things import THINGS

CLEAN = StructType(
    [
        StructField("k", StringType()),
        StructField("n", LongType()),
        StructField("t", TimestampType()),
        StructField("part", LongType()),
        StructField("off", LongType()),
    ]
)
MARK = int(os.environ.get("TWO_STEPS_MARK", "0"))
"""Added to each number by the first step: stands for a bug."""


@stream(source=THINGS, sink=DeltaTable("clean", schema=CLEAN, partition_by=["k"]))
def clean(things: DataFrame) -> DataFrame:
    """Every record with its place in the topic."""
    place = F.col("_source")
    return things.select(
        "k",
        (F.col("n") + MARK).alias("n"),
        "t",
        place["partition"].cast("long").alias("part"),
        place["offset"].alias("off"),
    )


@stream(source=DeltaSource("clean"), sink=DeltaTable("copied"))
def copied(rows: DataFrame) -> DataFrame:
    """Every row of the table, with the version that it came with."""
    return rows.select("k", "n", "part", "off", F.col("_source.offset").alias("version"))


@stream(
    source=DeltaSource("clean", event_time="t", lateness="10 seconds"),
    sink=DeltaTable("clean_windows"),
)
def clean_windows(rows: DataFrame) -> DataFrame:
    """Counts by key and ten seconds, once they are over."""
    counted = rows.groupBy(F.window("t", "10 seconds"), "k").agg(F.count(F.lit(1)).alias("c"))
    return counted.select(F.col("window.start").alias("start"), "k", "c")


@stream(source=DeltaSource("clean"), sink=DeltaTable("sums", keys=["k"], order_by=["c"]))
def sums(rows: DataFrame) -> DataFrame:
    """Sum by key."""
    return rows.groupBy("k").agg(F.sum("n").alias("s"), F.count(F.lit(1)).alias("c"))
