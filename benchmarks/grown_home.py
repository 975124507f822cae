"""What a home costs that has grown: many partitions, files, savepoints, days of ledger and plans.

    python -m benchmarks.grown_home --out benchmarks/results/grown_home.json
    python -m benchmarks.grown_home --partitions 100 --files 500 --savepoints 20 --days 3

No batch is run and no broker is asked: record, table, ledger, checkpoint, savepoints and plans are written as a driver
leaves them. Each batch moves `MOVED` of the partitions. The savepoints share the table's files, as those of an append
table do. Each figure has a bound (`BOUNDS`), in seconds or MB; exit code 1 above one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable as OpenTable
from deltalake.transaction import AddAction
from pyspark.sql.types import LongType, StringType, StructField, StructType

from benchmarks.measuring import megabytes, quiet, save, table
from reprocessing.executor import under_way
from reprocessing.planning.first_bad_row import before_first_bad
from reprocessing.planning.planner import Request, make_plan
from reprocessing.planning.snapshot import planning_snapshot
from reprocessing.planning.targets import Target
from streaming_jobs.formats import Json
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetBounds, OffsetRange
from streaming_jobs.preflight.snapshot import ledger_file, take_snapshot
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.table_setup import ensure_sink
from streaming_jobs.sinks.schemas import DEAD_LETTERS
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.savepoints import PeriodicSavepoints, name_of, try_take
from streaming_jobs.state.status import first_status
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import BoundTable, BoundTopic, CodeSince
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream

TOPIC, TOPIC_ID, NAME = "grown_in", "topic-1", "grown"
ROWS = StructType([StructField("id", LongType()), StructField("place", StringType())])
MOVED, PER_MOVE, KEPT, PLANS = 10, 5, 110, 50
BAD = "place = 'wrong'"

BOUNDS = {
    "append, ms": 10.0,
    "a day rolled within a batch, s": 0.1,
    "ledger, MB": 100.0,
    "periodic savepoint within a batch, s": 0.1,
    "periodic savepoint, s": 30.0,
    "preflight, s": 2.0,
    "first status, s": 30.0,
    "plan under way, s": 0.1,
    "planning, s": 10.0,
    "planning, Python MB": 200.0,
    "before the first bad row, s": 180.0,
}
"""The most of each figure at the default sizes, on two cores beside other work."""


def passed_on(value: Any) -> Any:
    """The function of the stream; no batch is run."""
    return value


STREAM = Stream(NAME, passed_on, {"value": KafkaTopic(TOPIC, Json(ROWS))}, {NAME: DeltaTable(NAME)})


class KnownTopics:
    """The topic as an admin client would describe it (`TopicReader`)."""

    def __init__(self, ends: Mapping[int, int]) -> None:
        self.ends = dict(ends)

    def describe(self, name: str) -> TopicInfo | None:
        """The topic."""
        return TopicInfo(name, TOPIC_ID, len(self.ends), -1, "delete")

    def offsets(self, _: str) -> OffsetBounds:
        """All of it is there."""
        return OffsetBounds(dict.fromkeys(self.ends, 0), dict(self.ends))

    def latest(self, _: str) -> dict[int, int]:
        """The ends."""
        return dict(self.ends)

    def high_watermarks(self, _: str) -> dict[int, int]:
        """The ends: no transaction is open."""
        return dict(self.ends)

    def offsets_for_time(self, _: str, __: int) -> dict[int, int]:
        """No record is younger."""
        return dict(self.ends)

    def mean_size(self, _: str, __: Mapping[int, int]) -> float | None:
        """Bytes of a record."""
        return 100.0


def ends_after(batch: int, partitions: int) -> dict[int, int]:
    """The offsets after a batch: batch N moves MOVED partitions, from N * MOVED on, round and round."""
    moves = (batch + 1) * MOVED
    whole, rest = divmod(moves, partitions)
    return {p: (whole + (p < rest)) * PER_MOVE for p in range(partitions)}


def entry_of(batch: int, partitions: int, code: Any) -> LedgerEntry:
    """The ledger entry of a batch."""
    read = OffsetRange(TOPIC, TOPIC_ID, ends_after(batch - 1, partitions), ends_after(batch, partitions))
    return LedgerEntry("batch", NAME, NAME, 1, batch, (read,), {"written": MOVED * PER_MOVE}, code=code)


def lay_table(settings: Settings, files: int, before: LedgerEntry, entry: LedgerEntry) -> DeltaSink:
    """The stream's tables: the primary one with so many files in its last two batches, the newest with a wrong row."""
    bound, sinks = [], {}
    for declared, role in all_tables(STREAM):
        assert isinstance(declared, DeltaTable)
        columns = DEAD_LETTERS if declared.name == STREAM.dead_letters else ROWS
        sinks[declared.name] = ensure_sink(settings, declared, NAME, columns, generation=1)
        bound.append(BoundTable(declared.name, str(sinks[declared.name].handle.metadata().id), role))
    sink = sinks[NAME]
    adds = [_data_file(sink.path, number, "wrong" if number == files - 1 else "here") for number in range(files)]
    for each, added in ((before, adds[:-1]), (entry, adds[-1:])):
        sink.commit(each, lambda _, properties, added=added: sink.commit_actions(added, properties))  # type: ignore[misc]
    OpenTable(sink.path).create_checkpoint()
    first = stream_record.first(NAME)
    reads = BoundTopic(TOPIC, TOPIC_ID, dict.fromkeys(entry.offsets[0].end, 0))
    since = (CodeSince("before", "1", 1, 0, time.time()),)
    stream_record.save(settings, replace(first, tables=tuple(bound), topics=(reads,), code=since))
    return sink


