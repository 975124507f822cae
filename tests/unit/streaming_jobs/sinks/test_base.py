"""The contract of a sink, kept by a Delta table and by one in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pytest

from streaming_jobs.errors import Fenced
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.sinks.base import BatchOfRows, Sink
from streaming_jobs.testing import MemoryTable
from tests.conftest import SettingsFactory
from tests.support.worlds import PRIMARY, Disk, entry

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
    return lambda: Disk(disk.settings).open().sinks[PRIMARY]


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


def test_a_batch_is_taken_once_whoever_brings_it_again_also_without_rows(reopen: Callable[[], Sink]) -> None:
    first, second = reopen(), reopen()
    assert first.prepare(frame(1), ROWS).commit(entry(0)) is not None
    version = first.version
    for sink in (first, second, reopen()):
        assert sink.prepare(frame(1), ROWS).commit(entry(0)) is None
        sink.refresh()
        assert (sink.version, sink.position) == (version, Txn(1, 0))
    assert sink.prepare(frame(), ROWS).commit(entry(1)) == sink.version
    assert sink.position == Txn(1, 1)


def test_a_driver_of_an_older_generation_is_refused(reopen: Callable[[], Sink]) -> None:
    old, new = reopen(), reopen()
    pending = old.prepare(frame(1), ROWS)
    assert new.prepare(frame(), replace(ROWS, generation=2)).commit(entry(-1, kind="fence", generation=2)) is not None
    with pytest.raises(Fenced):
        pending.commit(entry(0))
    old.refresh()
    assert old.position == Txn(2, -1)
