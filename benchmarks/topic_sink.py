"""A topic as a sink: the product's, exactly once, beside Spark's own, at least once, in turns in one Spark session.

    python -m benchmarks.topic_sink --rows 100000 --rounds 15 --out benchmarks/results/topic_sink.json
    python -m benchmarks.topic_sink --rows 100 --rounds 40

Each contestant writes the same rows, which are computed and kept in Spark's memory, into a topic of its own: from the
frame to the end of the transaction, or of Spark's job. Our sink runs with its headers and without, and by shards. `bare
writer` is the transaction alone, of records that are made already; its CPU time includes making them. CPU time is that
of all processes, the broker too. At the end the topics must hold the same rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, TopicPartition
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from benchmarks.measuring import Workshop, quantile, quiet, save, table, workshop
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.formats import Json
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.jars import ensure, locked
from streaming_jobs.platform.spark_jvm import CLASS_PATH
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.base import BatchOfRows
from streaming_jobs.sinks.kafka.markers import TopicMaker, ensure_marker_topic, marker_topic
from streaming_jobs.sinks.kafka.output import TopicOutput
from streaming_jobs.sinks.kafka.producer import Outgoing
from streaming_jobs.sinks.kafka.rows import KnownTopics
from streaming_jobs.sinks.kafka.sharded import ShardedWriter
from streaming_jobs.sinks.kafka.shards import shards_topic
from streaming_jobs.sinks.kafka.writer import Clients
from streaming_jobs.sources.connection import client_config, client_file
from streaming_jobs.sources.topics import Topics
from streaming_jobs.stream import KafkaTopic

GOALS = {100_000: 0.55, 100: 1.0}
"""The least share of Spark's rows per second, by the rows of a batch."""
PARTITIONS = 4
SHARDS = 4
WARM_UP = 3
PAYMENT = StructType(
    [
        StructField("id", LongType(), nullable=False),
        StructField("account", StringType(), nullable=False),
        StructField("amount", LongType()),
        StructField("at", TimestampType()),
        StructField("kind", StringType()),
        StructField("net", LongType()),
    ]
)


