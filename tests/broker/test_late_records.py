"""Records that are late by weeks: kept by the batch that drops them, rebuilt by days, and in no row twice."""

from __future__ import annotations

import json
import random
import signal
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import numpy as np
import pytest
from confluent_kafka import Producer

from orchestration.bundle.job import Bundle
from orchestration.slices.late import JOB, definitions, verdict
from reprocessing.slices.late import LateReport, late_days, rebuild_late
from reprocessing.slices.rebuild import Tools, Waits
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.examples.flights.dataset import departures, records_of
from streaming_jobs.examples.flights.streams import airport_hours
from streaming_jobs.examples.flights.truth import as_frame, differences, truth
from streaming_jobs.platform.table_rows import rows as table_rows
from streaming_jobs.runtime.sliceable import sliceable
from streaming_jobs.settings import Settings
from streaming_jobs.stream import DeltaTable, Stream
from tests.broker.conftest import BenchFactory
from tests.support import ROOT
from tests.support.driver import Bench, command, driver, finished, on_topic, rows, variables
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


def environment(bench: Bench, topic: str, **further: str) -> dict[str, str]:
    return {**variables(bench.settings.home, bench.bootstrap, FLOWS), "LATE_TOPIC": topic, **further}


def recourse(bench: Bench, topic: str, *arguments: str, code: str = "right") -> Any:
    done = command(ROOT, environment(bench, topic, LATE_CODE=code), *arguments)
    assert done.returncode == 0, (done.stdout, done.stderr[-3000:])
    return done.stdout


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


@pytest.mark.timeout(300)
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


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_recovery_brings_the_late_days_back_and_its_undo_too(bench: BenchFactory, topic: str) -> None:
    made, days = bench(), 6
    made.topics.create(topic, 2)
    events = shuffled(300, days, seed=30)
    last = closing(events, days)
    send(made, topic, events[:100])
    made.run(summed(topic))
    recourse(made, topic, "savepoints", "create", "hours")
    for part in (events[100:200], [*events[200:], *last]):
        send(made, topic, part)
        made.run(summed(topic, "wrong"))
    sliced, whole = sliceable(summed(topic)), sums(events, last[0][0])
    while rebuild_late(tools(made), sliceable(summed(topic, "wrong"))).left:
        pass
    wrong = sums_in(made)
    assert wrong != whole and not late_days(made.settings, sliced)

    plan = json.loads(recourse(made, topic, "recover", "plan", "hours", "--to-batch", "0", "-o", "json"))
    recourse(made, topic, "recover", "apply", plan["id"], "--yes")
    assert late_days(made.settings, sliced), "the replay dropped late records again, and its rows lack them"
    recourse(made, topic, "late", "rebuild", "hours")
    assert sums_in(made) == whole and not late_days(made.settings, sliced)
    assert verified(made, topic)["hours_late"] == "ok"
    made.run(summed(topic))

    recourse(made, topic, "recover", "undo", plan["id"], "--yes", code="wrong")
    assert sums_in(made) == wrong, "the undo put the slices back, too"
    assert late_days(made.settings, sliced), "which of them have the late records is found out anew"
    recourse(made, topic, "late", "rebuild", "hours", code="wrong")
    assert not late_days(made.settings, sliced)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_flights_shuffled_by_30_days_with_a_lateness_of_a_minute_equal_a_batch_once_the_schedule_has_run(
    bench: BenchFactory, topic: str
) -> None:
    made = bench({"streams.airport_hours.lateness": "1 minute", "stream.max_offsets_per_trigger": 30_000})
    table = airport_hours.primary
    assert isinstance(table, DeltaTable)
    stream = replace(on_topic(airport_hours, topic), sinks={table.name: replace(table, late_rows="keep")})
    made.topics.create(topic, 4)
    flights = departures()
    late = np.random.default_rng(29).random(len(flights)) * 30
    departed = flights["departs_at"].astype("datetime64[ms, UTC]").astype("int64").to_numpy()
    order = np.argsort(departed + late * 86_400_000)
    producer = Producer({"bootstrap.servers": made.bootstrap, "enable.idempotence": True, "linger.ms": 50})
    sent = records_of(flights.iloc[order])
    for key, value in zip(sent.keys, sent.values, strict=True):
        while True:
            try:
                producer.produce(topic, key=key, value=value)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(60) == 0
    made.run(stream)
    ahead = json.loads(sent.values[0]) | {"sched_dep": "2014-01-05T00:00:00Z"}
    for hours in (0, 3):
        ahead["sched_dep"] = f"2014-01-05T0{hours}:00:00Z"
        producer.produce(topic, key=b"ahead", value=json.dumps(ahead).encode())
        producer.flush(30)
        made.run(stream)
    sliced = sliceable(stream)
    lacking = late_days(made.settings, sliced)
    assert sum(day.records for day in lacking) > 100_000
    assert not verdict(made.settings, sliced).passed
    ticks = 0
    while run_schedule(made, stream):
        ticks += 1
    assert ticks == -(-len(lacking) // 31)
    assert verdict(made.settings, sliced).passed
    expected, actual = truth("airport_hours"), as_frame(table_rows(made.settings.tables / "airport_hours"))
    before = actual[actual["window_start"] < "2014-01-05"]
    assert not differences(expected, before, ["origin", "window_start"])


def run_schedule(bench: Bench, stream: Stream) -> int:
    """One tick of the schedule, whose runs are executed; returns how many there were."""

    def rebuilt(_: Settings, of: Stream, most: int, __: Any) -> list[LateReport]:
        return [rebuild_late(tools(bench), sliceable(of), most=most)]

    bundle = Bundle("late", "default", (), bench.settings.home)
    topology = Topology({stream.name: stream})
    defs = definitions(bench.settings, topology, bundle, dg.in_process_executor, rebuilt)
    with dg.instance_for_test() as instance:
        context = dg.build_schedule_context(instance=instance, scheduled_execution_time=datetime.now(UTC))
        requests = defs.resolve_schedule_def(JOB).evaluate_tick(context).run_requests or []
        for request in requests:
            result = defs.resolve_job_def(JOB).execute_in_process(instance=instance, run_config=request.run_config)
            assert result.success
    return len(requests)
