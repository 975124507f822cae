"""How long a plan takes over 20 streams with topics between them: a chain, and a tree.

    python -m benchmarks planning --batches 1000 --rounds 5 --out benchmarks/results/planning.json

Each stream has read its topic in so many batches of 20 records, has written as many to its own topic, and has ten
consumer groups of other programs on it. No batch is run: tables, ledgers and checkpoints are written as a driver leaves
them. The topics are real, on a broker. The plan of the first stream goes back by 50 batches and takes the others along,
each from a savepoint that exists. The first round takes these savepoints. Exit code 1: a plan took longer than 5 s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain as chained
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition
from deltalake import write_deltalake

from benchmarks.laid_home import ROWS, lay_checkpoint, lay_stream, unchanged
from benchmarks.place import Place, place
from benchmarks.run import Report, Row, median, seconds_of, verdict
from reprocessing.plan.planner import RecoveryRequest, make_plan
from reprocessing.plan.snapshot import planning_snapshot
from reprocessing.plan.targets import Target
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.formats import Json
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange, WrittenRange
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.settings import Settings
from streaming_jobs.state.stream_record import BoundTopic
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream

FLOWS = ["benchmarks.scenarios.planning"]
STREAMS = 20
GOAL = 5.0
PARTITIONS, PER_BATCH, COMMITS, BACK, GROUPS = 2, 10, 80, 50, 10


def source_of(shape: str, number: int) -> str:
    """The topic that a stream reads: in a chain of the one before it, in a tree of number (n - 1) / 2."""
    return f"{shape}_in" if number == 0 else f"{shape}_out_{number - 1 if shape == 'chain' else (number - 1) // 2:02d}"


def _stream(shape: str, number: int) -> Stream:
    out = KafkaTopic(f"{shape}_out_{number:02d}", Json(ROWS))
    sinks: dict[str, Any] = {"rows": DeltaTable(f"{shape}_rows_{number:02d}"), "out": KafkaSink(out, key="place")}
    source = KafkaTopic(source_of(shape, number), Json(ROWS))
    return Stream(f"{shape}_{number:02d}", unchanged, {"value": source}, sinks)


SHAPES = {shape: [_stream(shape, number) for number in range(STREAMS)] for shape in ("chain", "tree")}
globals().update({stream.name: stream for stream in chained(*SHAPES.values())})


def run(report: Report, *, batches: int = 1_000, rounds: int = 5, shapes: tuple[str, ...] = tuple(SHAPES)) -> None:
    with place() as here:
        report.table("figures", [_measured(here, shape, SHAPES[shape], batches, rounds) for shape in shapes])


def _measured(here: Place, shape: str, streams: Sequence[Stream], batches: int, rounds: int) -> Row:
    """Write everything of one shape, then time its plan."""
    settings, producer = here.settings({"flows": FLOWS}), Producer({"bootstrap.servers": here.bootstrap})
    topics = here.topics()
    outputs = [sink.name for stream in streams for sink in stream.topic_sinks.values()]
    ids = {}
    for name in (f"{shape}_in", *outputs):
        ids[name] = topics.create(name, PARTITIONS).id
        for number in range(batches * PER_BATCH):
            for partition in range(PARTITIONS):
                producer.produce(name, value=json.dumps({"id": number, "place": "here"}), partition=partition)
            producer.poll(0)
        producer.flush(60)
    for number, stream in enumerate(streams):
        _lay(settings, stream, source_of(shape, number), ids, batches)
        _read_by_others(here.bootstrap, outputs[number], batches * PER_BATCH)

    def plan() -> None:
        snapshot = planning_snapshot(settings, streams[0], topics)
        made = make_plan(settings, [RecoveryRequest(snapshot, Target("batch", str(batches - 1 - BACK)))])
        assert [planned.stream for planned in made.streams] == [stream.name for stream in streams]
        assert all(planned.base.savepoint is not None for planned in made.streams)

    first, *later = (seconds_of(plan) for _ in range(rounds + 1))
    return {
        "streams": f"{len(streams)}, {shape}",
        "batches in each ledger": batches,
        "first plan s": first,
        "median s": median(later),
        "longest s": max(later),
        "verdict": verdict(max(first, *later) <= GOAL),
    }


def _lay(settings: Settings, stream: Stream, source: str, ids: dict[str, str], batches: int) -> None:
    """A stream on disk after so many batches: record, tables, checkpoint and ledger; the last 80 are commits too."""
    code = code_version(stream, settings.flows)
    bound = BoundTopic(source, ids[source], dict.fromkeys(range(PARTITIONS), 0))
    sinks, committed = lay_stream(settings, stream, bound, code), range(max(0, batches - COMMITS), batches)
    lay_checkpoint(settings, stream, source, committed, lambda batch: _at(batch + 1))
    rows = pa.table({"id": list(range(PER_BATCH)), "place": ["here"] * PER_BATCH})
    ledger, primary = ledger_file(settings, stream.name), sinks[stream.primary.name]
    (out,) = stream.topic_sinks.values()
    for batch in range(batches):
        begin, end = batch * PER_BATCH, (batch + 1) * PER_BATCH
        written = tuple(WrittenRange(out.name, ids[out.name], p, begin, end, PER_BATCH) for p in range(PARTITIONS))
        offsets = (OffsetRange(source, ids[source], _at(batch), _at(batch + 1)),)
        counts = {"written": PER_BATCH}
        entry = LedgerEntry("batch", stream.name, primary.name, 1, batch, offsets, counts, code=code, written=written)
        if batch in committed:
            primary.commit(entry, lambda table, how: write_deltalake(table, rows, mode="append", commit_properties=how))
        ledger.append(entry, {primary.name: primary.handle.version()}, 0.2)


def _read_by_others(bootstrap: str, topic: str, offset: int) -> None:
    """Consumer groups of other programs commit an offset."""
    for number in range(GROUPS):
        consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": f"{topic}-{number}"})
        positions = [TopicPartition(topic, partition, offset) for partition in range(PARTITIONS)]
        consumer.commit(offsets=positions, asynchronous=False)
        consumer.close()


def _at(batch: int) -> dict[int, int]:
    return dict.fromkeys(range(PARTITIONS), batch * PER_BATCH)
