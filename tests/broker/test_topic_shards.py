"""A topic sink with shards: its large batches are written by the executors, each shard once."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Message
from pyspark import TaskContext
from pyspark.sql import DataFrame

from reprocessing.plan.written_topics import WrittenTopics
from streaming_jobs.errors import Fenced, PermanentError, PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.platform.broker import Broker
from streaming_jobs.sinks.kafka.markers import marker_topic
from streaming_jobs.sinks.kafka.sharded import ShardedWriter
from streaming_jobs.sinks.kafka.shards import WRITTEN, ShardTask, ShardWriter, read_shards, shards_topic
from streaming_jobs.sinks.kafka.writer import Clients
from streaming_jobs.sources.connection import client_config
from streaming_jobs.sources.topics import Topics
from streaming_jobs.stream import Stream
from tests.broker.conftest import BenchFactory
from tests.broker.test_topic_sink import to_topic
from tests.conftest import SettingsFactory
from tests.support.driver import Bench, driver, finished, ledger, produce, rows
from tests.support.things import KEYS, thing
from tests.support.topic_flows import copied
from tests.support.topic_reader import committed, headers, partition_of

PARTITIONS, SHARDS, COUNT = 3, 4, 2000
FLOWS = "tests.support.topic_flows"


def sharded(source: str, target: str, shards: int | None = SHARDS) -> Stream:
    """`copied` with shards, on topics of this test."""
    flow = to_topic(copied, source, target)
    return replace(flow, topic_sinks={n: replace(s, shards=shards) for n, s in flow.topic_sinks.items()})


@pytest.fixture
def made(bench: BenchFactory, topic: str) -> tuple[Bench, str, str]:
    """A bench whose batches take the executors, a topic with 2,000 records, and an empty topic to write."""
    home = bench({"stream.max_offsets_per_trigger": 1000, "stream.path": "executor"})
    source, target = f"{topic}-in", f"{topic}-out"
    home.topics.create(source, 2)
    home.topics.create(target, PARTITIONS)
    produce(home.bootstrap, source, (thing(i) for i in range(COUNT)))
    return home, source, target


def check(home: Bench, target: str, count: int = COUNT) -> list[Message]:
    """Every record once, each key in its order and its partition, and where the ledger says."""
    records = committed(home.bootstrap, target, PARTITIONS)
    assert sorted(json.loads(m.value() or b"")["n"] for m in records) == [*range(count)]
    for key in KEYS:
        own = [m for m in records if m.key() == key.encode()]
        offsets = [json.loads(m.value() or b"")["off"] for m in own]
        assert offsets == sorted(offsets) and len(offsets) >= count // len(KEYS)
        assert {m.partition() for m in own} == {partition_of(key.encode(), PARTITIONS)}
    written = [each for entry in ledger(home.settings, "copied_batches") for each in entry.written]
    assert sum(each.records for each in written) == count
    for row in rows(home.settings, "copied_batches"):
        own = [m for m in records if m.partition() == row["partition"] and _batch(m) == row["batch"]]
        offsets = [int(m.offset() or 0) for m in own]
        assert (min(offsets), max(offsets) + 1, len(own)) == (row["first_offset"], row["end_offset"], row["records"])
    return records


def _batch(message: Message) -> int:
    return int(headers(message)["recourse.batch"])


def test_shards_write_every_record_once_in_the_order_of_its_key(made: tuple[Bench, str, str]) -> None:
    home, source, target = made
    home.run(sharded(source, target))
    produce(home.bootstrap, source, (thing(i) for i in range(COUNT, COUNT + 100)))
    home.run(sharded(source, target))
    check(home, target, COUNT + 100)


class Killed(Exception):
    """The driver, or a process of Spark's, ended in the middle of a batch."""


def half_of_the_shards(writer: ShardedWriter, entry: LedgerEntry, task: ShardTask, frame: DataFrame, rows: Any) -> None:
    """The driver ends when two of four shards have the batch."""

    def some(batches: Iterator[Any]) -> Iterator[Any]:
        if TaskContext.get().partitionId() < 2:  # type: ignore[union-attr]
            yield from task.written(entry, rows, batches)

    assert frame.mapInArrow(some, WRITTEN).count() == 2
    raise Killed


def all_of_the_shards(writer: ShardedWriter, entry: LedgerEntry, task: ShardTask, frame: DataFrame, rows: Any) -> None:
    """The driver ends before its own marker is in."""
    assert frame.mapInArrow(partial(task.written, entry, rows), WRITTEN).count() == SHARDS
    raise Killed


