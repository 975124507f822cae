"""Streams between the topics of two clusters, for tests; `things` has its records in the default one."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream
from tests.support.things import THINGS
from tests.support.topic_flows import COPY

HERE = KafkaTopic("halves", value=Json(COPY))
THERE = KafkaTopic("halves", value=Json(COPY), cluster="eu")
"""A topic with the same name in the other cluster."""


@stream(source=THINGS, sink={"here": KafkaSink(HERE, key="k"), "there": KafkaSink(THERE, key="k", shards=2)})
def split(things: DataFrame) -> Mapping[str, DataFrame]:
    """Even numbers in a topic of the default cluster, odd ones in a topic of the other."""
    place = (F.col("_source.partition").alias("part"), F.col("_source.offset").alias("off"))
    rows = things.select("k", "n", "t", *place, "_source")
    return {"here": rows.where("n % 2 = 0"), "there": rows.where("n % 2 = 1")}


@stream(source={"here": HERE, "there": THERE}, sink=DeltaTable("gathered"))
def gathered(here: DataFrame, there: DataFrame) -> DataFrame:
    """The records of both topics in one table."""
    columns = ("k", "n", F.col("_source.topic").alias("topic"))
    return here.select(*columns).unionByName(there.select(*columns))
