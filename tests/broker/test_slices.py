"""Slices on a real broker with Spark: equal to a run that never erred, beside a running stream, and at a kill."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from confluent_kafka import Producer
from deltalake import DeltaTable

from reprocessing.slices.base import SliceOpen
from reprocessing.slices.rebuild import SliceReport, Tools, Waits, rebuild
from streaming_jobs.declare.slices import Slices
from streaming_jobs.examples.flights.streams import FLIGHTS_BY_SCHEDULE, airport_hours, flights_clean
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import take_snapshot
from streaming_jobs.runtime.sliceable import sliceable
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.sinks.delta.log import noted
from streaming_jobs.state.slice_requests import SliceRequests
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import Stream
from tests.broker.conftest import BenchFactory
from tests.support import ROOT
from tests.support.driver import Bench, command, on_topic, rows
from tests.support.waiting import meanwhile, wait_for

AIRPORTS = ("EWR", "JFK", "LGA")
FIRST = datetime(2013, 11, 1, tzinfo=UTC)
DAY = "2013-11-03"
"""The day on which daylight saving time ends in New York: from 04:00 UTC to 05:00 UTC of the next day."""
BEGIN, END = datetime(2013, 11, 3, 4, tzinfo=UTC), datetime(2013, 11, 4, 5, tzinfo=UTC)
Flight = dict[str, Any]


def flight(number: int, at: datetime, sent: datetime | None = None) -> tuple[datetime, Flight]:
    """A flight and the time when it is sent, by default that of its schedule."""
    made = {
        "year": at.year,
        "month": at.month,
        "day": at.day,
        "sched_dep": f"{at:%Y-%m-%dT%H:%M:%SZ}",
        "actual_dep": f"{at:%Y-%m-%dT%H:%M:%SZ}",
        "dep_delay": number % 50,
        "arr_delay": 1,
        "carrier": "AA",
        "flight": number,
        "tailnum": "N1",
        "origin": AIRPORTS[number % 3],
        "dest": "SFO",
        "air_time": 300,
        "distance": 2500,
        "cancelled": False,
    }
    return sent or at, made


def schedule(days: int) -> list[tuple[datetime, Flight]]:
    """A flight each half an hour; of each four, one is sent hours after the others."""
    every = [FIRST + timedelta(minutes=30 * number) for number in range(48 * days)]
    made = [flight(n, at, at + timedelta(hours=7) if n % 4 == 0 else None) for n, at in enumerate(every)]
    return sorted(made, key=lambda each: each[0])


def send(bench: Bench, topic: str, flights: Iterable[tuple[datetime, Flight]]) -> None:
    producer = Producer({"bootstrap.servers": bench.bootstrap, "enable.idempotence": True})
    for sent, made in flights:
        key, value = str(made["flight"]).encode(), json.dumps(made).encode()
        producer.produce(topic, key=key, value=value, timestamp=int(sent.timestamp() * 1000))
    assert producer.flush(30) == 0


def truth(flights: Iterable[tuple[datetime, Flight]]) -> dict[tuple[str, datetime], tuple[int, float, int]]:
    """By airport and hour: flights, mean and greatest delay."""
    hours: dict[tuple[str, datetime], list[int]] = {}
    for _, made in flights:
        at = datetime.fromisoformat(made["sched_dep"]).replace(minute=0, second=0)
        hours.setdefault((made["origin"], at), []).append(made["dep_delay"])
    return {key: (len(each), sum(each) / len(each), max(each)) for key, each in hours.items()}


def hours_of(bench: Bench, table: str = "airport_hours") -> dict[tuple[str, datetime], tuple[int, float, int]]:
    there = rows(bench.settings, table)
    made = {(r["origin"], r["window_start"]): (r["flights"], r["mean_dep_delay"], r["max_dep_delay"]) for r in there}
    assert len(made) == len(there), "an hour has two rows"
    return made


def plant(bench: Bench, table: str, stream: str, change: dict[str, str], where: str) -> None:
    """Wrong rows under an entry of the stream, as a bug of its own would have written them."""
    entry = LedgerEntry("upkeep", stream, table, 1, -1, note="planted")
    DeltaTable(bench.settings.tables / table).update(updates=change, predicate=where, commit_properties=noted(entry))


def rebuilt(bench: Bench, stream: Stream, begin: str, end: str | None = None, **options: Any) -> SliceReport:
    tools = Tools(bench.settings, bench.topics, bench.bootstrap, lambda: bench.spark, waits=Waits(commit=60.0))
    return rebuild(tools, sliceable(stream), begin, end, **options)


def in_day(key: tuple[str, datetime]) -> bool:
    return BEGIN <= key[1] < END


def test_a_day_equals_a_run_that_never_erred_with_late_flights_at_its_borders(bench: BenchFactory, topic: str) -> None:
    made, stream = bench(), on_topic(airport_hours, topic)
    made.topics.create(topic, 2)
    ahead = FIRST + timedelta(days=25)
    on_time = [*schedule(6), flight(1, ahead), flight(2, ahead + timedelta(hours=2))]
    send(made, topic, on_time)
    made.run(stream)
    late_at = ahead + timedelta(hours=3)
    borders = [BEGIN, END - timedelta(seconds=1), BEGIN + timedelta(hours=25, minutes=-90), BEGIN, END]
    late = [flight(9 + n, at, late_at) for n, at in enumerate([*borders, BEGIN - timedelta(seconds=1)])]
    send(made, topic, late)
    made.run(stream)
    never_late, whole = truth(on_time), truth([*on_time, *late])
    closed = {key: each for key, each in never_late.items() if key[1] < FIRST + timedelta(days=10)}
    assert hours_of(made) == closed, "the stream itself drops late flights"

    plant(made, "airport_hours", stream.name, {"flights": "55"}, "window_start = '2013-11-03T12:00:00Z'")
    assert rebuilt(made, stream, DAY, dry_run=True).outcome == "dry run"
    report = rebuilt(made, stream, DAY)
    assert (report.outcome, report.late, report.tries) == ("committed", len(late), 1)
    mended = hours_of(made)
    assert {k: v for k, v in mended.items() if in_day(k)} == {k: v for k, v in whole.items() if in_day(k)}
    assert {k: v for k, v in mended.items() if not in_day(k)} == {k: v for k, v in closed.items() if not in_day(k)}
    changed = {k for k, v in whole.items() if in_day(k) and closed.get(k) != v} | {
        k for k in closed if k[1] == datetime(2013, 11, 3, 12, tzinfo=UTC)
    }
    assert report.difference.counts.corrected + report.difference.counts.new == len(changed) > 3
    assert rebuilt(made, stream, DAY).outcome == "unchanged"
    assert rebuilt(made, stream, "2013-11-02", "2013-11-06").outcome == "committed", "the late ones of other days"
    kept = {k: v for k, v in hours_of(made).items() if k[1] >= datetime(2013, 11, 2, 4, tzinfo=UTC)}
    wanted = {
        k: v for k, v in whole.items() if datetime(2013, 11, 2, 4, tzinfo=UTC) <= k[1] < FIRST + timedelta(days=10)
    }
    assert kept == wanted
    with pytest.raises(SliceOpen, match="still open"):
        rebuilt(made, stream, "2013-11-26")
    assert not check_start(take_snapshot(made.settings, stream, made.topics))
    made.run(stream)  # it goes on


def row_wise(topic: str) -> Stream:
    """Rows of one record with an event time, sliced by the local date."""
    declared = flights_clean.primary
    assert isinstance(declared, Declared)
    sink = replace(declared, slices=Slices("flight_date", zone="America/New_York"))
    made = replace(flights_clean, sources={"flights": FLIGHTS_BY_SCHEDULE}, sinks={"flights_clean": sink})
    return on_topic(made, topic)


@contextmanager
def running(bench: Bench, stream: Stream) -> Iterator[StreamRunner]:
    """The stream runs in this process, looked after by a thread as a session's main thread does."""
    runner = bench.start(stream, "continuous")

    def look(over: threading.Event) -> None:
        while not over.wait(0.05) and not runner.ended:
            runner.poll(bench.spark)

    try:
        with meanwhile(look):
            yield runner
    finally:
        runner.request_stop()
        bench.finish(runner)


