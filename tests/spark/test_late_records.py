"""Records that come too late for a window are kept with the days that lack them, once, whatever kills the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs import DeltaTable, Json, KafkaTopic, Slices, Stream, UsageError
from streaming_jobs.runtime.crash_points import POINTS
from streaming_jobs.testing import StreamTest

Make = Callable[..., StreamTest]
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
EVENT = StructType(
    [
        StructField("at", TimestampType(), nullable=False),
        StructField("key", StringType()),
        StructField("amount", LongType()),
    ]
)
EVENTS = KafkaTopic("events", value=Json(EVENT), event_time="at", lateness="1 minute")
HOURS = DeltaTable("hours", slices=Slices("begin", reach="1 hour", zone="America/New_York"), late_rows="keep")


def of_windows(*of: str, sink: DeltaTable = HOURS, source: KafkaTopic = EVENTS) -> Stream:
    """Totals of the positive amounts by key, in windows of these lengths."""

    def totals(events: DataFrame) -> DataFrame:
        good = events.where("amount > 0").select("at", "key", "amount")
        by_key = good.groupBy(F.window("at", *of), "key").agg(F.sum("amount").alias("total"))
        return by_key.select(F.col("window.start").alias("begin"), "key", "total")

    return Stream("totals", totals, {"events": source}, {"hours": sink})


def send(test: StreamTest, *at: datetime, amount: int = 1) -> None:
    for each in at:
        test.send({"at": each, "key": "a", "amount": amount}, key="k")


def kept(test: StreamTest) -> list[tuple[int, datetime, list[date]]]:
    return [(row["offset"], row["event_time"], row["days"]) for row in test.rows("hours_late")]


def closed_at(make: Make, stream: Stream, watermark: datetime) -> StreamTest:
    """The stream with a watermark there, after a record of which the window is open."""
    test = make(stream)
    send(test, watermark + timedelta(minutes=1))
    test.run()
    assert test.watermark == watermark
    return test


def test_a_record_is_kept_if_its_window_has_ended_and_not_if_it_is_open_or_the_function_leaves_it_out(
    stream_test: Make,
) -> None:
    test = closed_at(stream_test, of_windows("1 hour"), NOON)
    send(test, NOON - timedelta(hours=9), NOON - timedelta(microseconds=1))
    send(test, NOON, NOON + timedelta(seconds=1))
    send(test, NOON - timedelta(days=5), amount=0)
    test.send(b"no JSON")
    test.run()
    [entry] = test.batches[1:2]
    early, late = NOON - timedelta(hours=9), NOON - timedelta(microseconds=1)
    # 03:00 UTC is still the evening before in New York
    assert kept(test) == [(1, early, [date(2026, 2, 28)]), (2, late, [date(2026, 3, 1)])]
    assert (entry.rows["late"], entry.rows["late:hours"], test.late) == (2, 2, 2)
    row = test.rows("hours_late")[0]
    assert (row["topic"], row["partition"], row["key"], row["watermark"]) == ("events", 0, b"k", NOON)
    assert (row["generation"], row["batch"]) == (1, entry.batch)


def test_a_record_that_misses_one_of_its_windows_is_kept_with_the_days_of_all_of_them(stream_test: Make) -> None:
    midnight = datetime(2026, 3, 2, 5, tzinfo=UTC)
    test = closed_at(stream_test, of_windows("1 hour", "30 minutes", "10 minutes"), midnight + timedelta(minutes=40))
    in_time, half = midnight + timedelta(minutes=40), midnight + timedelta(minutes=20)
    send(test, in_time, half)
    test.run()
    assert kept(test) == [(2, half, [date(2026, 3, 1), date(2026, 3, 2)])], "from 23:40, which is over, and from 0:10"


@pytest.mark.parametrize("point", POINTS)
def test_a_batch_that_is_killed_anywhere_keeps_each_record_once(stream_test: Make, point: str) -> None:
    test = closed_at(stream_test, of_windows("1 hour"), NOON)
    send(test, NOON - timedelta(hours=1), NOON - timedelta(hours=2))
    test.crash_at(point)
    test.run()
    send(test, NOON - timedelta(hours=3))
    test.run()
    assert [offset for offset, _, _ in kept(test)] == [1, 2, 3]
    assert sum(entry.rows.get("late:hours", 0) for entry in {e.txn: e for e in test.batches}.values()) == 3


def test_a_stream_that_only_counted_its_late_records_keeps_them_from_its_next_start_on(stream_test: Make) -> None:
    counting = of_windows("1 hour", sink=replace(HOURS, late_rows="count"))
    test = closed_at(stream_test, counting, NOON)
    send(test, NOON - timedelta(hours=1))
    test.run()
    assert test.late == 1
    test.deploy(of_windows("1 hour"))
    send(test, NOON - timedelta(hours=2))
    test.run()
    assert [offset for offset, _, _ in kept(test)] == [2] and test.late == 2


def without_windows(events: DataFrame) -> DataFrame:
    return events.select(F.col("at").alias("begin"), "key")


def sessions(events: DataFrame) -> DataFrame:
    return events.groupBy(F.session_window("at", "1 hour"), "key").count().selectExpr("session_window.start AS begin")


def first_of_each(events: DataFrame) -> DataFrame:
    return events.dropDuplicatesWithinWatermark(["key"]).select(F.col("at").alias("begin"), "key")


def counted_by_function(events: DataFrame) -> DataFrame:
    def count(key: Any, rows: Any, state: Any) -> Any:
        yield pd.DataFrame({"begin": [NOON], "key": [key[0]]})

    of_key = events.groupBy("key")
    return of_key.applyInPandasWithState(count, "begin timestamp, key string", "n long", "update", "NoTimeout")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (without_windows, "no windows of the event time"),
        (sessions, "session windows"),
        (first_of_each, "Deduplicate"),
        (counted_by_function, "FlatMapGroupsInPandasWithState"),
    ],
)
def test_a_function_whose_slices_cannot_be_rebuilt_keeps_no_late_records(
    stream_test: Make, function: Any, words: str
) -> None:
    test = stream_test(Stream("totals", function, {"events": EVENTS}, {"hours": HOURS}))
    send(test, NOON)
    with pytest.raises(UsageError, match=f"late_rows='keep' of table hours: .*{words}") as refused:
        test.run()
    assert "late_rows='count'" in str(refused.value)
