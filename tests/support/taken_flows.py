"""A stream that writes what `plain_job.py` writes, so that it can take the job's table over."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs.formats import Raw
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

TOPIC = "taken-from-a-plain-job"


@stream(source=KafkaTopic(TOPIC, value=Raw()), sink=DeltaTable("taken"))
def taken(records: DataFrame) -> DataFrame:
    """Each record's text with its place."""
    place = (F.col(f"_source.{name}").alias(name) for name in ("partition", "offset"))
    return records.select(F.col("value").cast("string").alias("id"), *place)
