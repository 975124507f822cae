"""Event times that lie: in the far future, which would end a windowed stream, and behind the watermark."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs.declare.topic import ComputedTime, EpochSeconds
from streaming_jobs.state.status import first_status
from streaming_jobs.stream import DeltaTable, Stream, stream
from tests.broker.conftest import BenchFactory
from tests.support.driver import Bench, ledger, on_topic, produce, rows
from tests.support.things import BEGIN, KEYS, THINGS, thing, windows

NUMBERED = replace(THINGS, event_time=EpochSeconds("n"), lateness="10 seconds")
SHIFTED = replace(NUMBERED, event_time=ComputedTime(lambda t: pc.add(t, pa.scalar(1, pa.duration("s"))), column="at"))


@stream(source=NUMBERED, sink=DeltaTable("numbered"))
def numbered(things: DataFrame) -> DataFrame:
    """Records by a thousand seconds of their number."""
    return things.groupBy(F.window("event_time", "1000 seconds")).count().select("window.start", "count")


@stream(source=SHIFTED, sink=DeltaTable("shifted"))
def shifted(things: DataFrame) -> DataFrame:
    """Each record with the time that is made of its own."""
    return things.select("n", "t", "at")


def counted(bench: Bench) -> Counter[str]:
    """Records in closed windows, by the window's begin."""
    counts: Counter[str] = Counter()
    for row in rows(bench.settings, "windows"):
        counts[str(row["start"])[17:19]] += row["c"]
    return counts


def of_time(text: str) -> tuple[bytes, bytes]:
    """A record with this event time."""
    return b"x", json.dumps({"k": KEYS[0], "n": 1, "t": text}).encode()


def test_a_far_future_event_time_is_a_dead_letter_and_late_rows_are_counted_one_by_one(
    bench: BenchFactory, topic: str
) -> None:
    made = bench()
    made.topics.create(topic, 2)
    by_time = on_topic(windows, topic)
    far = ("9999-12-31T23:59:59.999999Z", "2999-01-01T00:00:00Z")
    old = "0001-01-01T00:00:00Z"
    produce(made.bootstrap, topic, [*map(thing, range(3000)), *map(of_time, far)])
    made.run(by_time)
    produce(made.bootstrap, topic, [*map(thing, range(101)), of_time(old), *map(thing, range(3000, 6000))])
    status = made.run(by_time).status
    assert counted(made) == {"00": 1000, "10": 1000, "20": 1000, "30": 1000}, "open: from second 40 on"
    letters = rows(made.settings, "windows_dead_letters")
    assert [letter["reason"] for letter in letters] == ["event_time_ahead"] * 2
    assert "'t' is 9999-12-31 23:59:59.999999, more than 1 day after the record's own timestamp, 2" in " ".join(
        letter["detail"] for letter in letters
    )
    assert sum(entry.rows.get("late", 0) for entry in ledger(made.settings, "windows")) == 102
    assert status.late_rows == 102 > status.late_rows_dropped > 0, "Spark counts groups"
    assert any("102 records" in warning and "lateness" in warning for warning in status.warnings)
    assert status.watermark_ahead_s == 0.0
    totals = first_status(made.settings, "windows").totals
    assert totals is not None and totals.late_rows == 102, "after a restart too"

    without = replace(by_time, name="free", sinks={"w": replace(by_time.primary, name="free")})
    unbounded = {p: replace(source, max_ahead=None) for p, source in without.sources.items()}
    free: Stream = replace(without, sources=unbounded)
    ended = made.run(free).status
    assert ended.state == "stopped" and ended.watermark_ahead_s > 200 * 365 * 86_400
    assert any("lies" in warning and "after the newest record's own timestamp" in warning for warning in ended.warnings)


def test_numbers_and_functions_make_event_times(bench: BenchFactory, topic: str) -> None:
    made = bench()
    made.topics.create(topic, 2)
    far = json.dumps({"k": KEYS[0], "n": 2_000_000_000_000, "t": BEGIN.isoformat()}).encode()
    produce(made.bootstrap, topic, [*map(thing, range(4000)), (b"x", far)])
    status = made.run(on_topic(numbered, topic)).status
    made.run(on_topic(shifted, topic))
    assert status.watermark == "1970-01-01T01:06:29.000Z", "the greatest number is 3999"
    found = {row["start"].timestamp(): row["count"] for row in rows(made.settings, "numbered")}
    assert found == {0.0: 1000, 1000.0: 1000, 2000.0: 1000}
    assert [letter["reason"] for letter in rows(made.settings, "numbered_dead_letters")] == ["event_time_out_of_range"]
    times = rows(made.settings, "shifted")
    assert len(times) == 4001 and all(row["at"] - row["t"] == timedelta(seconds=1) for row in times)
