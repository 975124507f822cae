"""A small batch's task runs in the batch's own thread, and leaves in Spark's memory what a job of Spark leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.errors import ArithmeticException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from streaming_jobs.platform.collected import to_arrow
from streaming_jobs.platform.spark import PARTITIONS
from streaming_jobs.platform.spark_jvm import new_object
from streaming_jobs.runtime.function_plan import all_set_to
from streaming_jobs.runtime.query_handle import _SENT_RECORDS
from streaming_jobs.runtime.small_batches import plan_small_batches
from streaming_jobs.sources.data_source import load
from streaming_jobs.sources.planner import BatchLimits
from tests.support.steps import StepReading, step

SECONDS = [(5, 11, 12), (25, 3), (7,)]
LONG = "aggregate(sequence(1, 40000), 0L, (sum, each) -> (sum + each * second) % 1000003)"
"""A tenth of a second for a record, or more."""


class Stream:
    """The batches of a query: their rows, the jobs of Spark that they took, and what a source observed."""

    def __init__(self, spark: SparkSession, folder: Path, function: Callable[[DataFrame], DataFrame]) -> None:
        self.spark = spark
        self.folder = folder
        self.function = function
        self.rows: list[list[dict[str, Any]]] = []
        self.jobs: list[int] = []
        self.observed: list[int] = []
        self.left: list[Any] = []
        """The task that the batch's thread thinks it is in, after each batch."""
        self.begun = threading.Event()
        self._query: Any = None
        self._known = threading.Event()

    @property
    def reading(self) -> StepReading:
        return StepReading(f"one-{self.folder.name}", {0: 0}, limits=BatchLimits(1, 1, 1, 0), folder=self.folder / "in")

    def start(self, reading: StepReading | None = None, **options: str) -> Any:
        """Start a query from the checkpoint on, whose state has one partition."""
        good = load(self.spark, reading or self.reading).observe("seen", F.count("*").alias("n"))
        seconds = good.select(F.unix_seconds("_record.at").alias("at")).select((F.col("at") % 60).alias("second"))
        writer = self.function(seconds).writeStream.option("checkpointLocation", str(self.folder / "state"))
        self._known.clear()
        with all_set_to(self.spark, {PARTITIONS: "1", **options}):
            query = writer.outputMode("update").foreachBatch(self._take).trigger(availableNow=True).start()
        self._query = query._jsq.streamingQuery()
        self._known.set()
        return query

    def run(self, reading: StepReading | None = None, **options: str) -> Stream:
        self.start(reading, **options).awaitTermination()
        return self

    def _take(self, batch: DataFrame, _: int) -> None:
        assert self._known.wait(60)
        before = self._jobs
        self.begun.set()
        try:
            self.rows.append(to_arrow(batch).to_pylist())
        finally:
            self.left.append(self.spark._jvm.org.apache.spark.TaskContext.get())  # type: ignore[union-attr]
        self.jobs.append(self._jobs - before)
        counts = self._query.lastExecution().observedMetrics().get("seen")
        self.observed.append(counts.get().getLong(0))

    @property
    def _jobs(self) -> int:
        return int(self.spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs())


def by_ten(seconds: DataFrame) -> DataFrame:
    return seconds.groupBy((F.col("second") / 10).cast("int").alias("ten")).agg(F.count("*").alias("n"))


@pytest.fixture
def folder(spark: SparkSession, tmp_path: Path) -> Path:
    plan_small_batches(spark)
    for number, seconds in enumerate(SECONDS):
        step(tmp_path / "in", number, *seconds)
    return tmp_path


@pytest.fixture
def held(spark: SparkSession) -> Iterator[None]:
    """After the test tasks hold no memory, and Spark knows of no task that may lock blocks, but those of before."""
    env = spark._jvm.org.apache.spark.SparkEnv.get()  # type: ignore[union-attr]
    blocks = env.blockManager().blockInfoManager()
    before = blocks.getNumberOfMapEntries() - blocks.size()
    arrow = spark._jvm.org.apache.spark.sql.util.ArrowUtils.rootAllocator()  # type: ignore[union-attr]
    yield
    assert not [name for each in arrow.getChildAllocators() if (name := str(each.getName())).startswith("toArrow")]
    assert env.memoryManager().executionMemoryUsed() == 0
    assert env.blockManager().memoryStore().currentUnrollMemory() == 0
    assert blocks.getNumberOfMapEntries() - blocks.size() == before


@pytest.mark.usefixtures("held")
def test_a_small_batch_takes_no_job_and_its_state_goes_on_after_restarts(spark: SparkSession, folder: Path) -> None:
    stream = Stream(spark, folder, by_ten)
    later = folder / "in" / "2"
    later.rename(folder / "later")
    stream.run()
    (folder / "later").rename(later)
    stream.run()
    assert stream.jobs == [0, 0, 0]
    assert stream.left == [None] * 3
    assert stream.observed == [3, 2, 1]
    assert [{row["ten"]: row["n"] for row in rows} for rows in stream.rows] == [{0: 1, 1: 2}, {2: 1, 0: 2}, {0: 3}]


