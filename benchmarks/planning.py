"""How long a plan takes over 20 streams with topics between them: a chain, and a tree.

    python -m benchmarks.planning --batches 1000 --rounds 5 --out benchmarks/results/planning.json

Each stream has read its topic in so many batches of 20 records, has written as many to its own topic, and has ten
consumer groups of other programs on it. No batch is run: tables, ledgers and checkpoints are written as a driver leaves
them. The topics are real, on a broker. The plan of the first stream goes back by 50 batches and takes the others along,
each from a savepoint that exists. The first round takes these savepoints.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition
from deltalake import write_deltalake

from benchmarks import planning_flows
from benchmarks.measuring import quiet, save, table
from benchmarks.planning_flows import ROWS, source_of
from reprocessing.planning.planner import Request, make_plan
from reprocessing.planning.snapshot import planning_snapshot
from reprocessing.planning.targets import Target
from reprocessing.plans.plan import RecoveryPlan
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange, WrittenRange
from streaming_jobs.platform.broker import Broker
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.table_setup import ensure_sink
from streaming_jobs.sinks.schemas import DEAD_LETTERS
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import BoundTable, BoundTopic, CodeSince
from streaming_jobs.stream import DeltaTable, Stream

GOAL = 5.0
PARTITIONS, PER_BATCH, COMMITS, BACK, GROUPS = 2, 10, 80, 50, 10


def fill_topic(topics: Topics, producer: Producer, name: str, count: int) -> str:
    """Make a topic with so many records in each partition; returns its id."""
    info = topics.create(name, PARTITIONS)
    for number in range(count):
        for partition in range(PARTITIONS):
            producer.produce(name, value=json.dumps({"id": number, "place": "here"}), partition=partition)
        if number % 1_000 == 0:
            producer.poll(0)
    producer.flush(60)
    return info.id


def read_by_others(bootstrap: str, topic: str, offset: int) -> None:
    """Consumer groups of other programs commit an offset."""
    for number in range(GROUPS):
        consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": f"{topic}-{number}"})
        places = [TopicPartition(topic, partition, offset) for partition in range(PARTITIONS)]
        consumer.commit(offsets=places, asynchronous=False)
        consumer.close()


def lay(settings: Settings, stream: Stream, source: str, ids: dict[str, str], batches: int) -> None:
    """A stream on disk after so many batches: record, tables, checkpoint and ledger."""
    name, (out,) = stream.name, stream.topic_sinks.values()
    bound, sinks = [], {}
    for declared, role in all_tables(stream):
        assert isinstance(declared, DeltaTable)
        columns = DEAD_LETTERS if declared.name == stream.dead_letters else ROWS
        sinks[declared.name] = ensure_sink(settings, declared, name, columns, generation=1)
        bound.append(BoundTable(declared.name, str(sinks[declared.name].handle.metadata().id), role))
    code = code_version(stream, settings.flows)
    first = stream_record.first(name)
    reads = BoundTopic(source, ids[source], dict.fromkeys(range(PARTITIONS), 0))
    since = (CodeSince(code.hash, code.package, 1, 0, time.time()),)
    stream_record.save(settings, replace(first, tables=tuple(bound), topics=(reads,), code=since))
    checkpoint = StreamFolder.of(settings, name).checkpoint(1).folder
    for part in ("offsets", "commits", "sources/0"):
        (checkpoint / part).mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id":"d1232a21-48ec-49aa-80a3-815ce12b0714"}')
    (checkpoint / "sources" / "0" / "0").write_text(f"\0v1\n{_offsets(source, 0)}")
    rows = pa.table({"id": list(range(PER_BATCH)), "place": ["here"] * PER_BATCH})
    ledger, primary = ledger_file(settings, name), sinks[stream.primary.name]
    for batch in range(batches):
        entry = _entry(stream, batch, OffsetRange(source, ids[source], _at(batch), _at(batch + 1)), code, ids[out.name])
        if batch >= batches - COMMITS:
            primary.commit(
                entry, lambda handle, how: write_deltalake(handle, rows, mode="append", commit_properties=how)
            )
            conf = {"batchWatermarkMs": 0, "batchTimestampMs": 1_795_255_789_437, "conf": {}}
            (checkpoint / "offsets" / str(batch)).write_text(
                f"v1\n{json.dumps(conf)}\n{_offsets(source, (batch + 1) * PER_BATCH)}"
            )
            (checkpoint / "commits" / str(batch)).write_text('v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{}}')
        ledger.append(entry, {primary.name: primary.handle.version()}, 0.2)


def _entry(stream: Stream, batch: int, read: OffsetRange, code: CodeVersion, topic_id: str) -> LedgerEntry:
    (out,) = stream.topic_sinks.values()
    begin, end = batch * PER_BATCH, (batch + 1) * PER_BATCH
    written = tuple(WrittenRange(out.name, topic_id, p, begin, end, PER_BATCH) for p in range(PARTITIONS))
    counts = {"written": PER_BATCH}
    return LedgerEntry("batch", stream.name, stream.primary.name, 1, batch, (read,), counts, code=code, written=written)


def _at(batch: int) -> dict[int, int]:
    return dict.fromkeys(range(PARTITIONS), batch * PER_BATCH)


def _offsets(topic: str, offset: int) -> str:
    return json.dumps({topic: dict.fromkeys(map(str, range(PARTITIONS)), offset)}, separators=(",", ":"))


def planned(settings: Settings, topics: Topics, stream: Stream, batches: int) -> RecoveryPlan:
    """The plan of the first stream, which takes the others along."""
    snapshot = planning_snapshot(settings, stream, topics)
    return make_plan(settings, [Request(snapshot, Target("batch", str(batches - 1 - BACK)))])


def measure(settings: Settings, bootstrap: str, streams: Sequence[Stream], options: Any) -> dict[str, Any]:
    """Write everything of one shape, then time its plan."""
    shape = streams[0].name.partition("_")[0]
    topics, producer = Topics.of(settings.kafka, bootstrap), Producer({"bootstrap.servers": bootstrap})
    names = [f"{shape}_in", *(sink.name for stream in streams for sink in stream.topic_sinks.values())]
    ids = {name: fill_topic(topics, producer, name, options.batches * PER_BATCH) for name in names}
    for number, stream in enumerate(streams):
        lay(settings, stream, source_of(shape, number), ids, options.batches)
        read_by_others(bootstrap, names[number + 1], options.batches * PER_BATCH)
    seconds: list[float] = []
    profile = cProfile.Profile()
    for _ in range(options.rounds + 1):
        began = time.monotonic()
        if options.profile and seconds:
            profile.enable()
        plan = planned(settings, topics, streams[0], options.batches)
        profile.disable()
        seconds.append(time.monotonic() - began)
    if options.profile:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(70)
    assert [each.stream for each in plan.streams] == [stream.name for stream in streams]
    assert all(each.base.savepoint is not None for each in plan.streams)
    return {
        "streams": f"{len(streams)}, {shape}",
        "batches in each ledger": options.batches,
        "first plan s": seconds[0],
        "median s": statistics.median(seconds[1:]),
        "longest s": max(seconds[1:]),
    }


def main() -> int:
    """Measure both shapes, print a table; exit code 1 above the goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning")
    parser.add_argument("--batches", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", default=["chain", "tree"])
    parser.add_argument("--profile", action="store_true", help="where the time goes, on stderr")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        given = {"home": Path(folder) / "home", "flows": ["benchmarks.planning_flows"]}
        with Broker(Settings.load({"home": Path(folder) / "broker", "broker.heap_mb": 256})) as broker:
            bootstrap = broker.start()
            settings = Settings.load({**given, "kafka.bootstrap_servers": bootstrap})
            shapes = (getattr(planning_flows, shape) for shape in options.shapes)
            figures = [measure(settings, bootstrap, streams, options) for streams in shapes]
    sys.stdout.write(table(figures))
    save(options.out, figures=figures)
    return int(any(each["longest s"] > GOAL or each["first plan s"] > GOAL for each in figures))


if __name__ == "__main__":
    sys.exit(main())
