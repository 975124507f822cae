"""Streams that read topics and write topics, in two stages. Only the kill loop runs them.

topic chaos_numbers -> numbers_copied      -> topic chaos_copied  -> numbers_copied_again -> topic chaos_copied_again
                                                                  -> numbers_in_windows   -> topic chaos_windows
                    -> numbers_added_up    -> topic chaos_figures -> number_differences   -> topic chaos_differences
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.formats import Json
from streaming_jobs.stream import KafkaTopic, stream
from streaming_jobs.verification.chaos.numbers import WINDOW


def _schema(**columns: type[LongType | StringType | TimestampType | DoubleType | IntegerType]) -> StructType:
    return StructType([StructField(name, kind(), False) for name, kind in columns.items()])


_NUMBER = _schema(key=StringType, number=LongType, at=TimestampType)
_PLACED = _schema(
    key=StringType, number=LongType, at=TimestampType, source_partition=IntegerType, source_offset=LongType
)
_FIGURES = StructType(
    [StructField("key", StringType())]
    + [StructField(name, LongType()) for name in ("minimum", "maximum", "total", "count")]
)
_DIFFERENCES = StructType(
    [
        StructField("key", StringType()),
        StructField("difference", LongType()),
        StructField("average", DoubleType()),
        StructField("count", LongType()),
    ]
)
_WINDOWS = StructType(
    [StructField("key", StringType()), StructField("start", TimestampType()), StructField("count", LongType())]
)

NUMBERS = KafkaTopic("chaos_numbers", value=Json(_NUMBER))
COPIED = KafkaTopic("chaos_copied", value=Json(_PLACED))
COPIED_AGAIN = KafkaTopic("chaos_copied_again", value=Json(_PLACED))
FIGURES = KafkaTopic("chaos_figures", value=Json(_FIGURES))
DIFFERENCES = KafkaTopic("chaos_differences", value=Json(_DIFFERENCES))
WINDOWS = KafkaTopic("chaos_windows", value=Json(_WINDOWS))
PARTITIONS: Mapping[str, int] = {
    NUMBERS.name: 2,
    COPIED.name: 3,
    COPIED_AGAIN.name: 2,
    FIGURES.name: 3,
    DIFFERENCES.name: 2,
    WINDOWS.name: 2,
}
"""The topics, with the partitions that they are made with."""


@stream(source=NUMBERS, sink=KafkaSink(COPIED, key="key", timestamp="at"))
def numbers_copied(numbers: DataFrame) -> DataFrame:
    """Each number, with the place of its record."""
    return numbers.select("key", "number", "at", *_place(), "_source")


@stream(source=COPIED, sink=KafkaSink(COPIED_AGAIN, key="key", timestamp="at"))
def numbers_copied_again(copied: DataFrame) -> DataFrame:
    """Each copy once more; the place is still that of the first record."""
    return copied.select("key", "number", "at", "source_partition", "source_offset", "_source")


@stream(source=NUMBERS, sink=KafkaSink(FIGURES, key="key", emit="update"))
def numbers_added_up(numbers: DataFrame) -> DataFrame:
    """Minimum, maximum, total and count of each key, whenever they have changed."""
    return numbers.groupBy("key").agg(
        F.min("number").alias("minimum"),
        F.max("number").alias("maximum"),
        F.sum("number").alias("total"),
        F.count("*").alias("count"),
    )


@stream(source=FIGURES, sink=KafkaSink(DIFFERENCES, key="key"))
def number_differences(figures: DataFrame) -> DataFrame:
    """Difference and average of each key, made of the figures."""
    difference, average = F.col("maximum") - F.col("minimum"), F.col("total") / F.col("count")
    return figures.select("key", difference.alias("difference"), average.alias("average"), "count", "_source")


@stream(source=COPIED, sink=KafkaSink(WINDOWS, key="key", emit="update"))
def numbers_in_windows(copied: DataFrame) -> DataFrame:
    """How many numbers each key has in each window of event time, whenever that has changed."""
    counted = copied.groupBy("key", F.window("at", f"{WINDOW} seconds")).agg(F.count("*").alias("count"))
    return counted.select("key", F.col("window.start").alias("start"), "count")


def _place() -> tuple[Column, Column]:
    return F.col("_source.partition").alias("source_partition"), F.col("_source.offset").alias("source_offset")
