"""Streams whose functions raise on single records: n = 77, 78 and 1,555 of the topic `things`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

from streaming_jobs import ErrorPolicy, Holds
from streaming_jobs.declare.slices import Slices
from streaming_jobs.stream import DeltaTable, stream
from tests.support.things import THINGS

BAD = (77, 78, 1555)
ASIDE = ErrorPolicy(function="dead_letter")


@F.udf(LongType())
def picky(number):  # type: ignore[no-untyped-def]  # Spark reads type hints, and not those of `annotations`
    """Refuses three numbers."""
    if number in BAD:
        raise ValueError(f"no place for {number}")
    return number


def _place(*columns: object) -> list[object]:
    return [*columns, F.col("_source.partition").alias("part"), F.col("_source.offset").alias("off")]


def _divided(number: str = "n") -> object:
    """Divides by zero for the bad numbers."""
    zero = F.col(number).isin(*BAD)
    return (F.lit(10) / F.when(zero, 0).otherwise(1)).cast("int")


@stream(source=THINGS, sink=DeltaTable("by_python"), errors=ASIDE)
def by_python(things: DataFrame) -> DataFrame:
    """A Python function raises."""
    return things.select(*_place(picky("n").alias("n")))  # type: ignore[arg-type]


@stream(source=THINGS, sink=DeltaTable("by_pandas"), errors=ASIDE)
def by_pandas(things: DataFrame) -> DataFrame:
    """A function of whole batches raises."""

    def kept(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            if frame["n"].isin(BAD).any():
                raise ValueError("no place for the batch")
            yield frame[["n"]]

    return things.mapInPandas(kept, "n bigint")


@stream(source=THINGS, sink=DeltaTable("sliced", slices=Slices("t")), errors=ASIDE)
def sliced(things: DataFrame) -> DataFrame:
    """A Python function raises, and days of the table can be rebuilt."""
    return things.select("t", picky("n").alias("n"))


@stream(source=THINGS, sink=DeltaTable("divided"), errors=ASIDE)
def divided(things: DataFrame) -> DataFrame:
    """An expression raises."""
    return things.select("n", _divided().alias("d"))  # type: ignore[arg-type]


@stream(source=THINGS, sink={"halves": DeltaTable("halves"), "wholes": DeltaTable("wholes")}, errors=ASIDE)
def by_division(things: DataFrame) -> Mapping[str, DataFrame]:
    """An expression raises, in one of two tables."""
    return {
        "halves": things.where("n % 2 = 0").select(*_place("n")),  # type: ignore[arg-type]
        "wholes": things.where("n % 2 = 1").select(*_place("n", _divided().alias("d"))),  # type: ignore[arg-type,attr-defined]
    }


@stream(
    source=THINGS,
    sink=DeltaTable("by_rule"),
    rules=[Holds("10 / (n - 77) <> 0.5", name="no_half")],
    errors=ErrorPolicy(function="drop"),
)
def by_rule(things: DataFrame) -> DataFrame:
    """The expression of a rule raises, and its record is dropped."""
    return things.select(*_place("n"))  # type: ignore[arg-type]


@stream(source=THINGS, sink=DeltaTable("summed", keys=["k"]), errors=ASIDE)
def summed(things: DataFrame) -> DataFrame:
    """What an aggregation computes of each record raises."""
    counted = F.count(F.lit(1)).alias("c")
    return things.where(picky("n") >= 0).groupBy("k").agg(counted, F.sum(_divided()).alias("s"))  # type: ignore[arg-type]


@stream(
    source=THINGS,
    sink={"spread": DeltaTable("spread", keys=["k"]), "again": DeltaTable("again", keys=["k"])},
    errors=ASIDE,
)
def spread(things: DataFrame) -> Mapping[str, DataFrame]:
    """Raises in tasks that get the records of other tasks; two tables have the totals."""
    picked = things.repartition(2).select("k", picky("n").alias("n"))  # type: ignore[arg-type]  # Spark would move a filter
    totals = picked.groupBy("k").agg(F.count("n").alias("c"))
    return {"spread": totals, "again": totals.where("c > 0")}


@stream(source=THINGS, sink=DeltaTable("regrouped", emit="close"), errors=ASIDE)
def regrouped(things: DataFrame) -> DataFrame:
    """Ahead of two operators with state."""
    minutes = things.groupBy("k", F.window("t", "1 minute")).agg(F.count(picky("n")).alias("c"))  # type: ignore[arg-type]
    return minutes.groupBy(F.window(F.window_time("window"), "1 hour")).agg(F.sum("c").alias("c")).select("c")


@stream(
    source=THINGS, sink=DeltaTable("hourly", slices=Slices("begin", reach="1 hour"), late_rows="keep"), errors=ASIDE
)
def hourly(things: DataFrame) -> DataFrame:
    """Windows of one key, whose late records are kept."""
    windows = things.where("k = 'late'").groupBy(F.window("t", "1 hour"))
    return windows.agg(F.sum(picky("n")).alias("s")).select(F.col("window.start").alias("begin"), "s")  # type: ignore[arg-type]


@stream(source=THINGS, sink=DeltaTable("overflowing", keys=["k"]), errors=ASIDE)
def overflowing(things: DataFrame) -> DataFrame:
    """The result of an aggregation raises, as no record does alone."""
    return things.groupBy("k").agg((F.lit(1) / (F.count(F.lit(1)) - 1)).alias("x"))


@stream(source=THINGS, sink=DeltaTable("wrong"), errors=ASIDE)
def wrong(things: DataFrame) -> DataFrame:
    """A bug raises on every record."""
    return things.select((F.col("n") / (F.col("n") - F.col("n"))).alias("n"))
