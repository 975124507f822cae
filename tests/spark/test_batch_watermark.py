"""Windows are written by the batch that closes them, and a source without records does not hold others back."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from streaming_jobs.platform.spark_jvm import new_object
from streaming_jobs.runtime.batch_watermark import WatermarkServer
from streaming_jobs.sources.data_source import load
from streaming_jobs.sources.planner import BatchLimits
from streaming_jobs.sources.source_clock import TimedSource
from tests.support.steps import START, StepReading, step
from tests.support.waiting import wait_for

LATENESS = 2_000


def timed(spark: SparkSession, reading: StepReading) -> DataFrame:
    good = load(spark, reading).where(~F.col("_bad")).select("_record.*")
    return good.withWatermark("at", f"{LATENESS} milliseconds")


def reading(folder: Path, server: WatermarkServer, number: int = 0, idle_after: float | None = None) -> StepReading:
    source = TimedSource(server.path, number, "at", LATENESS, idle_after)
    limits = BatchLimits(1, 1, 1, 0)
    return StepReading(f"steps-{folder.name}", {0: 0}, limits=limits, timed=source, folder=folder)


class Windows:
    """The windows of ten seconds that each batch has written: (its first second, its records)."""

    def __init__(self, frame: DataFrame, state: Path) -> None:
        self.batches: list[list[tuple[int, int]]] = []
        counts = frame.groupBy(F.window("at", "10 seconds")).agg(F.count("*").alias("n"))
        self.writer = counts.writeStream.option("checkpointLocation", str(state)).foreachBatch(self.take)

    def take(self, batch: DataFrame, _: int) -> None:
        rows = batch.select(F.unix_seconds("window.start") - int(START.timestamp()), "n").collect()
        self.batches.append(sorted((row[0], row[1]) for row in rows))

    @property
    def written(self) -> list[tuple[int, int]]:
        return [window for batch in self.batches for window in batch]

    def run(self, server: WatermarkServer | None) -> None:
        query = self.writer.trigger(availableNow=True).start()
        if server is not None:
            server.bind(query)
        query.awaitTermination()


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    for number, seconds in enumerate([(5, 11), (25, 3, -99), (47, 26), (48,)]):
        step(folder, number, *seconds)
    return folder


def test_a_window_is_written_by_the_batch_that_closes_it_also_after_a_restart(
    spark: SparkSession, steps: Path, tmp_path: Path
) -> None:
    closed = []
    for last in range(4):  # a query for each batch: all but the first go on from a checkpoint
        server = WatermarkServer()
        windows = Windows(timed(spark, reading(steps, server)), tmp_path / "state")
        later = [steps / str(number) for number in range(last + 1, 4)]
        for each in later:
            each.rename(tmp_path / each.name)
        server.listen(spark, 1)
        windows.run(server)
        for each in later:
            (tmp_path / each.name).rename(each)
        closed.append(windows.written)
        assert not Path(server.path).parent.exists(), "its planner has connected, and nobody else may"
    assert closed[1:] == [[(0, 2), (10, 1)], [(20, 2)], []]


def test_one_query_writes_windows_a_batch_earlier_than_spark_alone_and_the_same_ones(
    spark: SparkSession, steps: Path, tmp_path: Path
) -> None:
    server, alone = WatermarkServer(), WatermarkServer()
    early = Windows(timed(spark, reading(steps, server)), tmp_path / "early")
    server.listen(spark, 1)
    early.run(server)
    plain = Windows(timed(spark, reading(steps, alone)), tmp_path / "plain")
    plain.run(None)
    assert early.written == plain.written == [(0, 2), (10, 1), (20, 2)]
    assert [bool(rows) for rows in early.batches].index(True) <= [bool(rows) for rows in plain.batches].index(True)
    assert len(early.batches) < len(plain.batches), "fewer batches without records"


def test_a_batch_that_workers_read_has_sparks_own_watermark(spark: SparkSession, steps: Path, tmp_path: Path) -> None:
    server = WatermarkServer()
    windows = Windows(timed(spark, replace(reading(steps, server), sent=False)), tmp_path / "state")
    server.listen(spark, 1)
    windows.run(server)
    assert windows.written == [(0, 2), (10, 1), (20, 2)]
    assert windows.batches[1] == [], "it has moved the watermark, and the next batch writes"


def test_a_live_query_writes_a_window_in_the_batch_that_comes_after_idle_moments(
    spark: SparkSession, tmp_path: Path
) -> None:
    """In an idle moment, Spark notes the next batch's watermark, and refuses another one for it later."""
    server, folder = WatermarkServer(), tmp_path / "in"
    step(folder, 0, 5)
    windows = Windows(timed(spark, reading(folder, server)), tmp_path / "state")
    server.listen(spark, 1)
    query = windows.writer.trigger(processingTime="50 milliseconds").start()
    server.bind(query)
    try:
        for number, (second, closed) in enumerate([(25, [(0, 1)]), (47, [(0, 1), (20, 1)])], start=1):
            batches = wait_for(lambda: len(windows.batches), "a batch")
            time.sleep(1)  # idle moments
            step(folder, number, second)
            wait_for(lambda batches=batches: len(windows.batches) > batches or query.exception(), "the next batch")
            assert query.exception() is None and windows.written == closed
    finally:
        query.stop()


def test_a_source_without_records_holds_the_windows_of_another_until_it_is_idle(
    spark: SparkSession, tmp_path: Path
) -> None:
    busy, quiet = tmp_path / "busy", tmp_path / "quiet"
    step(busy, 0, 5)
    step(quiet, 0, 6)
    step(busy, 1, 35)

    def both(server: WatermarkServer, idle_after: float | None) -> Windows:
        frame = timed(spark, reading(busy, server)).union(timed(spark, reading(quiet, server, 1, idle_after)))
        server.listen(spark, 2)
        return Windows(frame, tmp_path / "state")

    waiting = both(server := WatermarkServer(), None)
    waiting.run(server)
    assert len(waiting.batches) > 1 and waiting.written == []
    going = both(server := WatermarkServer(), 1.0)
    query = going.writer.trigger(processingTime="50 milliseconds").start()
    server.bind(query)
    try:
        wait_for(lambda: query.lastProgress is not None or query.exception(), "an idle moment")
        step(busy, 2, 46)
        wait_for(lambda: going.written == [(0, 2), (30, 1)], "the window")
        step(quiet, 1, 7, 47)
        step(busy, 3, 58)
        wait_for(lambda: (40, 2) in going.written, "the next window")
        assert (0, 1) not in going.written, "a record of the idle source was late"
    finally:
        query.stop()


def test_spark_has_what_the_watermark_is_moved_by(spark: SparkSession) -> None:
    server = WatermarkServer()
    server.listen(spark, 1)
    assert server._java is not None
    with pytest.raises(Exception, match="does not compile|cannot|Cannot|not found"):
        new_object(spark, "Nothing", "public class Nothing { private NoSuchTracker tracker; }")