def test_the_running_driver_commits_the_slice_and_the_stream_goes_on(bench: BenchFactory, topic: str) -> None:
    made, stream = bench(), row_wise(topic)
    made.topics.create(topic, 2)
    whole = schedule(6)
    send(made, topic, whole[:200])
    with running(made, stream) as runner:
        wait_for(lambda: runner.status.rows_written >= 200, "the first flights")
        plant(made, "flights_clean", stream.name, {"carrier": "'XX'"}, "flight_date = '2013-11-03'")
        report = rebuilt(made, stream, DAY)
        assert (report.outcome, report.difference.counts.gone, report.difference.counts.new) == ("committed", 0, 0)
        assert report.difference.counts.corrected == report.difference.new_rows > 10
        send(made, topic, whole[200:])
        wait_for(lambda: runner.status.rows_written >= len(whole), "the flights after it")
    there = rows(made.settings, "flights_clean")
    assert sorted((r["flight"], r["carrier"]) for r in there) == [(n, "AA") for n in range(len(whole))]
    assert {r["flight_date"] for r in there} >= {date(2013, 11, 3), date(2013, 11, 4)}
    outcomes = SliceRequests.of(made.settings, stream.name).history()
    assert [each.state for each in outcomes] == ["committed"]


@pytest.mark.long
@pytest.mark.parametrize("point", ["slice_staged", "slice_asked"])
def test_a_rebuild_that_is_killed_is_simply_run_again(bench: BenchFactory, topic: str, point: str) -> None:
    made, stream = bench(), row_wise(topic)
    made.topics.create(topic, 2)
    send(made, topic, schedule(4))
    made.run(stream)
    plant(made, "flights_clean", stream.name, {"carrier": "'XX'"}, "flight_date = '2013-11-03'")
    flows = made.settings.home / "code"
    flows.mkdir()
    (flows / "slice_flows.py").write_text(
        f"from tests.broker.test_slices import row_wise\nstream = row_wise({topic!r})\n"
    )
    environment = {
        **os.environ,
        "RECOURSE_HOME": str(made.settings.home),
        "RECOURSE_FLOWS": '["slice_flows"]',
        "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": made.bootstrap,
        "PYTHONPATH": os.pathsep.join([str(flows), str(ROOT)]),
        "RECOURSE_CRASH": f"{stream.name}:{point}:0",
    }
    killed = command(flows, environment, "slices", "rebuild", stream.name, "--from", DAY)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert {r["carrier"] for r in rows(made.settings, "flights_clean")} == {"AA", "XX"}
    report = rebuilt(made, stream, DAY)
    there = rows(made.settings, "flights_clean")
    assert {r["carrier"] for r in there} == {"AA"} and len({r["flight"] for r in there}) == len(there) == 192
    assert report.outcome == ("committed" if point == "slice_staged" else "unchanged")
    assert not SliceRequests.of(made.settings, stream.name).waiting()
    assert not list((made.settings.tables / "flights_clean" / "_slices").iterdir())
