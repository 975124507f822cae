"""Drivers that write topics, killed at every point of a batch and at random moments: nothing is lost or doubled."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator

import pytest
from confluent_kafka import Consumer, Message

from streaming_jobs.platform.broker import Broker
from streaming_jobs.runtime.crash_points import POINTS, TOPIC_POINTS
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from tests.conftest import SettingsFactory
from tests.support.driver import assert_chained, driver, finished, ledger, other_kills, produce, rows
from tests.support.things import KEYS, thing
from tests.support.topic_reader import committed, headers

FLOWS = "tests.support.topic_flows"
STREAMS = "copied,both,total_changes"
PARTITIONS = 3
COUNT = 6000
TARGETS = ("copies", "halves", "total-changes")


@pytest.fixture
def fed(settings: SettingsFactory, broker: Broker) -> Iterator[tuple[Settings, str, Topics]]:
    """The topic `things` with 6,000 records, and three empty topics to write."""
    bootstrap = broker.start()
    made = settings({"kafka.bootstrap_servers": bootstrap})
    topics = Topics.of(made.kafka, bootstrap)
    markers = [f"__recourse.{pair}" for pair in ("copied.copies", "both.halves", "total_changes.total-changes")]
    for name in ("things", *TARGETS, *markers):
        if topics.describe(name):
            topics.delete(name)
    topics.create("things", 2)
    for name in TARGETS:
        topics.create(name, PARTITIONS)
    produce(bootstrap, "things", (thing(i) for i in range(COUNT)))
    yield made, bootstrap, topics


KILLS = ("copied:transaction_open:1", "both:secondary_committed:2", "total_changes:secondary_committed:1")
MORE_KILLS = other_kills(STREAMS, KILLS)


def test_every_point_of_a_batch_is_killed_at() -> None:
    assert {kill.split(":")[1] for kill in (*KILLS, *MORE_KILLS)} == {*POINTS, *TOPIC_POINTS}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kills", [KILLS, pytest.param(MORE_KILLS, marks=pytest.mark.long)])
def test_a_kill_at_any_point_of_a_batch_of_tables_and_topics(
    fed: tuple[Settings, str, Topics], kills: tuple[str, ...]
) -> None:
    settings, bootstrap, _ = fed
    arguments = ("--trigger", "available-now", "--set", "stream.max_offsets_per_trigger=700")
    arguments += ("--set", "streams.total_changes.state_partitions=1", "--streams")
    for kill in kills:
        process = driver(
            settings, bootstrap, *arguments, kill.partition(":")[0], flows=FLOWS, environment={"RECOURSE_CRASH": kill}
        )
        code, output = finished(process)
        assert code == -signal.SIGKILL, f"{kill}: {output[-3000:]}"
    code, output = finished(driver(settings, bootstrap, *arguments, STREAMS, flows=FLOWS))
    assert code == 0, output[-3000:]
    check(settings, bootstrap, COUNT)


def check(settings: Settings, bootstrap: str, count: int) -> None:
    """Every record once, in the order of its key, in topics, tables and ledgers."""
    copies = committed(bootstrap, "copies", PARTITIONS)
    assert sorted(numbers(copies)) == [*range(count)]
    assert_ordered(copies)
    halves = committed(bootstrap, "halves", PARTITIONS)
    assert sorted(numbers(halves)) == [*range(1, count, 2)]
    assert_ordered(halves)
    assert sorted(row["n"] for row in rows(settings, "both_table")) == [*range(0, count, 2)]
    last = {m.key(): json.loads(m.value() or b"")["c"] for m in committed(bootstrap, "total-changes", PARTITIONS)}
    assert last == {key.encode(): len(range(i, count, len(KEYS))) for i, key in enumerate(KEYS)}
    for table, topic in (("copied_batches", copies), ("both_table", halves)):
        assert_chained(entries := ledger(settings, table))
        assert sum(r.records for entry in entries for r in entry.offsets) == count
        where = {(m.partition(), m.offset()): int(headers(m)["recourse.batch"]) for m in topic}
        for entry in entries:
            for written in entry.written:
                own = [o for (p, o), b in where.items() if p == written.partition and b == entry.batch]
                assert (min(own), max(own) + 1, len(own)) == (written.first, written.end, written.records)
        assert sum(r.records for entry in entries for r in entry.written) == len(topic)


def numbers(records: Iterable[Message]) -> list[int]:
    return [json.loads(m.value() or b"")["n"] for m in records]


def assert_ordered(records: Iterable[Message]) -> None:
    """The records of a key are in the order of their source partition."""
    last: dict[bytes | None, int] = {}
    for m in records:
        offset = json.loads(m.value() or b"")["off"]
        assert offset > last.get(m.key(), -1), f"key {m.key()!r} is out of order"
        last[m.key()] = offset


class Outside(threading.Thread):
    """A reader of committed records that runs all the while, as any other program."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(daemon=True)
        self.seen: list[tuple[int, int, int]] = []
        self.over = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "outside",
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
            }
        )
        self._consumer.subscribe([topic])

    def run(self) -> None:
        while not self.over.is_set():
            for m in self._consumer.consume(1000, timeout=0.2):
                if m.error() is None:
                    self.seen.append((int(m.partition() or 0), int(m.offset() or 0), numbers([m])[0]))
        self._consumer.close()


def killed_at_random(settings: Settings, bootstrap: str, kills: int, seed: int, per_round: int) -> int:
    """Kill continuous drivers at random moments of their work while records come in; the number of records."""
    chance, count = random.Random(seed), COUNT
    arguments = ("--set", "stream.max_offsets_per_trigger=200", "--set", "stream.pace=live", "--streams", "copied,both")
    for kill in range(kills):
        table = ("copied_batches", "both_table")[kill % 2]
        process = driver(settings, bootstrap, *arguments, flows=FLOWS)
        try:
            until = time.monotonic() + 60
            before = size(settings, table)
            produce(bootstrap, "things", (thing(i) for i in range(count, count + per_round)))
            count += per_round
            while size(settings, table) <= before + 1 and process.poll() is None:
                assert time.monotonic() < until, f"no batch came in {table}"
                time.sleep(0.02)
            time.sleep(chance.random() * 0.7)
        finally:
            process.kill()
            process.communicate()
    return count


def size(settings: Settings, table: str) -> int:
    """The number of commits of a table, however many of them were cleaned up."""
    log = settings.tables / table / "_delta_log"
    return max((int(file.stem) for file in log.glob("[0-9]*.json") if file.stem.isdigit()), default=-1)


@pytest.mark.timeout(3600)
@pytest.mark.long
@pytest.mark.parametrize(("kills", "seed"), [(2, 7), (60, 11)])
def test_kills_at_random_moments_lose_nothing_double_nothing_and_keep_the_order(
    fed: tuple[Settings, str, Topics], kills: int, seed: int
) -> None:
    settings, bootstrap, _ = fed
    outside = Outside(bootstrap, "copies")
    outside.start()
    count = killed_at_random(settings, bootstrap, kills, seed, 300)
    code, output = finished(
        driver(settings, bootstrap, "--trigger", "available-now", "--streams", STREAMS, flows=FLOWS)
    )
    assert code == 0, output[-3000:]
    check(settings, bootstrap, count)
    until = time.monotonic() + 30
    while len(outside.seen) < count and time.monotonic() < until:
        time.sleep(0.1)
    outside.over.set()
    outside.join(30)
    assert sorted(n for _, _, n in outside.seen) == [*range(count)], "the reader that ran all the while saw the same"