def a_worker_in_its_transaction(
    writer: ShardedWriter, entry: LedgerEntry, task: ShardTask, frame: DataFrame, rows: Any
) -> None:
    """A Python process of Spark's is killed while its transaction is open."""

    def some(batches: Iterator[Any]) -> Iterator[Any]:
        if (shard := TaskContext.get().partitionId()) == 2:  # type: ignore[union-attr]
            task._writer(shard).before_commit = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        yield from task.written(entry, rows, batches)

    frame.mapInArrow(some, WRITTEN).collect()
    raise AssertionError("the process has survived")


def two_attempts_at_once(
    writer: ShardedWriter, entry: LedgerEntry, task: ShardTask, frame: DataFrame, rows: Any
) -> None:
    """As with speculation: each shard is written by two tasks side by side; then a third attempt finds it there."""
    jobs = [threading.Thread(target=lambda: ends.append(_attempt(entry, task, frame, rows))) for _ in range(2)]
    ends: list[int | str] = []
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert SHARDS in ends, ends
    WRITE(writer, entry, task, frame, rows)


def _attempt(entry: LedgerEntry, task: ShardTask, frame: DataFrame, rows: Any) -> int | str:
    try:
        return frame.mapInArrow(partial(task.written, entry, rows), WRITTEN).count()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other attempt goes on
        return str(error)[:500]


WRITE = ShardedWriter.write_shards


def with_faults(monkeypatch: pytest.MonkeyPatch, faults: dict[int, Any]) -> None:
    """Have each fault happen once, in its batch."""

    def write(writer: ShardedWriter, entry: LedgerEntry, task: ShardTask, frame: DataFrame, counts: Any) -> bool:
        fault = faults.pop(entry.batch, WRITE)
        return bool(fault(writer, entry, task, frame, counts))

    monkeypatch.setattr(ShardedWriter, "write_shards", write)


