"""The Kafka source on a real broker: unusual topics and records, and the processes in which it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable

import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs.formats import Raw
from streaming_jobs.runtime.stream_runner import HEALTHY_BATCHES
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream
from tests.broker.conftest import BenchFactory
from tests.support.driver import Bench, assert_chained, ledger, on_topic, produce, rows
from tests.support.things import THINGS, plain, thing
from tests.support.waiting import wait_for


def numbers(made: Bench) -> list[int]:
    return sorted(row["n"] for row in rows(made.settings, "plain"))


@stream(source=KafkaTopic("raw", value=Raw(), tombstones="keep"), sink=DeltaTable("sizes"))
def sizes(records: DataFrame) -> DataFrame:
    """Length and first byte of each value."""
    return records.select(F.octet_length("value").alias("size"), F.hex(F.substring("value", 1, 1)).alias("first"))


@stream(source=THINGS, sink=DeltaTable("plain"))
def only_numbers(things: DataFrame) -> DataFrame:
    """One of three fields; the event time is a second one that is used."""
    return things.select("n")


PLANNER = "pyspark.sql.streaming.python_streaming_source_runner"
WORKERS = "pyspark.daemon pyspark.worker"
FORK_SERVER = "streaming_jobs.platform.processes.fork_server"


def python_processes(module: str) -> list[psutil.Process]:
    """The Python processes below this process that run a module; none of the clients that stand for them."""
    commands = {child: " ".join(_command(child)) for child in psutil.Process().children(recursive=True)}
    return [child for child, line in commands.items() if f"-m {module}" in line and "fork_client.py" not in line]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_records_of_ten_megabytes_and_of_nothing_are_read(bench: BenchFactory, topic: str) -> None:
    made = bench()
    made.topics.create(topic, 1, max_message_bytes=str(11 << 20))
    values = [b"a" * (10 << 20), b"", None, b"\xff" * 3, b"b" * (10 << 20)]
    producer = Producer({"bootstrap.servers": made.bootstrap, "message.max.bytes": 11 << 20})
    for value in values:
        producer.produce(topic, value=value)
    assert producer.flush(30) == 0
    made.run(on_topic(sizes, topic))
    found = [(row["size"], row["first"]) for row in rows(made.settings, "sizes")]
    assert sorted(found, key=str) == sorted(
        [(10 << 20, "61"), (0, ""), (None, None), (3, "FF"), (10 << 20, "62")], key=str
    )


def test_two_hundred_partitions_are_read_by_few_tasks(bench: BenchFactory, topic: str) -> None:
    made = bench()
    made.topics.create(topic, 200)
    produce(made.bootstrap, topic, map(thing, range(30_000)))  # more than the planner takes
    made.run(on_topic(plain, topic))
    assert numbers(made) == list(range(30_000))
    assert_chained(ledger(made.settings, "plain"))


def test_a_partition_that_a_topic_gets_later_is_read_from_its_beginning(bench: BenchFactory, topic: str) -> None:
    made = bench()
    made.topics.create(topic, 1)
    produce(made.bootstrap, topic, map(thing, range(100)))
    running = made.start(on_topic(plain, topic), "continuous")
    wait_for(lambda: running.poll(made.spark) or running.status.batch == 0, "the first batch")
    admin = AdminClient({"bootstrap.servers": made.bootstrap})
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(30)
    wait_for(lambda: len(made.topics.latest(topic)) == 3, "the partitions")
    produce(made.bootstrap, topic, map(thing, range(100, 400)))
    wait_for(lambda: running.poll(made.spark) or numbers(made) == list(range(400)), "the records of all partitions")
    running.request_stop()
    made.finish(running)
    assert_chained(ledger(made.settings, "plain"))


def test_compacted_offsets_are_no_lost_records(bench: BenchFactory, topic: str) -> None:
    made = bench({"stream.max_offsets_per_trigger": 700})
    made.topics.create(topic, 1, cleanup_policy="compact", segment_ms="500", min_cleanable_dirty_ratio="0.01")
    produce(made.bootstrap, topic, map(thing, range(2900)))
    time.sleep(0.6)  # the segment is old enough now, so the next records begin another, and it can be compacted
    produce(made.bootstrap, topic, map(thing, range(2900, 3000)))

    def held() -> int:
        from streaming_jobs.sources.connection import client_config
        from streaming_jobs.sources.range_reader import RangeReader

        config = client_config(made.settings.kafka, made.bootstrap)
        reader = RangeReader(topic, config, made.settings.kafka.timeout)
        try:
            return sum(len(part) for part in reader.read({0: (0, made.topics.latest(topic)[0])}, 10_000))
        finally:
            reader.close()

    wait_for(lambda: held() < 2500, "the broker's compaction")
    left = held()
    made.run(on_topic(plain, topic))
    assert 0 < len(numbers(made)) <= left
    assert numbers(made)[-6:] == list(range(2994, 3000)), "the last record of each key stays"
    assert sum(sum(r.records for r in entry.offsets) for entry in ledger(made.settings, "plain")) == 3000


def produce_at_once(bootstrap: str, topic: str, records: Iterable[tuple[bytes, bytes]]) -> None:
    """Send records in one transaction: a reader of committed records sees none of them, then all."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": topic, "linger.ms": 5})
    producer.init_transactions(30)
    producer.begin_transaction()
    for key, value in records:
        producer.produce(topic, key=key, value=value)
        producer.poll(0)
    producer.commit_transaction(30)


