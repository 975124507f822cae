"""The contract of a sink, kept by a Delta table and by one in memory; the real batch pipeline over tables in memory.

The second implementation is the proof that the seam is one: nothing of the pipeline is replaced here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streaming_jobs.errors import Fenced
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchFiles, BatchHooks
from streaming_jobs.runtime.batch_path import DriverPathAttempts
from streaming_jobs.runtime.spark_plan import PlanTraits
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sinks.base import BatchOfRows, Sink, SinkSet
from streaming_jobs.sinks.delta.output import DeltaOutput
from streaming_jobs.sources.base import SourceCounts
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.testing import MemoryTable
from tests.conftest import SettingsFactory
from tests.support.worlds import (
    CODE,
    DEAD_LETTERS,
    PRIMARY,
    SECONDARY,
    STREAM,
    TOPIC,
    TOPIC_ID,
    Disk,
    entry,
    parity,
)

ROWS = BatchOfRows(1, 0, driver=True)


@dataclass
class Frame:
    """Rows in memory where Spark has a frame."""

    rows: pa.Table
    sparkSession: None = None
    columns: tuple[str, ...] = ("k", "n")

    def toArrow(self) -> pa.Table:
        return self.rows

    def where(self, condition: str) -> Frame:
        mask = [n % 2 == int(condition[-1]) for n in self.rows["n"].to_pylist()]
        return Frame(self.rows.filter(pa.array(mask, pa.bool_())))

    def persist(self) -> Frame:
        return self

    def unpersist(self) -> None:
        """Nothing is held."""


def frame(*numbers: int) -> Any:
    return Frame(pa.table({"k": ["x"] * len(numbers), "n": pa.array(numbers, pa.int64())}))


@pytest.fixture(params=["delta", "memory"])
def reopen(request: pytest.FixtureRequest, settings: SettingsFactory) -> Any:
    """Opens the sink, each time as a driver that has just started does."""
    if request.param == "memory":
        commits: list[Any] = []
        return lambda: MemoryTable(PRIMARY, commits)
    disk = Disk(settings()).open()
    return lambda: DeltaOutput(Disk(disk.settings).open().sinks[PRIMARY], StreamSettings())


def test_rows_are_visible_with_their_entry_once_they_are_committed(reopen: Callable[[], Sink]) -> None:
    sink = reopen()
    at, version = sink.position, sink.version
    pending = sink.prepare(frame(1, 2), ROWS)
    assert pending.rows == 2 and (sink.position, sink.version) == (at, version), "preparing shows nothing"
    assert reopen().version == version
    made = entry(0, rows={"written": 2})
    assert pending.commit(made) == sink.version == version + 1
    pending.close()
    assert sink.position == Txn(1, 0) and sink.newest_entry() == made
    again = reopen()
    assert (again.position, again.version, again.newest_entry()) == (Txn(1, 0), version + 1, made)


def test_a_batch_is_taken_once_whoever_brings_it_again(reopen: Callable[[], Sink]) -> None:
    first, second = reopen(), reopen()
    assert first.prepare(frame(1), ROWS).commit(entry(0)) is not None
    version = first.version
    for sink in (first, second, reopen()):
        assert sink.prepare(frame(1), ROWS).commit(entry(0)) is None
        sink.refresh()
        assert (sink.version, sink.position) == (version, Txn(1, 0))


def test_a_batch_without_rows_is_there_too(reopen: Callable[[], Sink]) -> None:
    sink = reopen()
    assert sink.prepare(frame(), ROWS).commit(entry(0)) == sink.version
    assert sink.position == Txn(1, 0)


def test_a_driver_of_an_older_generation_is_refused(reopen: Callable[[], Sink]) -> None:
    old, new = reopen(), reopen()
    pending = old.prepare(frame(1), ROWS)
    assert new.prepare(frame(), replace(ROWS, generation=2)).commit(entry(-1, kind="fence", generation=2)) is not None
    with pytest.raises(Fenced):
        pending.commit(entry(0))
    old.refresh()
    assert old.position == Txn(2, -1)


# the real pipeline over tables in memory


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


@dataclass
class Records:
    """A source with two bad records in each batch."""

    name: str = TOPIC
    observation: str = "recourse_things"
    lateness: timedelta | None = None

    def rows(self, offsets: Any) -> int:
        return int(offsets.records)

    def late_records(self, spark: object, offsets: object, watermark_ms: int) -> int:
        return 0

    def bad_records(self, spark: object, offsets: object) -> Any:
        reasons = {"reason": ["not_json", "event_time_ahead"], "detail": [repr(b"?"), "a year ahead"]}
        return Frame(pa.table({"offset": [3, 5], "value": [b"?", b"{}"], **reasons}))


class CountsTwo:
    """The query that Spark runs: what was counted of the batch."""

    def observed(self, observation: str) -> SourceCounts:
        return SourceCounts(2)

    def dropped_behind(self) -> int | None:
        return None


@pytest.mark.parametrize("point", ["batch_started", "staged", "secondary_committed", "primary_committed", None])
def test_a_batch_over_tables_in_memory_is_there_once_wherever_its_driver_is_killed(
    settings: SettingsFactory, tmp_path: Path, point: str | None
) -> None:
    disk = Disk(settings()).open()
    tables: dict[str, list[Any]] = {PRIMARY: [], SECONDARY: [], DEAD_LETTERS: []}
    reports: list[Any] = []

    def driver(dies_at: str | None) -> BatchPipeline:
        def at(name: str, stream: str, batch: int) -> None:
            if name == dies_at:
                raise Killed

        return BatchPipeline(
            stream=parity,
            generation=1,
            topic_ids={TOPIC: TOPIC_ID},
            sources=[Records()],
            sinks=SinkSet(
                MemoryTable(PRIMARY, tables[PRIMARY]),
                [MemoryTable(SECONDARY, tables[SECONDARY])],
                MemoryTable(DEAD_LETTERS, tables[DEAD_LETTERS]),
            ),
            files=BatchFiles(
                StreamFolder.of(disk.settings, STREAM).checkpoint(1),
                disk.ledger_file,
                DriverPathAttempts(tmp_path / "attempt"),
            ),
            hooks=BatchHooks(threading.Event(), lambda: None, reports.append, lambda _: None, at=at),
            code=CODE,
            settings=StreamSettings(),
            traits=PlanTraits(stateful=False, multiplies=False),
            query=CountsTwo(),
        )

    disk.plan(0)
    if point is not None:
        with pytest.raises(Killed):
            driver(point)(frame(1, 2, 3, 4), 0)
    driver(None)(frame(1, 2, 3, 4), 0)
    stored = {name: MemoryTable(name, commits).rows() for name, commits in tables.items()}
    assert (stored[PRIMARY]["n"].to_pylist(), stored[SECONDARY]["n"].to_pylist()) == ([2, 4], [1, 3])
    assert stored[DEAD_LETTERS]["detail"].to_pylist() == ["b'?'", "a year ahead"]
    assert [len(commits) for commits in tables.values()] == [1, 1, 1]
    newest = tables[PRIMARY][-1][0]
    assert newest.rows == {SECONDARY: 2, "dead_letters": 2, "written": 2}
    assert newest.txns == {SECONDARY: Txn(1, 0).version, DEAD_LETTERS: Txn(1, 0).version}
    assert reports[-1].skipped == (point == "primary_committed")
