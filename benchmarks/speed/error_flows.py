"""Streams whose functions raise on single records of the topic: one for each kind of code that may raise.

A record is {"n": number, "bad": 0 or 1, "k": key}; each function raises on records with `bad` 1, and on no others.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

from streaming_jobs import ErrorPolicy
from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

RECORDS = KafkaTopic(
    "records", value=Json(schema_of({"n": "bigint not null", "bad": "bigint not null", "k": "string not null"}))
)
ASIDE = ErrorPolicy(function="dead_letter")
_DIVIDED = "n div (1 - bad) AS m"


@F.udf(LongType())
def picky(number, bad):  # type: ignore[no-untyped-def]  # Spark reads type hints, and not those of `annotations`
    """Refuses a bad number."""
    if bad:
        raise ValueError(f"no place for {number}")
    return number


@stream(source=RECORDS, sink=DeltaTable("cast"), errors=ASIDE)
def cast(records: DataFrame) -> DataFrame:
    return records.selectExpr("n", "k", "CAST(IF(bad = 1, 'none', CAST(n AS STRING)) AS BIGINT) AS m")


@stream(source=RECORDS, sink=DeltaTable("division"), errors=ASIDE)
def division(records: DataFrame) -> DataFrame:
    return records.selectExpr("n", "k", _DIVIDED)


@stream(source=RECORDS, sink=DeltaTable("python_udf"), errors=ASIDE)
def python_udf(records: DataFrame) -> DataFrame:
    return records.select("n", "k", picky("n", "bad").alias("m"))


@stream(source=RECORDS, sink=DeltaTable("map_in_pandas"), errors=ASIDE)
def map_in_pandas(records: DataFrame) -> DataFrame:
    def kept(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            if frame["bad"].any():
                raise ValueError("a bad record")
            yield frame[["n", "k"]]

    return records.mapInPandas(kept, "n bigint, k string")


@stream(source=RECORDS, sink=DeltaTable("division_state", keys=["k"]), errors=ASIDE)
def division_state(records: DataFrame) -> DataFrame:
    return records.selectExpr("k", _DIVIDED).groupBy("k").agg(F.sum("m").alias("s"))


@stream(source=RECORDS, sink=DeltaTable("python_state", keys=["k"]), errors=ASIDE)
def python_state(records: DataFrame) -> DataFrame:
    return records.select("k", picky("n", "bad").alias("m")).groupBy("k").agg(F.sum("m").alias("s"))


STREAMS = (cast, division, python_udf, map_in_pandas, division_state, python_state)