def _data_file(folder: Path, number: int, place: str) -> AddAction:
    name = f"part-{number:06d}.parquet"
    pq.write_table(pa.table({"id": [number], "place": [place]}), folder / name)
    stats = {
        "numRecords": 1,
        "minValues": {"id": number, "place": place},
        "maxValues": {"id": number, "place": place},
        "nullCount": {"id": 0, "place": 0},
    }
    size = (folder / name).stat().st_size
    return AddAction(name, size, {}, int(time.time() * 1000), True, json.dumps(stats))


def lay_checkpoint(settings: Settings, last: int, partitions: int) -> None:
    """Spark's checkpoint with the newest batches."""
    folder = StreamFolder.of(settings, NAME).checkpoint(1).folder
    for part in ("offsets", "commits", "sources/0"):
        (folder / part).mkdir(parents=True)
    (folder / "metadata").write_text('{"id":"d1232a21-48ec-49aa-80a3-815ce12b0714"}')
    (folder / "sources" / "0" / "0").write_text(f"\0v1\n{_offsets(-1, partitions)}")
    conf = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 1_795_255_789_437, "conf": {}})
    for batch in range(max(0, last - KEPT), last + 1):
        (folder / "offsets" / str(batch)).write_text(f"v1\n{conf}\n{_offsets(batch, partitions)}")
        (folder / "commits" / str(batch)).write_text('v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{}}')


def _offsets(batch: int, partitions: int) -> str:
    return json.dumps({TOPIC: {str(p): end for p, end in ends_after(batch, partitions).items()}})


@contextmanager
def on_day(day: datetime) -> Iterator[None]:
    """Let the ledger file believe that it is this day."""
    with mock.patch("streaming_jobs.state.ledger_file.datetime") as clock:
        clock.now.return_value = day
        yield


def lay_ledger(settings: Settings, options: Any, code: Any) -> dict[str, float]:
    """The ledger of so many days; returns the figures of its appends."""
    ledger, today = ledger_file(settings, NAME), datetime.now(UTC)
    batch, seconds, stalls = 0, 0.0, []
    for day in range(options.days):
        with on_day(today - timedelta(days=options.days - 1 - day)):
            for number in range(options.batches):
                entry = entry_of(batch, options.partitions, code)
                began = time.monotonic()
                ledger.append(entry, {NAME: batch}, 0.2)
                took = time.monotonic() - began
                if number:
                    seconds += took
                else:
                    stalls.append(took)
                batch += 1
            ledger.rolled()  # the day before is compressed in a thread
    return {
        "append, ms": seconds / max(batch - options.days, 1) * 1000,
        "a day rolled within a batch, s": max(stalls),
        "ledger, MB": megabytes(ledger.folder),
    }


