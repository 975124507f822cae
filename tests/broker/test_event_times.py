"""Event times that lie: in the far future, which would end a windowed stream, and behind the watermark."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from streaming_jobs.state.first_status import first_status
from streaming_jobs.stream import Stream
from tests.broker.conftest import BenchFactory
from tests.support.driver import Bench, ledger, on_topic, produce, rows
from tests.support.things import KEYS, thing, windows


def counted(bench: Bench) -> Counter[str]:
    """Records in closed windows, by the window's begin."""
    counts: Counter[str] = Counter()
    for row in rows(bench.settings, "windows"):
        counts[str(row["start"])[17:19]] += row["c"]
    return counts


def of_time(text: str) -> tuple[bytes, bytes]:
    """A record with this event time."""
    return b"x", json.dumps({"k": KEYS[0], "n": 1, "t": text}).encode()


@pytest.mark.timeout(600)
def test_a_far_future_event_time_is_a_dead_letter_and_late_rows_are_counted_one_by_one(
    bench: BenchFactory, topic: str
) -> None:
    made = bench()
    made.topics.create(topic, 2)
    stream = on_topic(windows, topic)
    far = ("9999-12-31T23:59:59.999999Z", "2999-01-01T00:00:00Z")
    old = "0001-01-01T00:00:00Z"
    produce(made.bootstrap, topic, [*map(thing, range(3000)), *map(of_time, far)])
    made.run(stream)
    produce(made.bootstrap, topic, [*map(thing, range(101)), of_time(old), *map(thing, range(3000, 6000))])
    status = made.run(stream).status
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

    without = replace(stream, name="free", sinks={"w": replace(stream.primary, name="free")})
    unbounded = {p: replace(source, max_ahead=None) for p, source in without.sources.items()}
    free: Stream = replace(without, sources=unbounded)
    ended = made.run(free).status
    assert ended.state == "stopped" and ended.watermark_ahead_s > 200 * 365 * 86_400
    assert any("lies" in warning and "after the newest record's own timestamp" in warning for warning in ended.warnings)
