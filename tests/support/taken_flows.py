"""Streams that write what `plain_job.py` writes, so that they can take the job's table over."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs.formats import Raw
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

TOPIC = "taken-from-a-plain-job"
WITH_STATE = "taken-with-state"


@stream(source=KafkaTopic(TOPIC, value=Raw()), sink=DeltaTable("taken"))
def taken(records: DataFrame) -> DataFrame:
    """Each record's text with its place."""
    place = (F.col(f"_source.{name}").alias(name) for name in ("partition", "offset"))
    return records.select(F.col("value").cast("string").alias("id"), *place)


def _totals(records: DataFrame, of: str) -> DataFrame:
    number = F.col("value").cast("string").cast("int")
    summed = number if of == "value" else F.col("_source.offset").cast("int")
    return records.groupBy((number % 3).alias("bucket")).agg(
        F.count("*").alias("records"), F.sum(summed).alias("total")
    )


@stream(source=KafkaTopic(WITH_STATE, value=Raw()), sink=DeltaTable("totals", keys=["bucket"]))
def totals(records: DataFrame) -> DataFrame:
    """Number and sum of the records, by their remainder."""
    return _totals(records, "value")


@stream(source=KafkaTopic(WITH_STATE, value=Raw()), sink=DeltaTable("others", keys=["bucket"]))
def others(records: DataFrame) -> DataFrame:
    """The same columns and types, of another value: Spark sees no difference."""
    return _totals(records, "offset")


@stream(source=KafkaTopic(WITH_STATE, value=Raw()), sink=DeltaTable("fewer", keys=["bucket"]))
def fewer(records: DataFrame) -> DataFrame:
    """Without the sum: another state."""
    return _totals(records, "value").drop("total")


@stream(source=KafkaTopic(WITH_STATE, value=Raw()), sink=DeltaTable("firsts"))
def firsts(records: DataFrame) -> DataFrame:
    """Each remainder once."""
    return records.select((F.col("value").cast("string").cast("int") % 7).alias("id")).dropDuplicates(["id"])
