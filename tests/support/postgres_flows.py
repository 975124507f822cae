"""Streams that write tables of PostgreSQL, for tests; `thing(i)` of `things.py` makes their i-th record."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs.declare.postgres_table import PostgresTable
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.stream import DeltaTable, stream
from tests.support.things import THINGS
from tests.support.topic_flows import HALVES


def _rows(things: DataFrame) -> DataFrame:
    place = (F.col("_source.partition").alias("part"), F.col("_source.offset").alias("off"))
    return things.select("k", "n", "t", *place, "_source")


@stream(source=THINGS, sink=PostgresTable("pg_copies", description="Every thing"))
def pg_copied(things: DataFrame) -> DataFrame:
    """Every record in a table of PostgreSQL, the stream's only sink."""
    return _rows(things)


@stream(
    source=THINGS,
    sink=PostgresTable("pg_newest", keys=["k"], order_by=["t"], delete_when="n % 7 = 3"),
)
def pg_kept(things: DataFrame) -> DataFrame:
    """The newest record of each key, unless a delete is newer."""
    return _rows(things)


@stream(
    source=THINGS,
    sink={
        "table": DeltaTable("pg_third"),
        "topic": KafkaSink(HALVES, key="k"),
        "database": PostgresTable("pg_second"),
    },
)
def pg_beside(things: DataFrame) -> Mapping[str, DataFrame]:
    """Numbers by their rest of three: in a Delta table, a topic, and a table of PostgreSQL."""
    rows = _rows(things)
    return {
        "table": rows.where("n % 3 = 0").drop("_source"),
        "topic": rows.where("n % 3 = 1"),
        "database": rows.where("n % 3 = 2"),
    }


@stream(source=THINGS, sink=PostgresTable("pg_totals", keys=["k"]))
def pg_totals(things: DataFrame) -> DataFrame:
    """Count and sum by key."""
    return things.groupBy("k").agg(F.count(F.lit(1)).alias("c"), F.sum("n").alias("s"))
