"""A topic sink with shards: its large batches are written by the executors, each shard once."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Message
from pyspark import TaskContext
from pyspark.sql import DataFrame

from streaming_jobs.errors import PermanentError
from streaming_jobs.ledger import LedgerEntry
from streaming_jobs.sinks.kafka.sharded import ShardedWriter
from streaming_jobs.sinks.kafka.shards import WRITTEN, ShardTask
from streaming_jobs.stream import Stream
from tests.broker.conftest import BenchFactory
from tests.broker.test_topic_sink import to_topic
from tests.support.driver import Bench, ledger, produce, rows
from tests.support.things import KEYS, thing
from tests.support.topic_flows import copied
from tests.support.topic_reader import committed, headers, partition_of

PARTITIONS, SHARDS, COUNT = 3, 4, 2000


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
        running = home.run(sharded(source, target, other))
        assert "some of the 4 shards" in str(running.status.error), running.status.error
    driver = bench({"stream.max_offsets_per_trigger": 1000, "stream.path": "driver"})
    driver.run(sharded(source, target))
    check(driver, target)
    for count, shards in enumerate((2, None, 4), 1):
        produce(home.bootstrap, source, (thing(i) for i in range(COUNT + 100 * count - 100, COUNT + 100 * count)))
        assert home.run(sharded(source, target, shards)).status.error is None
    check(driver, target, COUNT + 300)
