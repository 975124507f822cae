"""A small batch of a state with one partition runs as one stage, interpreted, and counts as a large one does."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from structlog.testing import capture_logs

from streaming_jobs.platform import spark_jvm
from streaming_jobs.platform.spark import PARTITIONS
from streaming_jobs.runtime import small_batches
from streaming_jobs.runtime.function_plan import all_set_to
from streaming_jobs.runtime.small_batches import plan_small_batches
from streaming_jobs.runtime.spark_plan import set_to
from streaming_jobs.sources.data_source import load
from streaming_jobs.sources.planner import BatchLimits
from tests.support.steps import START, StepReading, step

BATCHES = [(5, 11), (25, 3), (7, 12, 5), (48,)]
NO_DATA = "spark.sql.streaming.noDataMicroBatches.enabled"
COUNTS = [{0: 1, 10: 1}, {0: 2, 20: 1}, {0: 4, 10: 2}, {40: 1}]
"""The counts by ten seconds that each batch changes."""


class Counts:
    """A running count by ten seconds, and what each batch did."""

    def __init__(self, state: Path, *, watermark: bool = False) -> None:
        self.state = state
        self.watermark = watermark
        self.exchanges: list[int] = []
        self.coalesced: list[bool] = []
        self.compiled: list[bool] = []
        self.updates: list[dict[int, int]] = []
        self._query: Any = None
        self._known = threading.Event()

    def run(self, spark: SparkSession, reading: StepReading, partitions: int) -> None:
        """The batches that are there, from the checkpoint on."""
        good = load(spark, reading).where(~F.col("_bad")).observe("seen", F.count("*")).select("_record.*")
        if self.watermark:
            good = good.withWatermark("at", "1 hour").where(F.col("at").isNotNull())
        counts = self.function(good).groupBy(F.window("at", "10 seconds").alias("of")).agg(F.count("*").alias("n"))
        writer = counts.writeStream.outputMode("update").option("checkpointLocation", str(self.state))
        self._known.clear()
        with all_set_to(spark, {PARTITIONS: str(partitions), NO_DATA: "false"}):
            query = writer.foreachBatch(self._take).trigger(availableNow=True).start()
        self._query = query._jsq.streamingQuery()
        self._known.set()
        query.awaitTermination()

    def function(self, good: DataFrame) -> DataFrame:
        """What comes before the state."""
        return good

    def _take(self, batch: DataFrame, _: int) -> None:
        rows = batch.select(F.unix_seconds("of.start") - int(START.timestamp()), "n").collect()
        self.updates.append({row[0]: row[1] for row in rows})
        assert self._known.wait(60)
        plan = str(self._query.lastExecution().executedPlan())
        self.exchanges.append(plan.count("Exchange "))
        self.coalesced.append("Coalesce 1" in plan)
        self.compiled.append("*(" in plan)


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    for number, seconds in enumerate(BATCHES):
        step(tmp_path / "in", number, *seconds)
    return tmp_path / "in"


def small(folder: Path) -> StepReading:
    return StepReading(f"steps-{folder.parent.name}", {0: 0}, limits=BatchLimits(1, 1, 1, 0), folder=folder)


def large(folder: Path, parts: int) -> StepReading:
    return replace(small(folder), sent=False, parts_of=parts)


def one_by_one(steps: Path, number: int) -> Path:
    """The folder with the batches up to `number`."""
    aside = steps.parent / "later"
    aside.mkdir(exist_ok=True)
    for each in range(len(BATCHES)):
        here, there = steps / str(each), aside / str(each)
        if each <= number and there.exists():
            there.rename(here)
        elif each > number and here.exists():
            here.rename(there)
    return steps


@pytest.mark.parametrize("watermark", [False, True])
def test_a_small_batch_has_no_exchange_and_the_counts_are_right_over_restarts_and_large_batches(
    spark: SparkSession, steps: Path, tmp_path: Path, watermark: bool
) -> None:
    plan_small_batches(spark)
    strategies = spark._jsparkSession.experimental().extraStrategies().size()
    plan_small_batches(spark)
    assert spark._jsparkSession.experimental().extraStrategies().size() == strategies, "one for all streams"
    counts = Counts(tmp_path / "state", watermark=watermark)
    for number in range(len(BATCHES)):  # a query for each batch
        folder = one_by_one(steps, number)
        partitions = 1 if number == 0 else 2  # the checkpoint says one
        counts.run(spark, large(folder, 2) if number == 2 else small(folder), partitions)
    assert counts.updates == COUNTS
    assert counts.exchanges == [0, 0, 1, 0], "tasks decode a large batch side by side"
    assert counts.coalesced == [True, True, False, True]
    assert counts.compiled == [False, False, True, False]


def test_many_records_are_compiled_and_a_users_option_holds(spark: SparkSession, tmp_path: Path) -> None:
    plan_small_batches(spark)
    for number, records in enumerate((10, 5_000, 10)):
        step(tmp_path / "in", number, *range(records))
    counts = Counts(tmp_path / "state")
    counts.run(spark, small(tmp_path / "in"), 1)
    assert counts.exchanges == [0, 0, 0] and counts.compiled == [False, True, False]
    with set_to(spark, "spark.sql.codegen.wholeStage", "true"):
        step(tmp_path / "in", 3, 1)
        counts.run(spark, small(tmp_path / "in"), 1)
    assert counts.compiled[3:] == [True]


def test_a_batch_that_looks_up_a_table_is_compiled(spark: SparkSession, steps: Path, tmp_path: Path) -> None:
    plan_small_batches(spark)
    spark.range(20).write.parquet(str(tmp_path / "tens"))

    class LookedUp(Counts):
        def function(self, good: DataFrame) -> DataFrame:
            tens = spark.read.parquet(str(tmp_path / "tens"))
            return good.join(F.broadcast(tens), (F.unix_seconds("at") / 10).cast("bigint") % 20 == tens["id"])

    counts = LookedUp(tmp_path / "state")
    counts.run(spark, small(steps), 1)
    assert counts.updates == COUNTS and counts.exchanges == [1] * len(BATCHES), "that of the broadcast"
    assert all(counts.compiled)


def test_a_state_with_more_partitions_keeps_its_exchange(spark: SparkSession, steps: Path, tmp_path: Path) -> None:
    plan_small_batches(spark)
    counts = Counts(tmp_path / "state")
    counts.run(spark, small(one_by_one(steps, 1)), 2)
    counts.run(spark, small(one_by_one(steps, 3)), 1)  # the checkpoint says two
    assert counts.updates == COUNTS and counts.exchanges == [1, 1, 1, 1] and not any(counts.coalesced)


def test_a_spark_without_the_private_interface_runs_two_stages_and_says_so(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = spark_jvm._COMPILED.get(spark.sparkContext._gateway, {})
    monkeypatch.delitem(there, "SmallBatches", raising=False)
    monkeypatch.setattr(small_batches, "_STRATEGY", "public class SmallBatches { private NoSuchStrategy spark; }")
    with capture_logs() as logged:
        plan_small_batches(spark)
    assert [line["event"] for line in logged] == ["small batches are planned as large ones"]
