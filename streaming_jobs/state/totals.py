"""The totals of a stream over all its sessions: records, rows, dead letters, late records.

The status file has them, together with the last batch that they include. Batches that a kill kept out of the status
file are added from the ledger beside the state, so no batch is missed or counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streaming_jobs.ledger import DROPPED, QUARANTINED, LedgerEntry, Txn, taken_out
from streaming_jobs.state.ledger_file import LedgerFile

_MOST = 200_000
"""Most ledger lines that are counted if the status file, of an earlier version, has no totals yet."""


@dataclass(frozen=True)
class Totals:
    """Counts of all batches up to `generation` and `batch` since `since` (seconds since 1970).

    Batches that a recovery replayed were written again, and count again.
    """

    since: float
    generation: int = 0
    batch: int = -1
    records: int = 0
    rows_written: int = 0
    dead_letters: int = 0
    late_rows: int = 0
    quarantined: int = 0
    dropped: int = 0
    broken: Mapping[str, int] = field(default_factory=dict)
    """Rows by table and broken rule, such as `orders.price_between`."""
    broken_at: Mapping[str, float] = field(default_factory=dict)
    """The time of the newest batch in which a rule was broken, seconds since 1970."""

    @classmethod
    def of(cls, value: Mapping[str, Any] | None) -> Totals | None:
        """The totals of a status file; None if it has none."""
        try:
            return cls(**value) if value else None
        except TypeError:  # of another version
            return None

    def plus(self, entry: LedgerEntry, at: float) -> Totals:
        """The totals with one batch more, which was done `at`; unchanged if the batch is counted already."""
        if entry.txn <= Txn(self.generation, self.batch):
            return self
        return Totals(
            self.since,
            entry.generation,
            entry.batch,
            self.records + entry.records,
            self.rows_written + entry.rows.get("written", 0),
            self.dead_letters + entry.rows.get("dead_letters", 0),
            self.late_rows + entry.rows.get("late", 0),
            self.quarantined + taken_out(entry.rows, QUARANTINED),
            self.dropped + taken_out(entry.rows, DROPPED),
            _sum(self.broken, broken := broken_rules(entry)),
            {**self.broken_at, **dict.fromkeys(broken, at)} if broken else self.broken_at,
        )


def broken_rules(entry: LedgerEntry) -> dict[str, int]:
    """The rows of a batch by table and broken rule."""
    return {f"{table}.{rule}": rows for table, rules in entry.rules.items() for rule, rows in rules.items()}


def _sum(first: Mapping[str, int], second: Mapping[str, int]) -> Mapping[str, int]:
    if not second:
        return first
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


def totals_from(file: LedgerFile, stream: str, known: Totals | None, now: float) -> Totals:
    """The totals now: those `known`, and the later batches in the ledger file."""
    after = Txn(known.generation, known.batch) if known else None
    lines = sorted(file.after(stream, after, at_most=_MOST), key=lambda line: line.entry.txn)
    totals = known or Totals(lines[0].at if lines else now)
    for line in lines:
        totals = totals.plus(line.entry, line.at)
    return totals