@pytest.mark.parametrize("how", ["records that a task reads", "several tasks", "Python code"])
def test_other_jobs_are_those_of_spark(spark: SparkSession, folder: Path, how: str) -> None:
    def doubled(seconds: DataFrame) -> DataFrame:
        @F.pandas_udf("long")  # type: ignore[call-overload]
        def twice(values: pd.Series) -> pd.Series:
            return values * 2

        return seconds.select((twice("second") / 2).cast("long").alias("second"))

    stream = Stream(spark, folder, doubled if how == "Python code" else lambda seconds: seconds)
    sent = how == "Python code"
    stream.run(replace(stream.reading, sent=sent, parts_of=2 if how == "several tasks" else 1))
    assert stream.jobs == [1, 1, 1]
    assert [sorted(row["second"] for row in rows) for rows in stream.rows] == [sorted(each) for each in SECONDS]


@pytest.mark.usefixtures("held")
def test_a_task_that_raises_leaves_the_state_as_it_was(spark: SparkSession, folder: Path) -> None:
    divisor = 25

    def raises(seconds: DataFrame) -> DataFrame:
        return by_ten(seconds.where(F.lit(100) / (F.col("second") - divisor) < 1e9))

    failing = Stream(spark, folder, raises)
    with pytest.raises(StreamingQueryException, match="DIVIDE_BY_ZERO"):
        failing.run()
    assert [len(rows) for rows in failing.rows] == [2] and failing.left == [None] * 2
    divisor = 59
    stream = Stream(spark, folder, raises).run()
    assert stream.jobs == [0, 0]
    assert [{row["ten"]: row["n"] for row in rows} for rows in stream.rows] == [{2: 1, 0: 2}, {0: 3}]


@pytest.mark.usefixtures("held")
def test_what_a_task_raises_is_what_pyspark_raises(spark: SparkSession, folder: Path) -> None:
    raised: list[Exception] = []

    class Caught(Stream):
        def _take(self, batch: DataFrame, number: int) -> None:
            for _ in range(2):  # of a task that is not over, the second one would wait for the state
                try:
                    to_arrow(batch)
                except Exception as error:  # noqa: BLE001 - asserted below
                    raised.append(error)
            raise raised[-1]

    with pytest.raises(StreamingQueryException, match="DIVIDE_BY_ZERO"):
        Caught(spark, folder, lambda seconds: by_ten(seconds.where(F.lit(1) / (F.col("second") * 0) > 0))).run()
    assert [isinstance(error, ArithmeticException) for error in raised] == [True, True]
    assert {error.getCondition() for error in raised} == {"DIVIDE_BY_ZERO"}  # type: ignore[attr-defined]


@pytest.mark.usefixtures("held")
def test_rows_that_do_not_fit_the_driver_are_refused(spark: SparkSession, folder: Path) -> None:
    conf = spark.sparkContext._jsc.sc().conf()
    before = conf.get("spark.driver.maxResultSize")
    conf.set("spark.driver.maxResultSize", "10k")
    try:
        with pytest.raises(StreamingQueryException, match="spark.driver.maxResultSize"):
            Stream(spark, folder, lambda seconds: seconds.select(F.expr("repeat(string(second), 20000)"))).run()
    finally:
        conf.set("spark.driver.maxResultSize", before)


@pytest.mark.usefixtures("held")
def test_a_kept_frame_whose_task_raises_gives_its_memory_back(spark: SparkSession, folder: Path) -> None:
    class Kept(Stream):
        def _take(self, batch: DataFrame, number: int) -> None:
            kept = batch.select(F.lit(1) / (F.col("second") * 0)).persist()
            before = self._jobs
            try:
                to_arrow(kept)
            except ArithmeticException:
                self.jobs.append(self._jobs - before)
            kept.unpersist()

    stream = Kept(spark, folder, lambda seconds: seconds).run()
    assert stream.jobs == [0, 0, 0]


def test_of_a_plan_that_ran_twice_the_state_of_the_second_run_is_committed(spark: SparkSession, folder: Path) -> None:
    ids: list[list[str]] = []

    class Twice(Stream):
        def _take(self, batch: DataFrame, number: int) -> None:
            assert self._known.wait(60)
            plan = self._query.lastExecution().executedPlan()
            to_arrow(batch)
            self.note(plan)
            sent = new_object(self.spark, "SentRecords", _SENT_RECORDS)
            assert sent.scans(plan) is not None
            sent.runAll()
            super()._take(batch, number)
            self.note(plan)

        def note(self, node: Any) -> None:
            while str(node.nodeName()) != "StateStoreSave":
                node = node.children().head()
            made = node.checkpointInfoAccumulator().value()
            ids.append([str(made.get(at).stateStoreCkptId().get()[0]) for at in range(made.size())])

    stream = Twice(spark, folder, by_ten).run()
    assert [len(each) for each in ids] == [1] * 6 and ids[0] != ids[1]
    assert [{row["ten"]: row["n"] for row in rows} for rows in stream.rows] == [{0: 1, 1: 2}, {2: 1, 0: 2}, {0: 3}]
    assert ids[1][0] in (folder / "state" / "commits" / "0").read_text()


@pytest.mark.usefixtures("held")
def test_a_query_that_stops_does_not_wait_for_all_records(spark: SparkSession, folder: Path) -> None:
    step(folder / "many", 0, *range(600))
    stream = Stream(spark, folder, lambda seconds: by_ten(seconds.where(F.expr(f"{LONG} >= 0"))))
    query = stream.start(replace(stream.reading, folder=folder / "many"))
    assert stream.begun.wait(60)
    began = time.monotonic()
    query.stop()
    assert time.monotonic() - began < 5
    assert query.exception() is None and not stream.rows
