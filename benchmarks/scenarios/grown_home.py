"""What a home costs that has grown: many partitions, files, savepoints, days of ledger and plans.

    python -m benchmarks grown_home --out benchmarks/results/grown_home.json
    python -m benchmarks grown_home --partitions 100 --files 500 --savepoints 20 --days 3

No batch is run and no broker is asked: record, table, ledger, checkpoint, savepoints and plans are written as a driver
leaves them. Each batch moves `MOVED` of the partitions. The savepoints share the table's files, as those of an append
table do. Each figure has a bound (`BOUNDS`), in seconds or MB; exit code 1 above one of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, cast
from unittest import mock

from deltalake import DeltaTable as OpenTable

from benchmarks.laid_home import ROWS, data_file, lay_checkpoint, lay_stream, unchanged
from benchmarks.place import megabytes
from benchmarks.run import Report, progress, seconds_of, verdict
from reprocessing.plan.first_bad_row import before_first_bad
from reprocessing.plan.planner import RecoveryRequest, make_plan
from reprocessing.plan.registry import under_way
from reprocessing.plan.snapshot import planning_snapshot
from reprocessing.plan.targets import Target
from streaming_jobs.formats import Json
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.ledger.positions import OffsetBounds, OffsetRange
from streaming_jobs.preflight.snapshot import ledger_file, take_snapshot
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.savepoint_retention import PeriodicSavepoints, try_take
from streaming_jobs.state.savepoints import name_of
from streaming_jobs.state.status import first_status
from streaming_jobs.state.stream_record import BoundTopic
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream

FLOWS = ["benchmarks.scenarios.grown_home"]
TOPIC, TOPIC_ID, NAME = "grown_in", "topic-1", "grown"
MOVED, PER_MOVE, KEPT, PLANS = 10, 5, 110, 50
BAD = "place = 'wrong'"
STREAM = Stream(NAME, unchanged, {"value": KafkaTopic(TOPIC, Json(ROWS))}, {NAME: DeltaTable(NAME)})
BOUNDS = {
    "append, ms": 10.0,
    "a day rolled within a batch, s": 0.1,
    "ledger, MB": 100.0,
    "periodic savepoint within a batch, s": 0.1,
    "periodic savepoint, s": 30.0,
    "preflight, s": 2.0,
    "first status, s": 30.0,
    "planning, s": 10.0,
    "planning, Python MB": 200.0,
    "plan under way, s": 0.1,
    "before the first bad row, s": 180.0,
}
"""The most of each figure at the default sizes, on two cores beside other work."""


def run(
    report: Report,
    *,
    partitions: int = 1_000,
    files: int = 10_000,
    savepoints: int = 200,
    days: int = 30,
    batches: Annotated[int, "in the ledger of each day"] = 300,
    folder: Annotated[Path | None, "where the home is laid; default: the system's temporary folder"] = None,
) -> None:
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=folder) as home:
        settings = Settings.load({"home": Path(home), "flows": FLOWS, "table.ledger_retention": "60 days"})
        code = code_version(STREAM, settings.flows)._replace(hash="before")
        grown = GrownHome(settings, partitions, days, batches, code)
        figures = grown.lay_ledger()
        progress(f"ledger: {figures}")
        sink = grown.lay_stream(files)
        grown.lay_savepoints(sink, savepoints)
        progress("savepoints")
        figures |= grown.measure()
    rows = [
        {"what": what, "figure": figure, "bound": BOUNDS[what], "verdict": verdict(figure < BOUNDS[what])}
        for what, figure in figures.items()
    ]
    report.table("figures", rows)


def _topics(ends: dict[int, int]) -> TopicReader:
    """The topic as an admin client would describe it: all of it is there, no transaction is open."""
    return cast(
        "TopicReader",
        SimpleNamespace(
            describe=lambda _: TopicInfo(TOPIC, TOPIC_ID, len(ends), -1, "delete"),
            offsets=lambda _: OffsetBounds(dict.fromkeys(ends, 0), dict(ends)),
            latest=lambda _: dict(ends),
            high_watermarks=lambda _: dict(ends),
            offsets_for_time=lambda _, __: dict(ends),
            mean_size=lambda _, __: 100.0,
        ),
    )


@dataclass(frozen=True)
class GrownHome:
    """A home with one stream, whose ledger has so many days of so many batches."""

    settings: Settings
    partitions: int
    days: int
    batches: int
    code: CodeVersion

    @property
    def last(self) -> int:
        """The number of the newest batch."""
        return self.days * self.batches - 1

    def ends(self, batch: int) -> dict[int, int]:
        """The offsets after a batch: batch N moves MOVED partitions, from N * MOVED on, round and round."""
        whole, rest = divmod((batch + 1) * MOVED, self.partitions)
        return {p: (whole + (p < rest)) * PER_MOVE for p in range(self.partitions)}

    def entry(self, batch: int) -> LedgerEntry:
        offsets = (OffsetRange(TOPIC, TOPIC_ID, self.ends(batch - 1), self.ends(batch)),)
        return LedgerEntry("batch", NAME, NAME, 1, batch, offsets, {"written": MOVED * PER_MOVE}, code=self.code)

    def lay_ledger(self) -> dict[str, float]:
        """The ledger; returns the figures of its appends."""
        ledger, today = ledger_file(self.settings, NAME), datetime.now(UTC)
        first: list[float] = []
        others: list[float] = []
        for day in range(self.days):
            with _on_day(today - timedelta(days=self.days - 1 - day)):
                for batch in range(day * self.batches, (day + 1) * self.batches):
                    entry = self.entry(batch)
                    took = seconds_of(lambda: ledger.append(entry, {NAME: batch}, 0.2))  # noqa: B023
                    (others if batch % self.batches else first).append(took)
                ledger.rolled()  # the day before is compressed in a thread
        return {
            "append, ms": sum(others) / max(len(others), 1) * 1000,
            "a day rolled within a batch, s": max(first),
            "ledger, MB": megabytes(Path(str(ledger.folder))),
        }

    def lay_stream(self, files: int) -> DeltaSink:
        """Record, checkpoint, tables; the files are from the last two batches, the newest file has a wrong row."""
        source = BoundTopic(TOPIC, TOPIC_ID, dict.fromkeys(range(self.partitions), 0))
        sink = lay_stream(self.settings, STREAM, source, self.code)[NAME]
        adds = [
            data_file(Path(str(sink.path)), number, "wrong" if number == files - 1 else "here")
            for number in range(files)
        ]
        for batch, added in ((self.last - 1, adds[:-1]), (self.last, adds[-1:])):
            sink.commit(self.entry(batch), lambda _, how, added=added: sink.commit_actions(added, how))  # type: ignore[misc]
        OpenTable(str(sink.path)).create_checkpoint()
        lay_checkpoint(self.settings, STREAM, TOPIC, range(max(0, self.last - KEPT), self.last + 1), self.ends)
        return sink

    def lay_savepoints(self, sink: DeltaSink, count: int) -> None:
        """Savepoints of earlier batches, with links to the same files, as copies of a first one that is real."""
        record = stream_record.load(self.settings, NAME)
        assert record is not None
        with mock.patch("streaming_jobs.storage.files.os.fsync"):  # the links are counted, not laid down for ever
            first = savepoints.take(self.settings, STREAM, record, self.last - 1, "time")
        folder, links = Path(str(savepoints.folder(self.settings, NAME))), Path(str(sink.path)) / "_savepoints"
        for number in range(1, count):
            copy = replace(first, batch=self.last - 1 - number, taken_at=first.taken_at - number * 900.0)
            shutil.copytree(folder / first.id, folder / copy.id, copy_function=os.link)
            (folder / copy.id / "savepoint.json").unlink()
            shutil.copytree(links / f"{NAME}-{first.id}", links / f"{NAME}-{copy.id}", copy_function=os.link)
            savepoints._write(self.settings, copy)
        assert name_of(first.txn) == first.id

    def measure(self) -> dict[str, float]:
        """What looks at the home, each with its time."""
        settings, last, topics = self.settings, self.last, _topics(self.ends(self.last))
        record = stream_record.load(settings, NAME)
        assert record is not None
        keeper = PeriodicSavepoints(settings, STREAM, record)
        keeper._last = 0.0

        def plan() -> None:
            snapshot = planning_snapshot(settings, STREAM, topics)
            make_plan(settings, [RecoveryRequest(snapshot, Target("batch", str(last - 20)))])

        figures = {"periodic savepoint within a batch, s": seconds_of(lambda: keeper.after(last))}
        keeper.settled(600)
        savepoints.drop(settings, STREAM, name_of(self.entry(last).txn))
        figures["periodic savepoint, s"] = seconds_of(lambda: try_take(settings, STREAM, record, last, "time"))
        figures["preflight, s"] = seconds_of(lambda: take_snapshot(settings, STREAM, topics))
        figures["first status, s"] = seconds_of(lambda: first_status(settings, NAME))
        progress(f"statuses: {figures}")
        tracemalloc.start()
        figures["planning, s"] = seconds_of(plan)
        figures["planning, Python MB"] = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        for _ in range(PLANS):
            plan()
        figures["plan under way, s"] = seconds_of(lambda: under_way(settings, NAME))
        progress(f"plans: {figures}")
        snapshot = planning_snapshot(settings, STREAM, topics)
        figures["before the first bad row, s"] = seconds_of(lambda: before_first_bad(snapshot, BAD, exact=True))
        return figures


@contextmanager
def _on_day(day: datetime) -> Iterator[None]:
    """Let the ledger file believe that it is this day."""
    with mock.patch("streaming_jobs.state.ledger_file.datetime") as clock:
        clock.now.return_value = day
        yield