@dataclass
class Contestant:
    """One way to write a batch, and the seconds that each batch took, in parts."""

    label: str
    topic: str
    write: Callable[[DataFrame, int], Mapping[str, float]]
    seconds: list[float] = field(default_factory=list)
    parts: list[Mapping[str, float]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def run(self, frame: DataFrame, batch: int) -> None:
        """One batch, measured."""
        used, began = cpu_seconds(), time.perf_counter()
        parts = self.write(frame, batch)
        self.seconds.append(sum(parts.values()) or time.perf_counter() - began)
        self.cpu.append(cpu_seconds() - used)
        self.parts.append(parts)

    def figures(self, rows: int) -> dict[str, Any]:
        """Medians of the batches after the first ones, which warm up."""
        seconds, parts = self.seconds[WARM_UP:], self.parts[WARM_UP:]
        part = {name: 1000 * statistics.median(each.get(name, 0.0) for each in parts) for name in ("prepare", "commit")}
        return {
            "": self.label,
            "median ms": 1000 * statistics.median(seconds),
            "p90 ms": 1000 * quantile(seconds, 0.9),
            **{f"{name} ms": ms or "" for name, ms in part.items()},
            "CPU ms": 1000 * statistics.median(self.cpu[WARM_UP:]),
            "rows/s": round(rows / statistics.median(seconds)),
        }


def cpu_seconds() -> float:
    """CPU time so far of this process and all below it: the driver, Spark's JVM and Python processes, the broker."""
    own = psutil.Process()
    used = 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def payments(count: int, batch: int) -> pa.Table:
    """Rows of a batch; no two batches have a row in common."""
    ids = np.arange(batch * count, (batch + 1) * count)
    return pa.table(
        {
            "id": pa.array(ids),
            "account": [f"account-{number}" for number in (ids * 7919) % 20_011],
            "amount": pa.array((ids * 31) % 90_000),
            "at": pa.array(ids * 1000 + 1_700_000_000_000_000, pa.timestamp("us", tz="UTC")),
            "kind": [("card", "transfer", "cash")[number % 3] for number in ids],
            "net": pa.array((ids * 31) % 90_000 * 99 // 100),
        }
    )


def spark_sink(bootstrap: str, topic: str) -> Callable[[DataFrame, int], Mapping[str, float]]:
    """What Spark's documentation shows, with the compression that ours has."""

    def write(frame: DataFrame, batch: int) -> Mapping[str, float]:
        del batch
        key, value = F.col("account").cast("binary").alias("key"), F.to_json(F.struct(*PAYMENT.names)).alias("value")
        writer = frame.select(key, value).write.format("kafka").option("kafka.bootstrap.servers", bootstrap)
        writer.option("kafka.compression.type", "lz4").option("topic", topic).save()
        return {}

    return write


def our_output(shop: Workshop, topic: str, shards: int | None = None, **changed: Any) -> TopicOutput:
    """The sink of a stream, opened."""
    settings = shop.settings.topic_sink.model_copy(update=changed)
    topics = Topics.of(shop.settings.kafka, shop.bootstrap)
    maker, info = cast("TopicMaker", topics), topics.describe(topic)
    ensure_marker_topic(maker, marker_topic(settings.prefix, "benchmark", topic), info)
    if shards:
        ensure_marker_topic(maker, shards_topic(settings.prefix, "benchmark", topic, shards), info, shards)
    clients = Clients(client_config(shop.settings.kafka, shop.bootstrap))
    file = client_file(shop.settings, shop.bootstrap)
    name = f"topic:{topic}"
    writer = ShardedWriter("benchmark", name, topic, settings, clients, shards=shards or 0, client=file)
    writer.open(1)
    declared = KafkaSink(KafkaTopic(topic, value=Json(PAYMENT)), key="account", shards=shards)
    folder = shop.settings.tables / "benchmark"
    return TopicOutput(declared, "benchmark", settings, writer, KnownTopics(topics, settings), folder)


def our_sink(output: TopicOutput) -> Callable[[DataFrame, int], Mapping[str, float]]:
    """What a stream's batch does with its frame."""

    def write(frame: DataFrame, batch: int) -> Mapping[str, float]:
        fitted = output.fit(frame, ["t"])
        began = time.perf_counter()
        pending = output.prepare(fitted, BatchOfRows(1, batch, driver=output.declared.shards is None, topics=["t"]))
        prepared = time.perf_counter()
        pending.commit(LedgerEntry("batch", "benchmark", output.name, 1, batch, rows={"written": pending.rows}))
        committed = time.perf_counter()
        pending.close()
        return {"prepare": prepared - began, "commit": committed - prepared}

    return write


@dataclass
class Ready:
    """Records of one batch that are made already."""

    records: Sequence[Outgoing]
    topic_ids: Mapping[str, str]
    most_bytes: int = 1_048_588

    @property
    def count(self) -> int:
        """Their number."""
        return len(self.records)

    def __iter__(self) -> Iterator[Outgoing]:
        return iter(self.records)


def bare_writer(output: TopicOutput, shop: Workshop) -> Callable[[DataFrame, int], Mapping[str, float]]:
    """The transaction alone; its records are made before the clock runs."""
    info = Topics.of(shop.settings.kafka, shop.bootstrap).describe(output.declared.name)
    assert info is not None
    encode = output.declared.topic.value.writer()  # type: ignore[attr-defined]

    def write(frame: DataFrame, batch: int) -> Mapping[str, float]:
        rows = frame.toArrow()
        values = [value for block in rows.to_batches() for value in encode.write(block).values]
        keys = [key.encode() for key in rows.column("account").to_pylist()]
        records = [Outgoing(info.name, key, value) for key, value in zip(keys, values, strict=True)]
        began = time.perf_counter()
        output.writer.write(
            LedgerEntry("batch", "benchmark", output.name, 1, batch), Ready(records, {info.name: info.id})
        )
        return {"commit": time.perf_counter() - began}

    return write


def contents(bootstrap: str, topic: str) -> pa.Table:
    """The rows of all committed records, by id."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "benchmark",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    values: list[bytes | None] = []
    ended = set[int]()
    until = time.monotonic() + 120
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
        while len(ended) < PARTITIONS:
            if time.monotonic() > until:
                raise RuntimeError(f"topic {topic} could not be read in time")
            for message in consumer.consume(10_000, timeout=0.5):
                error = message.error()
                if error is None:
                    values.append(message.value())
                elif error.code() == KafkaError._PARTITION_EOF:
                    ended.add(int(message.partition() or 0))
    finally:
        consumer.close()
    block = Json(PAYMENT).reader().read(values)
    if block.refused:
        raise RuntimeError(f"topic {topic}: {next(iter(block.refused.values()))}")
    return pa.Table.from_batches([block.columns]).sort_by("id")


def in_turns(shop: Workshop, contestants: Sequence[Contestant], rows: int, rounds: int) -> None:
    """Each writes the same batches, in an order that changes."""
    for number in range(rounds + WARM_UP):
        frame = shop.spark.createDataFrame(payments(rows, number)).repartition(2).persist()
        frame.count()
        first = number % len(contestants)
        for one in (*contestants[first:], *contestants[:first]):
            one.run(frame, number)
        frame.unpersist()


def measure(rows: int, rounds: int) -> tuple[list[Contestant], bool]:
    """The contestants after so many rounds, and whether their topics hold the same rows."""
    jars = ensure(Settings.load({}), locked("peers"))
    with workshop({"spark.extra": {CLASS_PATH: ":".join(map(str, jars))}, "spark.shuffle_partitions": 2}) as shop:
        topics = Topics.of(shop.settings.kafka, shop.bootstrap)
        for name in ("spark", "ours", "plain", "bare", "shards"):
            topics.create(name, PARTITIONS)
        outputs = [our_output(shop, "ours"), our_output(shop, "plain", headers=False), our_output(shop, "bare")]
        outputs.append(our_output(shop, "shards", shards=SHARDS))
        try:
            contestants = [
                Contestant("Spark's sink, at least once", "spark", spark_sink(shop.bootstrap, "spark")),
                Contestant("Recourse, exactly once", "ours", our_sink(outputs[0])),
                Contestant("Recourse, without headers", "plain", our_sink(outputs[1])),
                Contestant(f"Recourse, {SHARDS} shards", "shards", our_sink(outputs[3])),
                Contestant("bare writer", "bare", bare_writer(outputs[2], shop)),
            ]
            in_turns(shop, contestants, rows, rounds)
        finally:
            for output in outputs:
                output.close()
        written = [contents(shop.bootstrap, one.topic) for one in contestants]
        expected = (rounds + WARM_UP) * rows
        return contestants, all(each.num_rows == expected and each.equals(written[0]) for each in written)


def main() -> int:
    """Measure, compare, print; exit code 1 below the goal or with other rows than Spark's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.topic_sink")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet()
    contestants, equal = measure(options.rows, options.rounds)
    figures = [one.figures(options.rows) for one in contestants]
    ratio = figures[0]["median ms"] / figures[1]["median ms"]
    sys.stdout.write(f"batches of {options.rows:,} rows\n\n{table(figures)}\n")
    sys.stdout.write(f"{ratio:.2f} times the rows per second of Spark's sink; topics equal: {equal}\n")
    save(options.out, rows=options.rows, rounds=options.rounds, figures=figures, ratio=ratio, equal=equal)
    return int(ratio < GOALS.get(options.rows, 0.0) or not equal)


if __name__ == "__main__":
    sys.exit(main())