@pytest.mark.long
def test_planner_and_workers_may_be_killed_and_none_of_them_stays(bench: BenchFactory, topic: str) -> None:
    # Batches as large as ten seconds allow: a slow machine would read small ones, which need no workers.
    made = bench({"stream.min_commit_interval": "10 ms", "stream.batch_seconds": "10 seconds"})
    made.topics.create(topic, 2)
    produce(made.bootstrap, topic, map(thing, range(40_000)))
    running = made.start(on_topic(plain, topic), "continuous")
    wait_for(lambda: running.poll(made.spark) or running.status.batch is not None, "the first batch")
    sent = 40_000

    def read(count: int, send: Callable[..., None]) -> None:
        nonlocal sent
        send(made.bootstrap, topic, map(thing, range(sent, sent + count)))
        sent += count
        wait_for(lambda: running.poll(made.spark) or running.status.totals.rows_written >= sent, "all records")

    at_once = (PLANNER, WORKERS, FORK_SERVER)  # later ones are started without the server
    for modules in ((PLANNER,), (WORKERS,), at_once, (PLANNER,)):
        found = [wait_for(lambda module=module: python_processes(module), module) for module in modules]  # type: ignore[misc]
        for process in (process for processes in found for process in processes):
            process.kill()
        read(30_000, produce_at_once)
        for _ in range(HEALTHY_BATCHES):  # they end the row of failures, whose pauses grow to minutes
            read(1, produce)
    running.request_stop()
    made.finish(running)
    assert numbers(made) == list(range(sent))
    assert_chained(ledger(made.settings, "plain"))
    wait_for(lambda: not python_processes(PLANNER), "the end of the planner")


def test_no_option_and_no_plan_shows_credentials(bench: BenchFactory, topic: str) -> None:
    made = bench({"kafka.sasl_username": "jo", "kafka.sasl_password": "hush-hush"})
    made.topics.create(topic, 1)
    produce(made.bootstrap, topic, map(thing, range(10)))
    running = made.start(on_topic(plain, topic), "continuous")
    wait_for(lambda: running.poll(made.spark) or running.status.batch == 0, "the first batch")
    execution = running.pipeline.query._query.lastExecution()  # type: ignore[union-attr]
    plans = str(execution.toString()) + str(execution.logical().treeString())
    assert "kafka-plain-things" in plans and "hush" not in plans
    commands = [part for child in psutil.Process().children(recursive=True) for part in _command(child)]
    assert not any("hush" in part for part in commands)
    running.request_stop()
    made.finish(running)


def test_the_source_builds_the_fields_that_the_stream_uses_and_no_other(bench: BenchFactory, topic: str) -> None:
    made = bench()
    made.topics.create(topic, 1)
    produce(made.bootstrap, topic, map(thing, range(10)))
    running = made.start(on_topic(only_numbers, topic), "continuous")
    wait_for(lambda: running.poll(made.spark) or running.status.batch == 0, "the first batch")
    client = made.connection.client
    (file,) = client.parent.glob(f"{client.stem}-*.json")
    used = {name for name in json.loads(file.read_text()) if name.startswith("_record.")}
    assert used == {"_record.n", "_record.t"}
    running.request_stop()
    made.finish(running)
    assert numbers(made) == list(range(10))


def test_an_idle_stream_costs_next_to_nothing(bench: BenchFactory, topic: str) -> None:
    made = bench()
    made.topics.create(topic, 1)
    produce(made.bootstrap, topic, map(thing, range(10)))
    running = made.start(on_topic(plain, topic), "continuous")
    wait_for(lambda: running.poll(made.spark) or running.status.batch == 0, "the first batch")
    (planner,) = python_processes(PLANNER)[-1:]
    before, began = sum(planner.cpu_times()[:2]), time.monotonic()
    while time.monotonic() - began < 5:
        running.poll(made.spark)
        time.sleep(0.2)
    assert sum(planner.cpu_times()[:2]) - before < 0.5
    running.request_stop()
    made.finish(running)
