"""Streams over one made-up topic, for tests: every kind of sink, each row with the offset it came from.

A record is {"k": key, "n": number, "t": time}; `thing(i)` makes the i-th, `truth` says what the tables must hold.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

KEYS = ("a b", "c:d", "50%", "e/f", "gö", "x")
BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
STEP = timedelta(milliseconds=10)

THING = StructType(
    [
        StructField("k", StringType(), nullable=False),
        StructField("n", LongType(), nullable=False),
        StructField("t", TimestampType(), nullable=False),
    ]
)
THINGS = KafkaTopic("things", value=Json(THING), event_time="t", lateness="10 seconds")


@stream(source=THINGS, sink=DeltaTable("plain", partition_by=["k"]))
def plain(things: DataFrame) -> DataFrame:
    """Every record with its place in the topic."""
    return things.select("k", "n", "t", F.col("_source.partition").alias("part"), F.col("_source.offset").alias("off"))


@stream(source=THINGS, sink=DeltaTable("totals", keys=["k"]))
def totals(things: DataFrame) -> DataFrame:
    """Count and sum by key."""
    return things.groupBy("k").agg(F.count(F.lit(1)).alias("c"), F.sum("n").alias("s"))


@stream(source=THINGS, sink=DeltaTable("windows"))
def windows(things: DataFrame) -> DataFrame:
    """Counts by key and ten seconds, once they are over."""
    counted = things.groupBy(F.window("t", "10 seconds"), "k").agg(F.count(F.lit(1)).alias("c"))
    return counted.select(F.col("window.start").alias("start"), "k", "c")


@stream(source=THINGS, sink={"evens": DeltaTable("evens"), "odds": DeltaTable("odds")})
def parity(things: DataFrame) -> Mapping[str, DataFrame]:
    """Two tables from one stream."""
    columns = ("k", "n", F.col("_source.partition").alias("part"), F.col("_source.offset").alias("off"))
    return {"evens": things.where("n % 2 = 0").select(*columns), "odds": things.where("n % 2 = 1").select(*columns)}


@stream(source=THINGS, sink=DeltaTable("broken"))
def broken(things: DataFrame) -> DataFrame:
    """Fails on its first record."""
    return things.select(F.raise_error(F.lit("a bug in the function")).cast("string").alias("never"), "n")


@F.udf(LongType())
def refusing(number):  # type: ignore[no-untyped-def]  # Spark reads type hints, and not those of `annotations`
    """Refuses every number."""
    raise ValueError(f"no place for {number}")


@stream(source=THINGS, sink=DeltaTable("crooked"))
def crooked(things: DataFrame) -> DataFrame:
    """Its Python function refuses each record."""
    return things.select(refusing("n").alias("n"))


def thing(number: int) -> tuple[bytes, bytes]:
    """Key and value of the record with that number."""
    key = KEYS[number % len(KEYS)]
    value = {"k": key, "n": number, "t": (BEGIN + number * STEP).isoformat()}
    return key.encode(), json.dumps(value).encode()


def expected_totals(numbers: Iterable[int]) -> dict[str, tuple[int, int]]:
    """Count and sum by key of the records with these numbers."""
    counts: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for number in numbers:
        counts[KEYS[number % len(KEYS)]] += 1
        sums[KEYS[number % len(KEYS)]] += number
    return {key: (counts[key], sums[key]) for key in counts}
