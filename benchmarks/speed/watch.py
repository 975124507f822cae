"""When an output became readable, seen from outside: a table by its log, a topic by a consumer.

A version of a table is readable from the moment at which its commit file is there; the watch looks for the next
file every two milliseconds, in a backlog every twenty: each look takes CPU time from the contestant. What a version
holds is read after the run, from the files that it added, whoever wrote them: no contestant is asked which records it
has done. Only the progress through a backlog (`Point`) is taken from what the contestant recorded itself; that all of
it is there is proved by the comparison with the truth.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.processes import Follower
from benchmarks.speed.records import COLUMNS, Work
from streaming_jobs.ledger.entry import LedgerEntry

_LOOK_EVERY_LIVE, _LOOK_EVERY_BACKLOG = 0.002, 0.02
_FILE_SECONDS = 5.0
SEEN = "seen"
"""Column of the time (s since 1970) at which a row was readable."""

Action = Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """Progress: at `seen` (s since 1970) this many input records were done and this many rows written.

    `rows` is None where rows and records are committed together, and the records alone say what is done.
    """

    seen: float
    records: int
    rows: int | None


Covered = Callable[[Sequence[Action], int], int | None]
"""Input records that are done with a commit, by its actions and its place among those that change rows."""


class TableWatch:
    """Follows the log of one Delta table."""

    def __init__(self, table: Path, work: Work, covered: Covered, *, live: bool) -> None:
        self.points: list[Point] = []
        self._table, self._work, self._covered = table, work, covered
        self._commits: list[tuple[float, list[str]]] = []
        self._next = self._rows = self._changes = 0
        follower = Follower(self._look, _LOOK_EVERY_LIVE if live else _LOOK_EVERY_BACKLOG)
        self.start, self.check, self.stop = follower.start, follower.check, follower.stop

    def _look(self) -> None:
        path = self._table / "_delta_log" / f"{self._next:020d}.json"
        if not path.exists():
            return
        seen = time.time()
        self._next += 1
        actions = _actions(path)
        added = [a["add"] for a in actions if "add" in a and a["add"].get("dataChange", True)]
        records = self._covered(actions, self._changes)
        if records is None:
            return
        self._changes += 1
        if added:
            self._commits.append((seen, [unquote(add["path"]) for add in added]))
        self._rows += sum(int(json.loads(add["stats"])["numRecords"]) for add in added)
        self.points.append(Point(seen, records, self._rows))

    def arrivals(self) -> pa.Table:
        """Every row that was written, with the time at which it was readable, in this order."""
        columns, parts = COLUMNS[self._work], []
        for seen, files in self._commits:
            for file in files:
                part = pq.read_table(self._table / file, columns=columns.names, partitioning=None)
                rows = part.select(columns.names).cast(columns)
                parts.append(rows.append_column(SEEN, pa.array([seen] * rows.num_rows, pa.float64())))
        return pa.concat_tables(parts)

    def output(self) -> pa.Table:
        from deltalake import DeltaTable

        return pa.table(DeltaTable(self._table).to_pyarrow_table(columns=COLUMNS[self._work].names))


def ledger_covered(actions: Sequence[Action], _: int) -> int | None:
    """By the ledger entry in a commit of the product."""
    entry = LedgerEntry.decode(next((a["commitInfo"].get("userMetadata") for a in actions if "commitInfo" in a), None))
    if entry is None or entry.kind != "batch":
        return None
    return sum(end for offsets in entry.offsets for end in offsets.end.values())


def spark_covered(checkpoint: Path) -> Covered:
    """By the offsets that Spark logged for the batch; a commit without a batch number is the next one in order."""

    def covered(actions: Sequence[Action], place: int) -> int | None:
        if not any("add" in a or "txn" in a for a in actions):
            return None
        batch = next((int(a["txn"]["version"]) for a in actions if "txn" in a), place)
        lines = (checkpoint / "offsets" / str(batch)).read_text().splitlines()
        return sum(int(end) for topic in json.loads(lines[-1]).values() for end in topic.values())

    return covered


def _actions(path: Path) -> list[Action]:
    """The actions of a commit; a file that is there but not yet whole is read again."""
    deadline = time.monotonic() + _FILE_SECONDS
    while True:
        try:
            text = path.read_text(encoding="utf-8")
            if text:
                return [json.loads(line) for line in text.splitlines() if line]
        except ValueError:
            if time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise ValueError(f"{path} stayed empty")
        time.sleep(_LOOK_EVERY_LIVE)
