"""For tests of streams: tables in memory that keep the contract of a sink (`sinks/base.py`), ledger and all.

    table = MemoryTable("clean")
    table.rows()        # what readers would see, as Arrow
    table.commits       # (ledger entry, its rows), the oldest first

A batch that is committed twice is there once, and a driver of an older generation is refused, as by a Delta table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from streaming_jobs.errors import Fenced
from streaming_jobs.ledger import LedgerEntry, Txn
from streaming_jobs.positions import OffsetRange
from streaming_jobs.sinks.base import BatchOfRows, Committer, PendingWrite
from streaming_jobs.sources.base import AHEAD

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.sources.base import Source


@dataclass
class MemoryTable:
    """An append-only table in this process's memory; also one of dead letters."""

    name: str
    commits: list[tuple[LedgerEntry, pa.Table]] = field(default_factory=list)
    """What was committed, with its entry; a new one over the same list is what a restarted driver opens."""

    @property
    def position(self) -> Txn | None:
        """The newest batch in it; None if there is none."""
        return self.commits[-1][0].txn if self.commits else None

    @property
    def version(self) -> int:
        """The number of its last commit, -1 before the first one."""
        return len(self.commits) - 1

    def rows(self) -> pa.Table:
        """Every row that is visible, the oldest commit's first."""
        tables = [rows for _, rows in self.commits if rows.num_rows]
        return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})

    def refresh(self) -> None:
        """Nothing is kept aside."""

    def sync(self) -> None:
        """Memory has no disk behind it."""

    def newest_entry(self) -> LedgerEntry | None:
        """The entry of the last commit."""
        return self.commits[-1][0] if self.commits else None

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> PendingWrite:  # noqa: ARG002 - of the contract
        """Compute the frame's rows."""
        return MemoryWrite(self, frame.toArrow())

    def prepare_letters(
        self,
        spark: SparkSession,
        refused: Sequence[tuple[Source, OffsetRange, int]],
        null_keys: Sequence[pa.Table],
        rows: BatchOfRows,  # noqa: ARG002 - of the contract
    ) -> PendingWrite:
        """The refused records with their reasons, and the rows without a key as they are."""
        letters = []
        for source, offsets, _ in refused:
            for record in source.bad_records(spark, offsets).toArrow().to_pylist():
                ahead = record.pop(AHEAD, None)
                reason, detail = ("event_time_ahead", ahead) if ahead else source.diagnose(record["value"])
                letters.append({**record, "reason": reason, "detail": detail})
        tables = [pa.Table.from_pylist(letters)] if letters else []
        return MemoryWrite(self, pa.concat_tables([*tables, *null_keys], promote_options="default"))


@dataclass
class MemoryWrite:
    """Rows for a table in memory, not yet visible."""

    committer: ClassVar[Committer] = "direct"
    sink: MemoryTable
    table: pa.Table
    null_keys: ClassVar[None] = None
    deletes: ClassVar[None] = None

    @property
    def rows(self) -> int:
        """How many rows are prepared."""
        return int(self.table.num_rows)

    def commit(self, entry: LedgerEntry) -> int | None:
        """Make them visible once; raises Fenced when the table is in a newer generation."""
        at = self.sink.position
        if at is not None and at.generation > entry.generation:
            raise Fenced(
                f"table {self.sink.name} is at {at}, and this driver wants to write {entry.txn}",
                "stop this driver: another one, or a recovery, has replaced it",
            )
        if at is not None and at >= entry.txn:
            return None
        self.sink.commits.append((entry, self.table))
        return self.sink.version

    def close(self) -> None:
        """Nothing is held."""
