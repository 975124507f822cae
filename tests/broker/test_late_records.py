"""Records that are late by weeks: kept by the batch that drops them, rebuilt by days, and in no row twice."""

from __future__ import annotations

import json
import random
import signal
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd
import pytest
from confluent_kafka import Producer

from reprocessing.slices.late import late_days, rebuild_late
from reprocessing.slices.rebuild import Tools, Waits
from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.streams import airport_hours
from streaming_jobs.examples.flights.truth import KEYS, as_frame, differences, truth
from streaming_jobs.platform import table_rows
from streaming_jobs.runtime.sliceable import sliceable
from streaming_jobs.stream import Stream
from tests.broker.conftest import BenchFactory
from tests.support import ROOT
from tests.support.driver import Bench, command, driver, finished, produce, rows, variables
from tests.support.late_flows import summed

FLOWS = "tests.support.late_flows"
START = datetime(2026, 1, 1, tzinfo=UTC)
Event = tuple[datetime, str, int]


def shuffled(count: int, days: int, seed: int) -> list[Event]:
    """Events of so many days in the order in which they come: each up to `days` late."""
    chance = random.Random(seed)
    every = [(START + timedelta(minutes=chance.randrange(days * 1440)), f"k{n % 3}", n) for n in range(count)]
    return sorted(every, key=lambda event: event[0] + timedelta(days=chance.random() * days))


def send(bench: Bench, topic: str, events: Iterable[Event]) -> None:
    producer = Producer({"bootstrap.servers": bench.bootstrap, "enable.idempotence": True})
    for at, key, amount in events:
        value = json.dumps({"at": f"{at:%Y-%m-%dT%H:%M:%SZ}", "key": key, "amount": amount}).encode()
        producer.produce(topic, key=key.encode(), value=value, partition=amount % 2)
    assert producer.flush(30) == 0


def sums(events: Sequence[Event], before: datetime) -> dict[tuple[datetime, str], int]:
    """What a batch computation over all records has, up to the windows that are open."""
    found: dict[tuple[datetime, str], int] = defaultdict(int)
    for at, key, amount in events:
        if at < before:
            found[at.replace(minute=0, second=0), key] += amount
    return dict(found)


def sums_in(bench: Bench) -> dict[tuple[datetime, str], int]:
    there = rows(bench.settings, "hours")
    made = {(row["begin"], row["key"]): row["total"] for row in there}
    assert len(made) == len(there), "a window has two rows"
    return made


def tools(bench: Bench) -> Tools:
    return Tools(bench.settings, bench.topics, bench.bootstrap, lambda: bench.spark, waits=Waits(commit=60.0))


def environment(bench: Bench, topic: str) -> dict[str, str]:
    return {**variables(bench.settings.home, bench.bootstrap, FLOWS), "LATE_TOPIC": topic}


def verified(bench: Bench, topic: str) -> dict[str, str]:
    """The verdict on the row counts of each table; no comparison is wrong."""
    done = command(ROOT, environment(bench, topic), "verify", "-o", "json")
    [stream] = json.loads(done.stdout)["streams"]
    verdicts = {(each["table"], each["what"]): each["verdict"] for each in stream["comparisons"]}
    assert "wrong" not in verdicts.values(), done.stdout
    return {table: verdict for (table, what), verdict in verdicts.items() if what == "row counts"}


def closing(events: Sequence[Event], days: int) -> list[Event]:
    """Two events of one window after all others, which close the windows of the others, and their days."""
    after = START + timedelta(days=days + 2)
    return [(after, "k0", len(events)), (after + timedelta(minutes=30), "k0", len(events) + 1)]


def test_a_stream_of_shuffled_records_that_was_killed_has_every_record_once_its_late_days_are_rebuilt(
    bench: BenchFactory, topic: str
) -> None:
    made, stream, days = bench(), summed(topic), 30
    made.topics.create(topic, 2)
    events = shuffled(900, days, seed=29)
    send(made, topic, events[:300])
    made.run(stream)
    send(made, topic, events[300:600])
    crash = {"LATE_TOPIC": topic, "RECOURSE_CRASH": f"{stream.name}:secondary_committed:1+"}
    killed = driver(
        made.settings,
        made.bootstrap,
        "--streams",
        stream.name,
        "--trigger",
        "available-now",
        flows=FLOWS,
        environment=crash,
    )
    code, output = finished(killed)
    assert code == -signal.SIGKILL, output[-3000:]
    last = closing(events, days)
    send(made, topic, [*events[600:], *last])
    made.run(stream)

    whole, dropped = sums(events, last[0][0]), rows(made.settings, "hours_late")
    places = {(row["partition"], row["offset"]) for row in dropped}
    assert len(places) == len(dropped) > 300, "each late record is kept once"
    assert sum(sums_in(made).values()) + sum(amount_of(events, last, place) for place in places) == sum(whole.values())
    assert verified(made, topic) == {"hours": "ok", "hours_late": "ok", "hours_dead_letters": "ok"}

    sliced = sliceable(stream)
    lacking = late_days(made.settings, sliced)
    assert all(day.state == "to rebuild" for day in lacking) and len(lacking) > 20
    first = rebuild_late(tools(made), sliced, most=20)
    assert len(first.left) == len(lacking) - 20
    assert not rebuild_late(tools(made), sliced).left
    assert sums_in(made) == whole
    assert not rebuild_late(tools(made), sliced).slices, "nothing is rebuilt a second time"
    assert verified(made, topic)["hours_late"] == "ok"


