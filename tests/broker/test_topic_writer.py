"""The writer of a topic on a real broker: one transaction per batch, markers, fencing, replaced clients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from streaming_jobs.errors import ConfigurationError, Fenced
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import Settings, TopicSinkSettings
from streaming_jobs.sinks.kafka.clients import producer_config
from streaming_jobs.sinks.kafka.markers import ensure_marker_topic, marker_topic
from streaming_jobs.sinks.kafka.producer import Outgoing
from streaming_jobs.sinks.kafka.writer import Clients, TransactionWriter
from streaming_jobs.sources.connection import client_config
from streaming_jobs.sources.topics import Topics
from tests.support import ROOT
from tests.support.topic_reader import MURMUR2, committed, murmur2, partition_of
from tests.support.waiting import wait_for

PARTITIONS = 3
STREAM = "orders"
QUICK = TopicSinkSettings(transaction_timeout=timedelta(seconds=8))


@dataclass
class Records:
    """Records of one batch: each its own number, of ten keys."""

    topic: str
    numbers: Sequence[int]
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    most_bytes: int = 1_048_588

    @property
    def count(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Outgoing]:
        for number in self.numbers:
            yield Outgoing(self.topic, f"k{number % 10}".encode(), str(number).encode())


@dataclass
class Place:
    """A topic on the shared broker, and writers of it."""

    bootstrap: str
    topic: str
    settings: TopicSinkSettings = QUICK
    producer: Callable[[dict[str, Any]], Any] = Producer

    @property
    def config(self) -> dict[str, Any]:
        return client_config(Settings.load({}).kafka, self.bootstrap)

    def writer(self, generation: int = 1, **changed: Any) -> TransactionWriter:
        consumer = changed.pop("consumer", Consumer)
        clients = Clients(self.config, producer=changed.pop("producer", self.producer), consumer=consumer)
        settings = changed.pop("settings", self.settings)
        writer = TransactionWriter(STREAM, f"topic:{self.topic}", self.topic, settings, clients, **changed)
        writer.open(generation)
        return writer

    def entry(self, batch: int, generation: int = 1) -> LedgerEntry:
        return LedgerEntry("batch", STREAM, f"topic:{self.topic}", generation, batch)

    def batch(self, batch: int, size: int = 100) -> Records:
        return Records(self.topic, range(batch * size, (batch + 1) * size), {self.topic: "id"})

    def numbers(self) -> list[int]:
        return [int(m.value() or b"") for m in committed(self.bootstrap, self.topic, PARTITIONS)]


@pytest.fixture
def place(broker: Broker, topic: str) -> Place:
    made = Place(broker.start(), topic)
    topics = Topics(made.config)
    topics.create(topic, PARTITIONS)
    ensure_marker_topic(topics, marker_topic(QUICK.prefix, STREAM, topic), topics.describe(topic))
    return made


def test_a_batch_is_there_once_and_the_marker_says_where(place: Place) -> None:
    writer = place.writer()
    assert writer.position == Txn(1, -1)
    assert writer.write(place.entry(0), place.batch(0))
    assert not writer.write(place.entry(0), place.batch(0))
    again = place.writer()
    assert again.position == Txn(1, 0) and again.newest == writer.newest
    assert not again.write(place.entry(0), place.batch(0))
    assert again.write(place.entry(1), place.batch(1))
    assert sorted(place.numbers()) == [*range(200)]
    assert again.newest is not None
    ranges = {r.partition: r for r in again.newest.written}
    read = [m for m in committed(place.bootstrap, place.topic, PARTITIONS) if int(m.value() or b"") >= 100]
    for partition, r in ranges.items():
        offsets = [int(m.offset() or 0) for m in read if m.partition() == partition]
        assert (min(offsets), max(offsets) + 1, len(offsets)) == (r.first, r.end, r.records)
    assert sum(r.records for r in ranges.values()) == 100 and {r.topic_id for r in ranges.values()} == {"id"}


def test_a_topic_is_opened_without_the_pauses_of_the_client(place: Place) -> None:
    """Half a second until it looks for its coordinator again, half a second for the end of the markers."""
    times = []
    for generation in range(1, 6):
        began = time.monotonic()
        place.writer(generation).close()
        times.append(time.monotonic() - began)
        time.sleep(0.3)  # the broker ends the transaction
    assert min(times) < 0.4, times


def test_keys_go_where_the_java_client_puts_them(place: Place) -> None:
    assert {key: murmur2(key) for key in MURMUR2} == MURMUR2
    writer = place.writer()
    keys = [os.urandom(1 + n % 40) for n in range(2000)] + list(MURMUR2)

    class Keys(Records):
        def __iter__(self) -> Iterator[Outgoing]:
            yield from (Outgoing(place.topic, key, b"") for key in keys)

    writer.write(place.entry(0), Keys(place.topic, range(len(keys))))
    read = committed(place.bootstrap, place.topic, PARTITIONS)
    assert len(read) == len(keys)
    assert all(partition_of(m.key() or b"", PARTITIONS) == m.partition() for m in read)


def test_a_new_generation_fences_the_old_one_before_it_writes_anything(place: Place) -> None:
    old = place.writer()
    old.write(place.entry(0), place.batch(0))
    new = place.writer(generation=2)
    assert new.position == Txn(2, -1)
    with pytest.raises(Fenced):
        old.write(place.entry(1), place.batch(1))
    with pytest.raises(Fenced):
        place.writer(generation=1)
    assert new.write(place.entry(0, 2), Records(place.topic, [7777]))
    assert sorted(place.numbers()) == [*range(100), 7777]


def test_a_zombie_of_the_same_generation_ends_and_takes_nothing_from_the_other(place: Place) -> None:
    zombie = place.writer()
    other = place.writer()
    other.write(place.entry(0), place.batch(0))
    with pytest.raises(Fenced, match="another driver writes topic"):
        zombie.write(place.entry(0), place.batch(0))
    assert other.write(place.entry(1), place.batch(1))
    assert sorted(place.numbers()) == [*range(200)]


def test_a_transaction_that_took_too_long_is_written_by_a_new_client(place: Place) -> None:
    waits = iter([3.0])

    def slow(_: int) -> None:
        threading.Event().wait(next(waits, 0.0))

    short = replace_settings(transaction_timeout=timedelta(seconds=1))
    writer = place.writer(settings=short, before_commit=slow)
    assert writer.write(place.entry(0), place.batch(0))
    assert sorted(place.numbers()) == [*range(100)]


def test_the_marker_is_read_only_after_older_producers_can_commit_no_more(place: Place) -> None:
    """The older driver commits right after the newer one has read the marker: that commit has to fail."""
    sent, read, over = threading.Event(), threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def wait(_: int) -> None:
        sent.set()
        assert read.wait(30)

    old = place.writer(before_commit=wait)

    def write() -> None:
        try:
            old.write(place.entry(0), place.batch(0))
        except Fenced as error:
            failures.append(error)
        over.set()

    class Reader:
        """A consumer; once it has read the marker, the older driver commits."""

        def __init__(self, config: dict[str, Any]) -> None:
            self.client = Consumer(config)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.client, name)

        def close(self) -> None:
            self.client.close()
            if not read.is_set():
                read.set()
                over.wait(1)

    threading.Thread(target=write, daemon=True).start()
    assert sent.wait(30)
    new = place.writer(consumer=Reader)
    assert new.write(place.entry(0), place.batch(0))
    assert over.wait(30) and len(failures) == 1
    assert sorted(place.numbers()) == [*range(100)]


class Stuck:
    """A producer one of whose calls never returns, as librdkafka's may."""

    def __init__(self, config: dict[str, Any], call: str, commits_first: bool) -> None:
        self.client, self.call, self.commits_first = Producer(config), call, commits_first

    def __getattr__(self, name: str) -> Any:
        if name != self.call:
            return getattr(self.client, name)

        def stuck(*arguments: Any) -> None:
            if self.commits_first:
                getattr(self.client, name)(*arguments)
            threading.Event().wait(60)

        return stuck


