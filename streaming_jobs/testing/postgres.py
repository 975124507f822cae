"""Tables of PostgreSQL in memory: what the statements of `sinks/postgres` do, by the same order of events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.sinks.delta.upsert_order import DELETE_COLUMN, FLAGS, RESET_COLUMN, ROW_COLUMN, by_key, last_events
from streaming_jobs.sinks.postgres.rows import DiscardedTable, PreparedRows


@dataclass
class MemoryPostgres:
    """The rows of one table, which stay when the stream starts again: of an upsert the last event of each key.

    Deletes are remembered for ever.
    """

    events: pa.Table | None = None
    newest: LedgerEntry | None = None

    def rows(self) -> list[dict[str, Any]]:
        if self.events is None:
            return []
        rows = self.events
        if DELETE_COLUMN in rows.column_names:
            rows = rows.filter(pc.invert(rows[DELETE_COLUMN]))
        listed: list[dict[str, Any]] = rows.drop_columns([f for f in FLAGS if f in rows.column_names]).to_pylist()
        return listed


@dataclass
class MemoryPostgresOutput(DiscardedTable):
    """The table as a sink, exactly once."""

    kept: MemoryPostgres

    @property
    def position(self) -> Txn | None:
        return None if self.kept.newest is None else self.kept.newest.txn

    def newest_entry(self) -> LedgerEntry | None:
        return self.kept.newest

    def write(self, entry: LedgerEntry, prepared: PreparedRows) -> bool:
        new = prepared.written
        if RESET_COLUMN in new.column_names:
            new = new.drop_columns([RESET_COLUMN])  # made again of all events
        before = [] if self.kept.events is None else [self.kept.events]
        rows = pa.concat_tables([*before, new], promote_options="default")
        self.kept.events = self._reduced(rows, prepared) if self.declared.keys else rows
        self.kept.newest = entry
        return True

    def _reduced(self, rows: pa.Table, prepared: PreparedRows) -> pa.Table:
        if prepared.order.columns:
            events = last_events(rows, self.declared.keys, prepared.order)
            return events.drop_columns([name for name in (RESET_COLUMN,) if name in events.column_names])
        number = by_key(rows, self.declared.keys, **{ROW_COLUMN: np.arange(rows.num_rows)})
        return rows.take(number.aggregate([(ROW_COLUMN, "max")])[f"{ROW_COLUMN}_max"])