def test_batches_that_end_between_shards_are_finished_and_nothing_is_there_twice(
    bench: BenchFactory, made: tuple[Bench, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source, target = made
    home = bench({"stream.max_offsets_per_trigger": 400, "stream.path": "executor"})
    faults = [half_of_the_shards, all_of_the_shards, a_worker_in_its_transaction, two_attempts_at_once]
    with_faults(monkeypatch, left := dict(enumerate(faults)))
    running = home.run(sharded(source, target))
    assert not left and running.status.state == "stopped" and running.status.restarts == 3
    check(home, target)


def test_half_a_batch_takes_the_same_shards_again_and_no_other_number_of_them(
    bench: BenchFactory, made: tuple[Bench, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, source, target = made

    def ends(*parts: Any) -> None:
        with pytest.raises(Killed):
            half_of_the_shards(*parts)
        raise PermanentError("the driver is killed")

    with_faults(monkeypatch, {1: ends})
    assert home.run(sharded(source, target)).status.state == "failed"
    for other in (2, None):
        with pytest.raises(PreflightRefused, match="some of the 4 shards"):
            home.start(sharded(source, target, other))
    small = bench({"stream.max_offsets_per_trigger": 1000, "stream.path": "driver"})
    small.run(sharded(source, target))
    check(small, target)
    for count, shards in enumerate((2, None, 4), 1):
        produce(home.bootstrap, source, (thing(i) for i in range(COUNT + 100 * count - 100, COUNT + 100 * count)))
        assert home.run(sharded(source, target, shards)).status.error is None
    check(small, target, COUNT + 300)


class NoRecords:
    """A shard's part of a batch without a row."""

    count, topic_ids, most_bytes = 0, dict[str, str](), 1_000_000

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_a_recovery_fences_every_shard_and_knows_what_some_of_them_have(
    made: tuple[Bench, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, source, target = made
    flow = sharded(source, target)
    seen: list[ShardTask] = []

    def ends(*parts: Any) -> None:
        seen.append(parts[2])
        with pytest.raises(Killed):
            half_of_the_shards(*parts)
        raise PermanentError("the driver is killed")

    with_faults(monkeypatch, {1: ends})
    assert home.run(flow).status.state == "failed"
    (sink,) = flow.topic_sinks.values()
    written, generation, position = WrittenTopics(home.settings), 2, Txn(1, 0)
    newest = written.newest(flow, sink)
    assert newest is not None and (newest.kind, newest.txn) == ("batch", Txn(1, 1)), "two shards have it"
    found = written.fence(flow, sink, generation, "plan-1", position)
    last = [m for m in committed(home.bootstrap, target, PARTITIONS) if _batch(m) == 1]
    assert sum(each.records for each in found) == len(last) > 0
    for each in found:
        offsets = [int(m.offset() or 0) for m in last if m.partition() == each.partition]
        assert (each.first, each.end) == (min(offsets), max(offsets) + 1)
    assert written.fence(flow, sink, generation, "plan-1", position) == found, "it may be repeated"
    config = client_config(home.settings.kafka, home.bootstrap)
    for shard in range(SHARDS):
        late = ShardWriter(
            flow.name, sink.ledger_name, target, home.settings.topic_sink, Clients(config),
            shard=shard, shards=SHARDS, owner=seen[0].owner,
        )  # fmt: skip
        with pytest.raises(Fenced, match="another driver"):
            late.write(newest, NoRecords())  # type: ignore[arg-type]
        late.close()
    assert written.mark(flow, sink, Txn(3, 0), "plan-1", position) == found
    after = written.newest(flow, sink)
    assert after is not None and after.txn == Txn(3, 0)
    now = read_shards(config, flow.name, target, home.settings.topic_sink, SHARDS)
    assert {each.txn for each in now.values() if each is not None} == {Txn(3, 0)}


@pytest.mark.timeout(1800)
@pytest.mark.long
@pytest.mark.parametrize(("kills", "seed"), [(0, 3), (20, 5)])
def test_drivers_that_are_killed_between_shards_lose_nothing_and_write_nothing_twice(
    settings: SettingsFactory, broker: Broker, kills: int, seed: int
) -> None:
    """First when all shards have the batch and the driver's marker does not, then while some shards are ahead.

    Its short form has the first kill alone; `half_of_the_shards` above has the others in one process.
    """
    bootstrap, target = broker.start(), "sharded-copies"
    made = settings({"kafka.bootstrap_servers": bootstrap})
    topics, prefix = Topics.of(made.kafka, bootstrap), made.topic_sink.prefix
    markers = shards_topic(prefix, "sharded", target, SHARDS)
    for name in ("things", target, marker_topic(prefix, "sharded", target), markers):
        if topics.describe(name):
            topics.delete(name)
    topics.create("things", 2)
    topics.create(target, PARTITIONS)
    count = 700 * (kills + 2)
    produce(bootstrap, "things", (thing(i) for i in range(count)))
    command = ("--trigger", "available-now", "--set", "stream.max_offsets_per_trigger=250")
    command = (*command, "--set", "stream.path=executor", "--streams", "sharded")
    crash = {"RECOURSE_CRASH": "sharded:transaction_open:1"}
    code, output = finished(driver(made, bootstrap, *command, flows=FLOWS, environment=crash))
    assert code == -signal.SIGKILL, output[-3000:]
    chance, ahead = random.Random(seed), 0
    for _ in range(kills):
        process = driver(made, bootstrap, *command, flows=FLOWS)
        try:
            until, before = time.monotonic() + 90, topics.latest(markers)
            while process.poll() is None and not _some_are_ahead(before, topics.latest(markers)):
                assert time.monotonic() < until, "no shard was written"
            time.sleep(chance.random() * 0.05)
        finally:
            process.kill()
            process.communicate()
        config = client_config(made.kafka, bootstrap)
        batches = read_shards(config, "sharded", target, made.topic_sink, SHARDS).values()
        ahead += len({entry.txn for entry in batches if entry is not None}) > 1
    code, output = finished(driver(made, bootstrap, *command, flows=FLOWS))
    assert code == 0, output[-3000:]
    records = committed(bootstrap, target, PARTITIONS)
    assert sorted(json.loads(m.value() or b"")["n"] for m in records) == [*range(count)]
    for key in KEYS:
        offsets = [json.loads(m.value() or b"")["off"] for m in records if m.key() == key.encode()]
        assert offsets == sorted(offsets)
    assert kills < 10 or ahead, "no driver was killed between two shards"


def _some_are_ahead(before: Mapping[int, int], now: Mapping[int, int]) -> bool:
    """True once the shards have their claim's record, and some of them a batch's too (and that of its commit)."""
    more = [now[shard] - before[shard] for shard in now]
    return max(more) > 2 and min(more) >= 2 and len(set(more)) > 1
