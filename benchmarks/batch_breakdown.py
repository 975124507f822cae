"""Where the time of one batch goes: Spark's part from its progress report, ours from the classes of the pipeline.

    python -m benchmarks.batch_breakdown --sizes 100,100000 --out benchmarks/results/batch-breakdown.json
    python -m benchmarks.batch_breakdown --work running --sizes 100
    python -m benchmarks.batch_breakdown --work stateless --output topic --sizes 200

The stream is one of benchmarks/speed/flows.py or topic_flows.py, in this process; its methods are timed from outside,
each without the time of the timed methods it calls. Medians in ms, of upkeep and of CPU time the mean; `Spark:` is what
StreamingQueryProgress reports. Parquet ends and the table's log begins when the data file gets its name, which the file
system tells to a few ms.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks.measuring import Workshop, named, on_topic, quiet, save, table, workshop
from benchmarks.speed import flows, topic_flows
from benchmarks.speed.feed import create_topic, feed_backlog
from benchmarks.speed.process import cpu_seconds, family
from benchmarks.speed.records import generate
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.sinks.delta.direct_writers import ArrowAppend, ArrowMerge, ParquetAppend
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.kafka.output import TopicOutput
from streaming_jobs.sinks.kafka.producer import BatchProducer
from streaming_jobs.sinks.kafka.rows import RowJudge
from streaming_jobs.sinks.kafka.writer import TransactionWriter
from streaming_jobs.state.checkpoint import CheckpointSync
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.stream import Stream

BATCHES = {100: 220, 200: 320}
WARM_UP = {100: 100, 200: 200}
SPARK = {
    "latestOffset": "Spark: latest offsets",
    "walCommit": "Spark: offsets to the checkpoint",
    "getBatch": "Spark: getBatch",
    "queryPlanning": "Spark: plan of the batch",
    "commitOffsets": "Spark: commit to the checkpoint",
}
TRANSFORM, WRITE, PARQUET, LOG = "transform (Spark's job, rows to Arrow)", "write", "Parquet", "log of the table"
UPKEEP = "upkeep"
WHOLE, CPU = "whole batch", "CPU time of all processes, with the broker"
OURS: list[tuple[type, str, str]] = [
    (BatchPipeline, "_ranges", "offset range from the checkpoint"),
    (BatchPipeline, "_done", "is it in the table already"),
    (BatchPipeline, "_commit_others", "dead letters and further tables"),
    (BatchPipeline, "_finish", "report"),
    (ArrowAppend, "commit", WRITE),
    (ArrowMerge, "commit", WRITE),
    (ParquetAppend, "commit", LOG),
    (DeltaSink, "holds", "look before the commit"),
    (CheckpointSync, "planned", "sync of the checkpoint's offsets"),
    (CheckpointSync, "state", "sync of the checkpoint's state"),
    (LedgerFile, "append", "line in the ledger file"),
    (TableMaintenance, "after_commit", UPKEEP),
    (TopicOutput, "prepare", "topic: Spark's job, rows to Arrow"),
    (RowJudge, "_judged", "topic: values, verdicts"),
    (TransactionWriter, "write", "topic: begin, markers, end of the transaction"),
    (BatchProducer, "_send", "topic: send, acknowledgements"),
    (BatchProducer, "_commit", "topic: commit of the transaction"),
]


class Stopwatch:
    """Times of nested calls by name, each without those inside it, summed until `take`; one thread at a time."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}
        self._spent: dict[str, float] = defaultdict(float)
        self._inside = [0.0]
        self._lock = threading.Lock()

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        @wraps(function)
        def timed(*arguments: Any, **named_arguments: Any) -> Any:
            self.began[name] = time.time()
            began = time.perf_counter()
            self._inside.append(0.0)
            try:
                return function(*arguments, **named_arguments)
            finally:
                whole = time.perf_counter() - began
                own = whole - self._inside.pop()
                self._inside[-1] += whole
                with self._lock:
                    self._spent[name] += own

        return timed

    def take(self) -> dict[str, float]:
        """Milliseconds by name since the last time."""
        with self._lock:
            spent, self._spent = self._spent, defaultdict(float)
        return {name: seconds * 1000 for name, seconds in spent.items()}


@contextmanager
def timed(watch: Stopwatch) -> Iterator[None]:
    """The pipeline's methods go through the watch."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in OURS]
    output: Any = importlib.import_module("streaming_jobs.sinks.delta.output")
    staged = output.prepare_write
    for (owner, name, original), (_, _, label) in zip(before, OURS, strict=True):
        setattr(owner, name, watch.around(label, original))
    output.prepare_write = watch.around(TRANSFORM, staged)
    try:
        yield
    finally:
        output.prepare_write = staged
        for owner, name, original in before:
            setattr(owner, name, original)


def stream_of(shop: Workshop, work: str, output: str, topic: str, name: str) -> Stream:
    """The work's stream under another name, from a topic to a table or a topic of that name."""
    if output == "table":
        return named(on_topic(getattr(flows, work), topic), name)
    stream: Stream = on_topic(getattr(topic_flows, work), topic)
    sink = next(iter(stream.topic_sinks.values()))
    written = replace(sink, topic=replace(sink.topic, name=name))
    create_topic(shop.bootstrap, name)
    sinks: dict[str, Any] = {name: written}
    return replace(stream, name=name, sinks=sinks, topic_sinks={})


