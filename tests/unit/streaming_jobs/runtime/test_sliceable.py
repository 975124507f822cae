"""Which tables can be sliced, and which are refused with the reason. The plans are those of Spark 4.2, abridged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql.types import StructField, StructType, TimestampNTZType

from streaming_jobs.declare.rules import Unique
from streaming_jobs.declare.slices import Slices
from streaming_jobs.errors import UsageError
from streaming_jobs.examples.flights.streams import airport_hours, carrier_totals, flights_clean
from streaming_jobs.formats import Json
from streaming_jobs.runtime.sliceable import check_plan, sliceable, tables_with_slices
from streaming_jobs.runtime.spark_plan import EventWindows
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream
from tests.support.days import RECORD, declared

_CONVERTED = "precisetimestampconversion({at}, TimestampType, LongType)"


def window(length: int, slide: int | None = None, at: str = "at#1") -> str:
    """The column of a window, as Spark defines it; lengths in seconds."""
    time, each = _CONVERTED.format(at=at), (slide or length) * 1_000_000
    start = f"(({time} - CASE WHEN ((({time} - 0) % {each}) < cast(0 as bigint)) THEN 1 ELSE 2 END) - 0)"
    end = f"({start} + {length * 1_000_000})"
    return (
        f"named_struct(start, knownnullable(precisetimestampconversion({start}, LongType, TimestampType)), "
        f"end, knownnullable(precisetimestampconversion({end}, LongType, TimestampType)))"
    )


END_OF_WINDOW = (
    "precisetimestampconversion((precisetimestampconversion(window#6.end, TimestampType, LongType) - 1), "
    "LongType, TimestampType)"
)
READ = "+- RelationV2[_record#0, _bad#2] kafka-all-value kafka-all-value"
TUMBLING = f"""Aggregate [k#0, window#6], [k#0, window#6, count(1) AS n#2L]
+- Project [{window(3600)} AS window#6, k#0, at#1]
   +- Filter isnotnull(at#1)
      {READ}"""
SLIDING = f"""Project [w#7.start AS start#13, n#8L]
+- Aggregate [window#12], [window#12 AS w#7, count(1) AS n#8L]
   +- Filter isnotnull(at#1)
      +- Expand [[{window(3600, 600)}, at#1]], [window#12, at#1]
         {READ}"""
STACKED = f"""Aggregate [window#30], [window#30, sum(n#19L) AS n#24L]
+- Project [{window(86_400, at="window_time(window)#29")} AS window#30, n#19L]
   +- Project [{END_OF_WINDOW} AS window_time(window)#29, n#19L]
      +- Aggregate [window#6], [window#6, count(1) AS n#19L]
         +- Project [{window(3600)} AS window#6, at#1]
            {READ}"""
ROW_BY_ROW = f"""Project [at#1, n#2]
+- Filter (n#2 > 1)
   +- Generate explode(things#3), false, [n#2]
      {READ}"""
SESSIONS = f"""Aggregate [session_window#18], [session_window#18, count(1) AS n#14L]
+- Project [named_struct(start, at#1, end, at#1) AS session_window#18, at#1]
   {READ}"""
REFUSED = {
    "session windows": SESSIONS,
    "without a window": f"Aggregate [k#0], [k#0, count(1) AS n#2L]\n{READ}",
    "without a window ": f"Aggregate [date_trunc(hour, at#1, Some(UTC))], [count(1) AS n#2L]\n{READ}",
    "Deduplicate": f"Deduplicate [k#0]\n{READ}",
    "DeduplicateWithinWatermark": f"DeduplicateWithinWatermark [k#0]\n{READ}",
    "GlobalLimit": f"GlobalLimit 3\n+- LocalLimit 3\n   {READ}",
    "with itself": f"Join Inner, (a#1 = b#2)\n:{READ}\n{READ}",
}


def sliced(**options: Any) -> Any:
    return sliceable(declared(Slices("at", **options)))


def test_rows_of_one_record_and_windows_within_reach_are_sliced() -> None:
    hour, day = 3_600_000_000, 86_400_000_000
    assert check_plan(sliced(), ROW_BY_ROW) == ()
    assert check_plan(sliced(reach="1 hour"), TUMBLING) == (EventWindows(hour, hour, 0),)
    assert check_plan(sliced(reach="1 hour"), SLIDING) == (EventWindows(hour, hour // 6, 0),)
    assert check_plan(sliced(reach="25 hours"), STACKED) == (EventWindows(day, day, 0), EventWindows(hour, hour, 0))


@pytest.mark.parametrize(("plan", "reach"), [(TUMBLING, "59 minutes"), (SLIDING, "10 minutes"), (STACKED, "24 hours")])
def test_a_reach_shorter_than_the_windows_is_refused(plan: str, reach: str) -> None:
    with pytest.raises(UsageError, match="half empty"):
        check_plan(sliced(reach=reach), plan)


@pytest.mark.parametrize("reason", REFUSED)
def test_rows_that_depend_on_other_records_are_refused(reason: str) -> None:
    with pytest.raises(UsageError, match=reason.strip()):
        check_plan(sliced(reach="10 days"), REFUSED[reason])


def test_the_shipped_tables_with_event_times_can_be_sliced() -> None:
    assert [tables_with_slices(s) for s in (flights_clean, airport_hours, carrier_totals)] == [
        ["flights_clean"],
        ["airport_hours"],
        [],
    ]
    assert sliceable(airport_hours).event_time == sliceable(flights_clean, "flights_clean").event_time == "sched_dep"
    with pytest.raises(UsageError, match="is an upsert"):
        sliceable(carrier_totals)


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (declared(None), "declares no slices"),
        (declared(topic={"event_time": None, "lateness": None}), "declares no event time"),
        (declared(Slices("at", event_time="n")), "not a field of dates or times"),
        (replace(declared(), rules={"days": [Unique("n", on_fail="drop")]}), "takes rows out by the batch"),
    ],
)
def test_streams_that_cannot_be_sliced_are_refused_with_the_reason(stream: Stream, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sliceable(stream)
    with pytest.raises(UsageError, match="no table nights"):
        sliceable(stream, "nights")


def test_a_join_and_a_choice_of_tables_are_refused() -> None:
    def joined(a: object, b: object) -> object:
        return a, b

    sources = {name: KafkaTopic(name, declared().sources["value"].value) for name in ("a", "b")}
    table = DeltaTable("t", slices=Slices("at", event_time="at"))
    with pytest.raises(UsageError, match="joins topics a, b"):
        sliceable(Stream("joined", joined, sources, {"t": table}))
    two = {"t": table, "u": DeltaTable("u", slices=Slices("at", event_time="at"))}
    one = Stream("two", lambda a: a, {"a": sources["a"]}, two)
    with pytest.raises(UsageError, match="several tables"):
        sliceable(one)
    assert sliceable(one, "u").table.name == "u"
    assert RECORD.fieldNames() == ["at", "n"]


def test_times_without_a_zone_belong_to_no_day_of_another_zone() -> None:
    """Such a time is of UTC to Spark: in New York it may be of the day before, and the slice would lose its rows."""
    record = StructType([StructField("at", TimestampNTZType(), False)])
    for zone in ("America/New_York", "UTC"):
        topic = KafkaTopic("days", Json(record), event_time="at", lateness="1 hour")
        sink = DeltaTable("days", slices=Slices("at", zone=zone))
        stream = Stream("days", lambda value: value, {"value": topic}, {"days": sink})
        if zone == "UTC":
            assert sliceable(stream).event_time == "at"
        else:
            with pytest.raises(UsageError, match="has no time zone"):
                sliceable(stream)
