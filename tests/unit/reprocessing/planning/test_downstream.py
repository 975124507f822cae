"""Which streams a recovery takes along: those that read topics, not those that read tables, and no archive."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql.types import LongType, StructField, StructType

from reprocessing.planning.downstream import through_tables, through_topics
from streaming_jobs.archives.declaration import archive
from streaming_jobs.delta_source import DeltaSource
from streaming_jobs.examples.shop.streams import LEVELS, availability, stock, stock_changes
from streaming_jobs.stream import DeltaTable, Stream

SCHEMA = StructType([StructField("pieces", LongType())])


def same(rows: DataFrame) -> DataFrame:
    return rows


REPORT = Stream("report", same, {"rows": DeltaSource("availability", schema=SCHEMA)}, {"r": DeltaTable("report")})
COPY = Stream("copy", same, {"rows": LEVELS}, {"c": DeltaTable("copy")})
STREAMS = {each.name: each for each in (REPORT, archive(LEVELS), COPY, availability, stock, stock_changes)}


def test_the_readers_of_topics_are_taken_along_in_the_order_of_records() -> None:
    assert through_topics(STREAMS, ["stock_changes"]) == ["stock_changes", "stock", "copy", "availability"]
    assert through_topics(STREAMS, ["availability"]) == ["availability"]


def test_the_readers_of_tables_are_another_matter() -> None:
    assert through_tables(STREAMS, ["stock_changes"]) == ["report"]
    assert through_tables(STREAMS, ["copy"]) == []