def measured(shop: Workshop, work: str, output: str, size: int, batches: int) -> list[dict[str, float]]:
    """Run the batches; for each one milliseconds by part."""
    topic = f"{work}-{size}"
    create_topic(shop.bootstrap, topic)
    feed_backlog(shop.bootstrap, topic, generate(batches * size, seed=1))
    settings = shop.settings.model_copy(
        update={"stream": shop.settings.stream.model_copy(update={"max_offsets_per_trigger": size})}
    )
    stream = stream_of(shop, work, output, topic, f"{work}_{size}")
    watch = Stopwatch()
    parts: dict[int, dict[str, float]] = {}
    used: dict[int, float] = {}
    first = WARM_UP.get(size, 3)
    call = BatchPipeline.__call__

    def one_batch(self: BatchPipeline, frame: Any, batch: int) -> None:
        began = time.perf_counter()
        watch.take()
        call(self, frame, batch)
        parts[batch] = {"whole": (time.perf_counter() - began) * 1000, **watch.take()}
        if batch in (first, batches - 1):  # it takes some ms, which would be in the times of every batch
            used[batch] = sum(cpu_seconds(process) for process in family(os.getpid()))
        _split_write(parts[batch], settings.tables / self.sinks.primary.name, watch.began.get(WRITE, 0.0))

    with timed(watch):
        BatchPipeline.__call__ = one_batch  # type: ignore[method-assign]
        try:
            started = shop.start(stream, settings)
            shop.finish(started, seconds=300)
        finally:
            BatchPipeline.__call__ = call  # type: ignore[method-assign]
    both = sorted(batch for batch in parts.keys() & started.progress.keys() if batch > first)
    cpu = 1000 * (used[batches - 1] - used[first]) / (batches - 1 - first)
    return [{**_joined(parts[batch], started.progress[batch]), CPU: cpu} for batch in both]


def _split_write(part: dict[str, float], path: Path, began: float) -> None:
    """Divide the driver path's write at the time at which the data file got its name."""
    if WRITE in part:
        whole = part.pop(WRITE)
        written = max((file.stat().st_ctime for file in path.glob("*.parquet")), default=began)
        part[PARQUET] = min(max((written - began) * 1000, 0.0), whole)
        part[LOG] = whole - part[PARQUET]


def _joined(ours: dict[str, float], spark: dict[str, Any]) -> dict[str, float]:
    told = {label: float(spark.get(name, 0)) for name, label in SPARK.items()}
    whole = ours.pop("whole")
    rest = {
        "rest of the pipeline": whole - sum(ours.values()),
        "from Spark to Python and back": float(spark["addBatch"]) - whole,
        "Spark: rest": float(spark["triggerExecution"]) - float(spark["addBatch"]) - sum(told.values()),
    }
    return {**told, **ours, **rest, WHOLE: float(spark["triggerExecution"])}


def _value(text: str) -> Any:
    return json.loads(text) if text.startswith("{") else text


def main() -> int:
    """Measure each size and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_breakdown")
    parser.add_argument("--work", choices=["stateless", "windowed", "running"], default="stateless")
    parser.add_argument("--output", choices=["table", "topic"], default="table")
    parser.add_argument("--sizes", default="100,100000")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting; {...} is JSON")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet()
    sizes = [int(size) for size in options.sizes.split(",")]
    medians: dict[int, dict[str, float]] = {}
    with workshop({key: _value(text) for key, _, text in (each.partition("=") for each in options.set)}) as shop:
        for size in sizes:
            batches = measured(shop, options.work, options.output, size, BATCHES.get(size, 13))
            names = list(dict.fromkeys(name for batch in batches for name in batch))
            medians[size] = {n: statistics.median(batch.get(n, 0.0) for batch in batches) for n in names}
            medians[size][UPKEEP] = statistics.mean(batch.get(UPKEEP, 0.0) for batch in batches)
    names = list(dict.fromkeys(name for each in medians.values() for name in each if name not in (WHOLE, CPU)))
    rows = [
        {f"{options.work}, ms": name, **{f"{size:,} records": medians[size].get(name, 0.0) for size in sizes}}
        for name in [*names, WHOLE, CPU]
    ]
    sys.stdout.write(table(rows))
    save(
        options.out,
        work=options.work,
        output=options.output,
        medians={str(size): each for size, each in medians.items()},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
