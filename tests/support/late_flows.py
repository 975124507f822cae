"""A stream of hourly sums that keeps its late records: on the topic that the environment names."""

from __future__ import annotations

import os

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs import DeltaTable, Json, KafkaTopic, Slices, Stream

EVENT = StructType(
    [
        StructField("at", TimestampType(), nullable=False),
        StructField("key", StringType(), nullable=False),
        StructField("amount", LongType(), nullable=False),
    ]
)


def summed(topic: str) -> Stream:
    """Sums of the amounts by key and hour."""

    def sums(events: DataFrame) -> DataFrame:
        by_key = events.groupBy(F.window("at", "1 hour"), "key").agg(F.sum("amount").alias("total"))
        return by_key.select(F.col("window.start").alias("begin"), "key", "total")

    source = KafkaTopic(topic, value=Json(EVENT), event_time="at", lateness="1 minute")
    sink = DeltaTable("hours", slices=Slices("begin", reach="1 hour"), late_rows="keep")
    return Stream("hours", sums, {"events": source}, {"hours": sink})


hours = summed(os.environ.get("LATE_TOPIC", "late"))