def lay_savepoints(settings: Settings, sink: DeltaSink, count: int, last: int) -> None:
    """Savepoints of earlier batches, with links to the same files, as copies of a first one that is real."""
    record = stream_record.load(settings, NAME)
    assert record is not None
    with mock.patch("streaming_jobs.platform.files.os.fsync"):  # the links are counted, not laid down for ever
        first = savepoints.take(settings, STREAM, record, last - 1, "time")
    folder, links = savepoints.folder(settings, NAME), sink.path / "_savepoints"
    for number in range(1, count):
        made = replace(first, batch=last - 1 - number, taken_at=first.taken_at - number * 900.0)
        shutil.copytree(folder / first.id, folder / made.id, copy_function=os.link)
        (folder / made.id / "savepoint.json").unlink()
        shutil.copytree(links / f"{NAME}-{first.id}", links / f"{NAME}-{made.id}", copy_function=os.link)
        savepoints._write(settings, made)
    assert name_of(first.txn) == first.id


def timed(task: Callable[[], Any]) -> float:
    """Seconds that a task takes."""
    began = time.monotonic()
    task()
    return time.monotonic() - began


def measure(settings: Settings, options: Any) -> dict[str, float]:
    """Lay a home, then take each figure."""
    code = code_version(STREAM, settings.flows)._replace(hash="before")
    last = options.days * options.batches - 1
    figures = lay_ledger(settings, options, code)
    _tell("ledger", figures)
    before, newest = (entry_of(batch, options.partitions, code) for batch in (last - 1, last))
    sink = lay_table(settings, options.files, before, newest)
    lay_checkpoint(settings, last, options.partitions)
    lay_savepoints(settings, sink, options.savepoints, last)
    record, topics = stream_record.load(settings, NAME), KnownTopics(ends_after(last, options.partitions))
    assert record is not None
    _tell("savepoints", {})

    keeper = PeriodicSavepoints(settings, STREAM, record)
    keeper._last = 0.0
    figures["periodic savepoint within a batch, s"] = timed(lambda: keeper.after(last))
    keeper.settled(600)
    savepoints.drop(settings, STREAM, name_of(entry_of(last, 1, code).txn))
    figures["periodic savepoint, s"] = timed(lambda: try_take(settings, STREAM, record, last, "time"))
    _tell("savepoint", figures)
    figures["preflight, s"] = timed(lambda: take_snapshot(settings, STREAM, topics))
    figures["first status, s"] = timed(lambda: first_status(settings, NAME))

    def plan() -> None:
        snapshot = planning_snapshot(settings, STREAM, topics)
        make_plan(settings, [Request(snapshot, Target("batch", str(last - 20)))])

    tracemalloc.start()
    figures["planning, s"] = timed(plan)
    figures["planning, Python MB"] = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    _tell("planning", figures)
    for _ in range(PLANS):
        plan()
    figures["plan under way, s"] = timed(lambda: under_way(settings, NAME))
    snapshot = planning_snapshot(settings, STREAM, topics)
    figures["before the first bad row, s"] = timed(lambda: before_first_bad(snapshot, BAD, exact=True))
    _tell("all", figures)
    return figures


def _tell(what: str, figures: Mapping[str, float]) -> None:
    sys.stderr.write(f"{datetime.now():%H:%M:%S} {what}: {dict(figures)}\n")
    sys.stderr.flush()


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grown_home")
    parser.add_argument("--partitions", type=int, default=1_000)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--savepoints", type=int, default=200)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--batches", type=int, default=300, help="in the ledger of each day")
    parser.add_argument("--folder", type=Path, help="where the home is laid; default: the system's temporary folder")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    quiet()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.folder) as folder:
        home = {"home": Path(folder) / "home", "flows": ["benchmarks.grown_home"]}
        figures = measure(Settings.load({**home, "table.ledger_retention": "60 days"}), options)
    rows = [
        {"what": what, "figure": figure, "bound": BOUNDS[what], "verdict": _verdict(figure, BOUNDS[what])}
        for what, figure in figures.items()
    ]
    sys.stdout.write(table(rows))
    save(options.out, sizes={k: v for k, v in vars(options).items() if isinstance(v, int)}, figures=rows)
    return int(any(row["verdict"] != "good" for row in rows))


def _verdict(figure: float, bound: float) -> str:
    return "good" if figure < bound else "NOT GOOD"


if __name__ == "__main__":
    sys.exit(main())
