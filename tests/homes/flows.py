"""The streams of the archived homes. They stay as they are: an archive holds their checkpoints and tables."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, DecimalType, LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

KEYS = ("a b", "c:d", "50%", "e/f", "gö", "x")
BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
STEP = timedelta(seconds=1)
EVENT = StructType(
    [
        StructField("k", StringType(), nullable=False),
        StructField("n", LongType(), nullable=False),
        StructField("price", DecimalType(20, 2), nullable=False),
        StructField("gone", BooleanType(), nullable=False),
        StructField("t", TimestampType(), nullable=False),
    ]
)
EVENTS = KafkaTopic("events", value=Json(EVENT), event_time="t", lateness="10 seconds")


@stream(source=EVENTS, sink=DeltaTable("every", partition_by=["k"]))
def every(events: DataFrame) -> DataFrame:
    """Every record."""
    return events.select("k", "n", "price", "t")


@stream(source=EVENTS, sink=DeltaTable("totals", keys=["k"]))
def totals(events: DataFrame) -> DataFrame:
    """Count and sum by key."""
    return events.groupBy("k").agg(F.count(F.lit(1)).alias("c"), F.sum("price").alias("s"))


@stream(source=EVENTS, sink=DeltaTable("newest", keys=["k"], order_by=["t"], delete_when="gone"))
def newest(events: DataFrame) -> DataFrame:
    """The newest record of each key."""
    return events.select("k", "n", "price", "t", "gone", "_source")


@stream(source=EVENTS, sink=DeltaTable("windows"))
def windows(events: DataFrame) -> DataFrame:
    """Counts by ten seconds, once they are over."""
    counted = events.groupBy(F.window("t", "10 seconds")).agg(F.count(F.lit(1)).alias("c"))
    return counted.select(F.col("window.start").alias("start"), "c")
