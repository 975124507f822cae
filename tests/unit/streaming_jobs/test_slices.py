"""The declaration of slices, and the days that a person names."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import get_args

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.declare.slices import Slices, slice_range
from streaming_jobs.declare.table import LateRows
from streaming_jobs.errors import RecourseError, UsageError
from streaming_jobs.formats import Json
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream
from tests.support.days import days

ROWS = StructType([StructField("at", TimestampType()), StructField("n", LongType()), StructField("s", StringType())])
NEW_YORK = Slices("at", zone="America/New_York")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zone": "Mars/Olympus"}, "not a time zone"),
        ({"reach": "soon"}, "not a duration"),
        ({"first_day": "2013"}, "not a day"),
    ],
)
def test_a_declaration_that_cannot_hold_is_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(RecourseError, match=words):
        Slices("at", **options)


def test_a_table_has_slices_of_a_time_in_rows_that_are_appended() -> None:
    assert DeltaTable("t", schema=ROWS, slices=Slices("at")).slices == Slices("at")
    with pytest.raises(UsageError, match="upsert"):
        DeltaTable("t", schema=ROWS, keys=["n"], slices=Slices("at"))
    with pytest.raises(UsageError, match="not a column"):
        DeltaTable("t", schema=ROWS, slices=Slices("on"))
    with pytest.raises(UsageError, match="is a string"):
        DeltaTable("t", schema=ROWS, slices=Slices("s"))


def test_late_records_are_kept_for_a_table_with_slices_of_one_topic_with_an_event_time() -> None:
    def stream(sink: DeltaTable, **topic: str) -> Stream:
        return Stream("s", lambda t: t, {"t": KafkaTopic("t", Json(ROWS), **topic)}, {"t": sink})  # type: ignore[arg-type]

    keeping = DeltaTable("t", slices=Slices("at"), late_rows="keep")
    timed = {"event_time": "at", "lateness": "1 hour"}
    assert stream(keeping, **timed).late_tables == {"t": "t_late"}
    assert "t_late" in stream(keeping, **timed).table_names
    assert not stream(DeltaTable("t", slices=Slices("at")), **timed).late_tables
    with pytest.raises(UsageError, match="it has none") as refused:
        DeltaTable("t", late_rows="keep")
    assert "slices=Slices(column, reach=...)" in str(refused.value)
    with pytest.raises(UsageError, match="late_rows='dead_letter'"):
        DeltaTable("t", slices=Slices("at"), late_rows="dead_letter")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="one source, a topic with event_time") as untimed:
        stream(keeping)
    assert "declare event_time and lateness of t" in str(untimed.value)
    topics = {name: KafkaTopic(name, Json(ROWS), **timed) for name in ("a", "b")}  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="one source"):
        Stream("s", lambda a, b: a or b, topics, {"t": keeping})


def test_keeping_late_records_is_no_other_code() -> None:
    source = {"value": KafkaTopic("t", Json(ROWS), event_time="at", lateness="1 hour")}
    versions = {
        code_version(Stream("s", days, source, {"t": DeltaTable("t", slices=Slices("at"), late_rows=late)}), ()).hash
        for late in get_args(LateRows)
    }
    assert len(versions) == 1


@pytest.mark.parametrize(
    ("day", "begin", "hours"),
    [("2013-03-01", 5, 24), ("2013-03-10", 5, 23), ("2013-07-04", 4, 24), ("2013-11-03", 4, 25), ("2013-11-04", 5, 24)],
)
def test_a_day_is_one_of_the_declared_calendar(day: str, begin: int, hours: int) -> None:
    made = slice_range(NEW_YORK, "timestamp", day, None)
    assert made.begin == datetime.combine(date.fromisoformat(day), datetime.min.time(), UTC) + timedelta(hours=begin)
    assert made.end - made.begin == timedelta(hours=hours)


def test_times_and_dates_of_a_slice_are_local_unless_they_say_otherwise() -> None:
    local = slice_range(NEW_YORK, "timestamp", "2013-07-04T05:00", "2013-07-04T06:30")
    assert (local.begin, local.end - local.begin) == (datetime(2013, 7, 4, 9, tzinfo=UTC), timedelta(minutes=90))
    assert slice_range(NEW_YORK, "timestamp", "2013-07-04T09:00Z", "2013-07-04T10:30+00:00") == local
    naive = slice_range(NEW_YORK, "timestamp_ntz", "2013-07-04", None)
    assert naive.bounds[0] == datetime(2013, 7, 4, 4)
    assert slice_range(NEW_YORK, "date", "2013-11-03", None).bounds == (date(2013, 11, 3), date(2013, 11, 4))
    with pytest.raises(UsageError, match="has dates"):
        slice_range(NEW_YORK, "date", "2013-11-03T05:00", "2013-11-04")


@pytest.mark.parametrize(
    ("begin", "end"),
    [("yesterday", None), ("2013-03-02", "2013-03-02"), ("2013-03-02", "2013-03-01"), ("2013-03-02T05:00", None)],
)
def test_what_is_no_range_is_refused(begin: str, end: str | None) -> None:
    with pytest.raises(UsageError):
        slice_range(NEW_YORK, "timestamp", begin, end)