def amount_of(events: Sequence[Event], last: Sequence[Event], place: tuple[int, int]) -> int:
    """The amount of the record at a partition and an offset: records alternate between partitions by their amount."""
    partition, offset = place
    return [amount for _, _, amount in (*events, *last) if amount % 2 == partition][offset]


def rebuilt_wholly(made: Bench, stream: Stream, runs: int = 40) -> int:
    """Run the schedule's job until no closed day lacks records; the number of slices. At most so many runs."""
    slices = 0
    for _ in range(runs):
        report = rebuild_late(tools(made), sliceable(stream))
        slices += len(report.slices)
        if not report.days("to rebuild"):
            assert not report.left
            return slices
    raise AssertionError(f"days lack records after {runs} runs")


@pytest.mark.long
def test_a_recovery_and_its_undo_lose_no_late_record(bench: BenchFactory, topic: str) -> None:
    made, stream, days = bench(), summed(topic), 30
    made.topics.create(topic, 2)
    events = shuffled(600, days, seed=7)
    last = closing(events, days)
    send(made, topic, events[:300])
    made.run(stream)
    send(made, topic, [*events[300:], *last])
    made.run(stream)
    whole = sums(events, last[0][0])
    assert rebuilt_wholly(made, stream) and sums_in(made) == whole
    env = environment(made, topic)
    planned = command(ROOT, env, "recover", "plan", "hours", "--to-batch", "0", "--max-changed", "100%", "-o", "json")
    assert planned.returncode == 0, planned.stderr[-3000:]
    plan = json.loads(planned.stdout)["id"]
    for step in ("apply", "undo"):
        done = command(ROOT, env, "recover", step, plan, "--yes")
        assert done.returncode == 0, done.stderr[-3000:]
        assert late_days(made.settings, sliceable(stream)), f"after {step}, slices from before it do not count"
        rebuilt_wholly(made, stream)
        assert sums_in(made) == whole, step
        assert verified(made, topic)["hours_late"] == "ok"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_flights_shuffled_by_thirty_days_with_a_lateness_of_a_minute_equal_the_batch(
    bench: BenchFactory, topic: str
) -> None:
    flown = replace(
        airport_hours,
        sources={p: replace(source, name=topic, lateness="1 minute") for p, source in airport_hours.sources.items()},
        sinks={name: replace(sink, late_rows="keep") for name, sink in airport_hours.sinks.items()},
    )
    made, order = bench({"stream.max_offsets_per_trigger": 20_000}), np.random.default_rng(29)
    made.topics.create(topic, 4)
    flights = dataset.departures()
    comes = flights["sched_dep"] + pd.to_timedelta(order.random(len(flights)) * 30, unit="D")
    sent = dataset.records_of(flights.iloc[np.argsort(comes.to_numpy(), kind="stable")])
    closes = {**json.loads(sent.values[-1]), "sched_dep": "2014-03-01T00:00:00Z"}
    records = [*zip(sent.keys, sent.values, strict=True), (b"last", json.dumps(closes).encode())]
    produce(made.bootstrap, topic, records)
    assert made.run(flown).status.error is None
    late = rows(made.settings, "airport_hours_late")
    assert len({(row["partition"], row["offset"]) for row in late}) == len(late) > 100_000
    expected = truth("airport_hours")

    def differing() -> list[str]:
        actual = as_frame(table_rows.rows(made.settings.tables / "airport_hours"))
        return differences(expected, actual[list(expected.columns)], KEYS["airport_hours"])

    assert differing(), "the stream alone has dropped them"
    assert rebuilt_wholly(made, flown) >= 365 // 31
    assert len(expected) > 15_000 and not differing()
