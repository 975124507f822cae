"""The counts in a batch's ledger entry: rows by table, dropped rows, and rows by broken rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from streaming_jobs.ledger import DROPPED, LedgerEntry
from streaming_jobs.sinks.base import PendingWrite


@dataclass
class BatchCounts:
    """The counts of one batch, collected table by table."""

    rows: dict[str, int] = field(default_factory=dict)
    rules: dict[str, Mapping[str, int]] = field(default_factory=dict)

    def of_commit(self, counted_as: str, done: LedgerEntry) -> None:
        """Take over the counts of a table that has the batch already."""
        self.rows |= {name: n for name, n in done.rows.items() if name.startswith(DROPPED)}
        self.rows[counted_as] = done.rows.get("written", 0)
        self.rules |= done.rules

    def of_write(self, table: str, counted_as: str, pending: PendingWrite) -> None:
        """Count the prepared rows of a table, and those that its rules have taken out."""
        self.rows[counted_as] = pending.rows
        if pending.judged.dropped:
            self.rows[f"{DROPPED}{table}"] = pending.judged.dropped
        if pending.judged.broken:
            self.rules[table] = dict(pending.judged.broken)


def own_entry(batch: LedgerEntry, table: str, pending: PendingWrite) -> LedgerEntry:
    """The entry of a table's own commit of the batch."""
    counts = BatchCounts()
    counts.of_write(table, "written", pending)
    return replace(batch, table=table, rows=counts.rows, rules=counts.rules)
