"""The batches of a replay beside those that it replaced, joined to a bounded number of columns for the journal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from reprocessing.planning.history import lineage
from reprocessing.rebuild.context import RecoveryContext
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.preflight.snapshot import ledger_file

COLUMNS = 100
"""Columns at most."""
READ = 50_000
"""Batches at most that are read from a ledger, the newest ones."""


@dataclass(frozen=True)
class BatchRows:
    """One batch: its time (seconds since 1970), its number, the rows written to the primary table, the records read."""

    at: float
    batch: int
    rows: int
    records: int


@dataclass(frozen=True)
class BatchColumn:
    """Consecutive batches: times and numbers of the first and last, their rows and records, rows of the largest."""

    since: float
    until: float
    first: int
    last: int
    batches: int
    rows: int
    records: int
    largest: int

    @property
    def mean(self) -> float:
        """Rows per batch."""
        return self.rows / self.batches


@dataclass(frozen=True)
class BatchSeries:
    """Batches in at most `COLUMNS` columns, oldest first; `cut` is True if older ones were left out."""

    columns: tuple[BatchColumn, ...] = ()
    cut: bool = False

    @property
    def batches(self) -> int:
        """The number of batches."""
        return sum(each.batches for each in self.columns)

    @property
    def rows(self) -> int:
        """Rows written to the primary table."""
        return sum(each.rows for each in self.columns)

    @property
    def records(self) -> int:
        """Records read."""
        return sum(each.records for each in self.columns)

    @property
    def seconds(self) -> float:
        """Seconds from the end of the first batch to the end of the last."""
        return self.columns[-1].until - self.columns[0].since if self.columns else 0.0

    @classmethod
    def of(cls, batches: Sequence[BatchRows], *, cut: bool = False) -> BatchSeries:
        """The series of batches, oldest first; each column but the last has the same number of them."""
        size = max(math.ceil(len(batches) / COLUMNS), 1)
        parts = [batches[begin : begin + size] for begin in range(0, len(batches), size)]
        return cls(tuple(_column(part) for part in parts), cut)

    @classmethod
    def decode(cls, value: Mapping[str, Any]) -> BatchSeries:
        """The series from a journal; empty if it has none."""
        return cls(tuple(BatchColumn(**each) for each in value.get("columns", ())), bool(value.get("cut", False)))


def _column(batches: Sequence[BatchRows]) -> BatchColumn:
    return BatchColumn(
        since=round(batches[0].at, 3),
        until=round(batches[-1].at, 3),
        first=batches[0].batch,
        last=batches[-1].batch,
        batches=len(batches),
        rows=sum(each.rows for each in batches),
        records=sum(each.records for each in batches),
        largest=max(each.rows for each in batches),
    )


def replay_batches(context: RecoveryContext) -> dict[str, Any]:
    """The findings of a replay about batches: `replaced`, those after the plan's base, and `replayed`, its own."""
    base, kept = context.plan.base, context.journal.done("keep") or {}
    after = Txn(base.generation, base.batch) if base.batch >= 0 else Txn(0, -1)
    up_to = Txn(context.plan.saw.generation, kept.get("batch", context.plan.saw.batch))
    up_to = up_to if context.plan.until is None else context.plan.until.txn
    own = ledger_file(context.own, context.plan.stream)
    replayed = own.after(context.plan.stream, None, at_most=READ + 1)
    return {
        "replaced": asdict(_series(_replaced(context, after, up_to))),
        "replayed": asdict(_series(_batch(line.at, line.entry) for line in replayed)),
    }


def _replaced(context: RecoveryContext, after: Txn, up_to: Txn) -> Iterable[BatchRows]:
    """Yields the batches on the stream's path, newest first."""
    days = ledger_file(context.settings, context.plan.stream).days(context.plan.stream)
    generations = [each for each in context.record.generations if each.number <= up_to.generation]
    for batch in lineage(generations, days).newest_first():
        if batch.txn <= after:
            return
        if batch.txn <= up_to:
            yield BatchRows(batch.at, batch.txn.batch, batch.rows, batch.records)


def _batch(at: float, entry: LedgerEntry) -> BatchRows:
    records = entry.records
    return BatchRows(at, entry.batch, entry.rows.get("written", 0), records)


def _series(newest_first: Iterable[BatchRows]) -> BatchSeries:
    batches = list(islice(newest_first, READ + 1))
    return BatchSeries.of(batches[:READ][::-1], cut=len(batches) > READ)