@pytest.mark.parametrize("commits_first", [False, True])
@pytest.mark.parametrize("call", ["init_transactions", "begin_transaction", "flush", "commit_transaction"])
def test_a_client_that_hangs_in_any_call_is_replaced_and_nothing_is_doubled(
    place: Place, call: str, commits_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streaming_jobs.sinks.kafka.producer._GRACE", timedelta(0))
    place.writer().write(place.entry(0), place.batch(0))
    made: list[Stuck | Producer] = []

    def connect(config: dict[str, Any]) -> Any:
        # The second client of this writer hangs: the first one opens the topic.
        made.append(Stuck(config, call, commits_first) if len(made) == 1 else Producer(config))
        return made[-1]

    writer = place.writer(producer=connect, settings=replace_settings(transaction_timeout=timedelta(seconds=2)))
    writer.close()
    writer.write(place.entry(1), place.batch(1))
    assert len(made) == 3
    assert sorted(place.numbers()) == [*range(200)]


def replace_settings(**changes: Any) -> TopicSinkSettings:
    return QUICK.model_copy(update=changes)


def test_a_timeout_that_the_broker_does_not_allow_is_the_user_s_to_correct(place: Place) -> None:
    with pytest.raises(ConfigurationError, match=r"topic_sink\.transaction_timeout"):
        place.writer(settings=replace_settings(transaction_timeout=timedelta(hours=1)))


def test_without_the_marker_of_a_killed_driver_s_batch_nothing_of_it_is_read(place: Place) -> None:
    """A driver is killed before the commit, then one after it: the next one writes the first batch only."""
    for point, batch in (("before", 0), ("after", 1)):
        process = run_writer(place, batch, point)
        assert process.wait(60) == -signal.SIGKILL
        assert sorted(place.numbers() if point == "after" else []) == [*range(100 * (batch + 1))][: 200 * batch]
        wrote = place.writer().write(place.entry(batch), place.batch(batch))
        assert wrote == (point == "before")
    assert sorted(place.numbers()) == [*range(200)]


def test_a_stopped_driver_that_wakes_up_later_writes_nothing(place: Place) -> None:
    process = run_writer(place, 0, "stop")
    wait_for(lambda: stopped(process.pid), "the stop")
    writer = place.writer()
    writer.write(place.entry(0), place.batch(0))  # False if the answer to its commit was lost, and it looked again
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(60) == 23, "it should have ended with Fenced"
    assert sorted(place.numbers()) == [*range(100)]
    writer.write(place.entry(1), place.batch(1))
    assert sorted(place.numbers()) == [*range(200)]


def test_readers_do_not_wait_for_a_transaction_that_failed_for_good(place: Place) -> None:
    def fail(_: int) -> None:
        raise ZeroDivisionError

    writer = place.writer(settings=replace_settings(transaction_timeout=timedelta(seconds=60)), before_commit=fail)
    with pytest.raises(ZeroDivisionError):
        writer.write(place.entry(0), place.batch(0))
    topics = Topics(place.config)
    wait_for(lambda: sum(topics.latest(place.topic).values()) >= 100, "the end of the transaction")
    assert place.numbers() == []


def stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0] == "T"


