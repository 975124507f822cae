"""The state of operators, read beside the query that writes it: aggregation, join, processor with timers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from streaming_jobs import DeltaTable, Json, KafkaTopic, stream
from streaming_jobs.errors import TransientError, UsageError
from streaming_jobs.inspection import operator_state
from streaming_jobs.inspection.operator_state import entries_of, figures
from streaming_jobs.testing import StreamTest

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
CLICK = StructType([StructField("user", StringType(), False), StructField("at", TimestampType(), False)])
CLICKS = KafkaTopic("clicks", value=Json(CLICK), event_time="at", lateness="1 minute")
VIEWS = KafkaTopic("views", value=Json(CLICK), event_time="at", lateness="1 minute")
Make = Callable[..., StreamTest]


@stream(source=CLICKS, sink=DeltaTable("clicks_by_user", keys=["user"]))
def clicks_by_user(clicks: DataFrame) -> DataFrame:
    """Clicks of each user."""
    return clicks.groupBy("user").agg(F.count("*").alias("clicks"))


@stream(source={"clicks": CLICKS, "views": VIEWS}, sink=DeltaTable("clicked"))
def clicked(clicks: DataFrame, views: DataFrame) -> DataFrame:
    """Views with the clicks of the minute after them."""
    clicks, views = (each.drop("_source").alias(name) for name, each in (("c", clicks), ("v", views)))
    soon = F.expr("c.user = v.user AND c.at >= v.at AND c.at < v.at + interval 1 minute")
    return views.join(clicks, soon).select("v.user", F.col("v.at").alias("viewed"), F.col("c.at").alias("clicked"))


class Away(StatefulProcessor):
    """Writes a user whose last click is ten minutes ago."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.last = handle.getValueState("last", "at timestamp")
        self.days = handle.getMapState("days", "day string", "clicks bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.last.update((row.at,))
            self.days.updateValue((str(row.at.date()),), (1,))
            self.handle.registerTimer(int(row.at.timestamp() * 1000) + 600_000)
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(user=key[0])


@stream(source=CLICKS, sink=DeltaTable("away"))
def away(clicks: DataFrame) -> DataFrame:
    """Users who have gone away."""
    return clicks.groupBy("user").transformWithState(Away(), "user string", "Append", "EventTime")


def click(user: str, minutes: int = 0) -> dict[str, Any]:
    return {"user": user, "at": NOON + timedelta(minutes=minutes)}


UNCOUNTED = "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows"


def test_figures_and_entries_are_those_of_the_batch_that_is_asked_for(stream_test: Make, spark: SparkSession) -> None:
    test = stream_test(clicks_by_user)
    for users in ("ab", "acc"):
        for user in users:
            test.send(click(user))
        test.run()
    at, [store] = figures(spark, test._checkpoint)
    last = test.batches[-1].batch
    assert (at, store.store.name, store.rows, store.before, store.rows_before) == (last, "default", 3, 0, 2)
    assert store.columns["key"] == "struct<user:string>" and store.bytes > 0
    assert store.fullest >= 2 and store.skew == store.fullest * store.store.partitions / 3
    spark.conf.set(UNCOUNTED, "false")  # as `recourse state` reads
    try:
        assert figures(spark, test._checkpoint) == (at, [store])
        assert [entry["value"] for entry in test.state("c")] == [{"count": 2}]
    finally:
        spark.conf.unset(UNCOUNTED)
    assert [entry["value"] for entry in entries_of(spark, test._checkpoint, {"user": "a"}, 0)] == [{"count": 1}]
    assert test.state("nobody") == [] and len(test.state()) == 3
    with pytest.raises(UsageError, match="no column name"):
        test.state({"name": "a"})
    with pytest.raises(UsageError, match=f"batches 0 to {last}, and not batch 7"):
        figures(spark, test._checkpoint, 7)


def test_growth_is_counted_from_a_batch_that_a_live_stream_keeps_for_a_while(
    stream_test: Make, spark: SparkSession
) -> None:
    test = stream_test(clicks_by_user)
    for user in "abcde":
        test.send(click(user))
        test.run()
    known = sorted(test._checkpoint.committed)
    _, [store] = figures(spark, test._checkpoint)
    assert known[0] < store.before < known[-1], "the oldest one may be gone when it is read"
    assert (store.rows, store.rows_before) == (5, len(test.batches[: store.before + 1]))


def test_both_sides_of_a_join_are_read(stream_test: Make, spark: SparkSession) -> None:
    test = stream_test(clicked)
    test.send(click("a"), topic="views")
    test.send(click("b"), topic="clicks")
    test.run()
    _, stores = figures(spark, test._checkpoint)
    assert [(store.store.name, store.rows) for store in stores] == [("left", 1), ("right", 1)]
    assert [(each["store"], each["value"]["user"]) for each in test.state("a")] == [("left", "a")]


def test_variables_and_timers_of_a_processor_are_read(stream_test: Make, spark: SparkSession) -> None:
    test = stream_test(away)
    test.send(click("a"))
    test.send(click("b", 1))
    test.run()
    _, stores = figures(spark, test._checkpoint)
    assert {store.store.name: store.rows for store in stores} == {"last": 2, "days": 2, "timers": 2}
    found = {entry["store"]: entry for entry in test.state("a")}
    assert found["last"]["value"]["at"] == NOON
    assert found["timers"]["expiration_timestamp_ms"] == (NOON.timestamp() + 600) * 1000
    assert "2026-01-01" in str(found["days"])
    test.send(click("b", 15))
    test.run()
    assert test.rows() == [{"user": "a"}, {"user": "b"}]


@pytest.mark.parametrize(
    "text",
    [
        "[FileNotFoundException] File 1.changelog does not exist",
        "[STDS_COMMITTED_BATCH_UNAVAILABLE] No committed batch",
    ],
)
def test_a_file_that_is_removed_meanwhile_lets_the_newest_batch_be_read_again_and_a_named_one_be_refused(
    stream_test: Make, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    test = stream_test(clicks_by_user)
    test.send(click("a"))
    test.run()
    read, gone = operator_state.stores, threading.Event()

    def once(*arguments: Any) -> Any:
        if gone.is_set():
            return read(*arguments)
        gone.set()
        raise RuntimeError(text)

    monkeypatch.setattr(operator_state, "stores", once)
    assert len(test.state()) == 1
    gone.clear()
    with pytest.raises(TransientError, match="the state after batch 0 is no longer whole"):
        entries_of(spark, test._checkpoint, None, 0)
