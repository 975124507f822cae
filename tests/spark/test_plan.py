"""The traits read from plans that the installed Spark makes; `runtime/test_query_plan.py` tests recorded plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.runtime.batch_hooks import choose_path
from streaming_jobs.runtime.spark_plan import PlanTraits, state_fingerprint, traits
from streaming_jobs.runtime.state_changes import differences
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sources.kafka import KafkaSource
from streaming_jobs.sources.planner import BatchLimits
from streaming_jobs.stream import Stream

SHIPPED = ("streaming_jobs.examples.flights.streams", "streaming_jobs.examples.stock.streams")

ALL_FIELDS = "spark.sql.debug.maxToStringFields"
Change = Callable[[DataFrame], DataFrame]


@pytest.fixture
def ticks(spark: SparkSession) -> DataFrame:
    """A stream of thirty numbers a row."""
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    wide = rate.select("timestamp", *((F.col("value") % (i + 2)).alias(f"n{i}") for i in range(30)))
    return wide.withWatermark("timestamp", "10 seconds")


def hourly(ticks: DataFrame, length: str = "1 hour", last: Callable[[str], Column] = F.sum) -> DataFrame:
    sums = [(last if i == 29 else F.sum)(f"n{i}").alias(f"s{i}") for i in range(30)]
    return ticks.groupBy(F.window("timestamp", length), "n0").agg(*sums)


def test_the_same_stream_declared_twice_has_one_fingerprint(ticks: DataFrame) -> None:
    assert state_fingerprint(hourly(ticks)) == state_fingerprint(hourly(ticks)) != {}


@pytest.mark.parametrize(
    "other",
    [
        lambda ticks: hourly(ticks, "2 hours"),
        lambda ticks: hourly(ticks, last=F.max),  # behind the 25th column, which Spark's plans leave out
        lambda ticks: hourly(ticks.withColumn("n0", F.col("n0") + 1)),
    ],
    ids=["another window", "another last column", "another key"],
)
def test_another_meaning_of_the_state_is_another_fingerprint(ticks: DataFrame, other: Change) -> None:
    assert state_fingerprint(other(ticks)) != state_fingerprint(hourly(ticks))


def test_a_filter_ahead_of_the_state_keeps_the_fingerprint(ticks: DataFrame) -> None:
    assert state_fingerprint(hourly(ticks.where("n3 > 1"))) == state_fingerprint(hourly(ticks))


def test_state_lies_in_streams_only(spark: SparkSession, ticks: DataFrame) -> None:
    static = spark.range(10).groupBy((F.col("id") % 3).alias("n1")).count()
    assert replace(traits(ticks.join(static, "n1")), watermarks=0) == PlanTraits(stateful=False, multiplies=True)
    assert replace(traits(hourly(ticks)), watermarks=0) == PlanTraits(stateful=True, multiplies=False)
    assert traits(ticks.limit(5)).stateful


@pytest.mark.parametrize(
    "plain",
    [
        lambda ticks: ticks.alias("a").where("a.n1 > 0").select("a.n1"),
        lambda ticks: ticks.sample(0.5).repartition(2).repartition("n1").coalesce(1).hint("rebalance"),
        lambda ticks: ticks.drop("n1").withColumnRenamed("n2", "m").fillna(0).dropna(),
        lambda ticks: ticks.union(ticks).observe("seen", F.count("*").alias("n")),
        lambda ticks: ticks.select(F.udf(lambda n: n, "long")("n1"), F.pandas_udf(lambda n: n, "long")("n2")),
        lambda ticks: ticks.sparkSession.sql("SELECT n1 AS n FROM {ticks} t WHERE n1 > 0", ticks=ticks),
    ],
    ids=["alias", "spread", "columns", "union", "udf", "sql"],
)
def test_what_keeps_no_state_and_multiplies_no_rows_is_known(ticks: DataFrame, plain: Change) -> None:
    assert replace(traits(plain(ticks)), reads=1, watermarks=0) == PlanTraits(stateful=False, multiplies=False)


@pytest.mark.parametrize("stream", [*Topology.load(SHIPPED).streams.values()], ids=lambda stream: stream.name)
def test_the_shipped_streams_keep_the_drivers_path(spark: SparkSession, stream: Stream, tmp_path: Path) -> None:
    frames = {
        parameter: KafkaSource(parameter, topic, tmp_path / "client.json", topic.delay).stream(
            spark, start={0: 0}, limits=BatchLimits(1.0, 10, 1000, 0.0), owner=stream.name
        )
        for parameter, topic in stream.sources.items()
    }
    for output in stream.outputs(**frames).values():
        each = traits(output)
        assert each.unknown == ()
        assert choose_path(StreamSettings(), each, records=1000, bytes_per_record=512, died_before=False) == "driver"


class Totals(StatefulProcessor):
    """A processor that is only declared here."""

    def __init__(self, of: StructType | str, *, broken: bool = False) -> None:
        self.of, self.broken = of, broken

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", self.of, ttlDurationMs=1000)
        self.seen = handle.getMapState("seen", "n bigint", StructType([StructField("name", StringType())]))
        if self.broken:
            raise ConnectionError("no such service")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Any]:
        yield from ()


class Sums(Totals):
    """Another processor of the same state."""


def kept(ticks: DataFrame, key: str = "n1", processor: Totals | None = None) -> DataFrame:
    processor = processor or Totals("n bigint")
    return ticks.groupBy(key).transformWithState(processor, "n1 bigint", "Append", "EventTime")


def test_a_processor_is_known_by_what_its_init_declares(ticks: DataFrame) -> None:
    first, plain = Totals("n bigint"), kept(ticks)
    variables = "map seen: struct<n:bigint> -> struct<name:string>; value total: struct<n:bigint> with a time to live"
    assert state_fingerprint(plain)["0"].endswith(f"; processor Totals; {variables}")
    assert "init" not in vars(first) and not hasattr(first, "total"), "only a copy is asked"
    same = kept(ticks.withColumn("more", F.lit(1)), processor=Totals(StructType([StructField("n", LongType())])))
    assert differences(state_fingerprint(plain), state_fingerprint(same)) == ""
    for other, words in (
        (kept(ticks, "n2"), "n2"),
        (kept(ticks, processor=Sums("n bigint")), "new: processor Sums"),
        (kept(ticks, processor=Totals("n int")), "new: value total: struct<n:int>"),
        (kept(ticks.withColumn("n1", F.col("n1") + 1)), "n1"),
    ):
        assert words in differences(state_fingerprint(plain), state_fingerprint(other))
    broken = state_fingerprint(kept(ticks, processor=Totals("n bigint", broken=True)))
    assert broken == state_fingerprint(plain), "what it has declared before it failed"


def test_a_function_on_the_groups_of_a_batch_keeps_no_state(ticks: DataFrame) -> None:
    by_batch = ticks.groupBy("n1").applyInPandas(lambda group: group, ticks.schema)
    assert not traits(by_batch).may_keep_state and state_fingerprint(by_batch) == {}


def test_reading_a_plan_leaves_the_session_as_it_was(spark: SparkSession, ticks: DataFrame) -> None:
    before = spark.conf.get(ALL_FIELDS)
    traits(ticks)
    assert spark.conf.get(ALL_FIELDS) == before