def run_writer(place: Place, batch: int, point: str) -> subprocess.Popen[bytes]:
    """A process that writes a batch and kills or stops itself before or after the commit."""
    command = [sys.executable, "-m", "tests.support.topic_writing", place.bootstrap, place.topic, str(batch), point]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)


def test_a_broker_that_is_killed_in_a_transaction_loses_and_doubles_nothing(settings: Any) -> None:
    with Broker(settings()) as own:
        place = Place(own.start(), "own", replace_settings(transaction_timeout=timedelta(seconds=40)))
        topics = Topics(place.config)
        topics.create("own", PARTITIONS)
        ensure_marker_topic(topics, marker_topic(QUICK.prefix, STREAM, "own"), topics.describe("own"))
        killed: list[int] = []

        def kill(batch: int) -> None:
            if batch % 2 and batch not in killed:
                killed.append(batch)
                own.kill()
                threading.Thread(target=own.start).start()

        writer = place.writer(before_commit=kill)
        for batch in range(4):
            writer.write(place.entry(batch), place.batch(batch))
        assert killed == [1, 3]
        assert sorted(place.numbers()) == [*range(400)]


def test_the_properties_of_a_producer_are_those_that_were_measured() -> None:
    config = producer_config({}, QUICK, "an id")
    assert (config["partitioner"], config["acks"], config["transactional.id"]) == ("murmur2_random", "all", "an id")
    assert "enable.idempotence" not in config, "a transactional id implies it"
    plain = producer_config({}, QUICK)
    assert plain["enable.idempotence"] and "transactional.id" not in plain
    assert producer_config({}, replace_settings(acks="1"))["max.in.flight"] == 1
    assert replace(TransactionWriter("s", "n", "t", QUICK, Clients({}))).key == "recourse.s.t"
