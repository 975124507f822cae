"""Frames of judged records: each has its fields in `_record`, and `_bad` says if it was refused.

Every source makes them (`record_blocks.py`); here they become the frames that a stream's function gets.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from pyspark.sql import functions as F

from streaming_jobs.declare.columns import SOURCE_COLUMN
from streaming_jobs.sources.record_blocks import RECORD
from streaming_jobs.text.durations import milliseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


class Timed(Protocol):
    """A source, as far as its event time goes."""

    @property
    def event_time(self) -> str | None:
        """The column of its event time."""

    @property
    def lateness(self) -> timedelta | None:
        """The watermark delay."""


def good(judged: DataFrame, position: Column) -> DataFrame:
    """The good records: their fields, and their position as `_source`."""
    return judged.where(~F.col("_bad")).select(f"{RECORD}.*", position.alias(SOURCE_COLUMN))


def watched(source: Timed, frame: DataFrame) -> DataFrame:
    """The frame with its watermark, if the source has an event time."""
    if source.event_time is None or source.lateness is None:
        return frame
    return frame.withWatermark(source.event_time, f"{milliseconds(source.lateness)} milliseconds")


def counted(source: Timed) -> list[Column]:
    """The figures that are observed of a batch, in the order of `Observed`."""
    bad = F.col("_bad")
    figures = [F.count_if(bad).alias("bad")]
    if source.event_time and source.lateness is not None:
        figures += [F.max(F.when(~bad, F.unix_micros("timestamp"))).alias("newest")]
    return figures


def late_rows(source: Timed, judged: DataFrame, watermark_ms: int) -> int:
    """Good records whose event time is at or behind a watermark; a time without a zone is UTC."""
    if source.event_time is None:
        return 0
    event = F.col(RECORD)[source.event_time].cast("timestamp")
    late = F.unix_micros(event) <= F.lit(watermark_ms * 1000)
    return judged.where(~F.col("_bad") & late).count()


def workers_of(spark: SparkSession) -> int:
    """Tasks that read at the same time."""
    return int(spark.sparkContext.defaultParallelism)
