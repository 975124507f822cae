"""Remembered deletes: with them a late row does not bring a deleted key back.

A table with `order_by` and `delete_when` has a second table beside it, `<table>_deletes`: one row per deleted key, with
the order and the position of the delete, and the time it was recorded. It is committed before its table, with the same
batch's transaction. A crash between the two commits is repaired when the batch is repeated: both tables only ever take
the greater event, and taking it twice changes nothing. Maintenance removes rows older than `deletes_kept`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from streaming_jobs.declare.columns import DELETED_AT_COLUMN, POSITION_COLUMN
from streaming_jobs.platform.table_rows import dataset
from streaming_jobs.sinks.delta.column_bounds import within
from streaming_jobs.sinks.delta.upsert_order import (
    DELETE_COLUMN,
    RESET_COLUMN,
    ROW_COLUMN,
    EventOrder,
    by_key,
    sorted_by,
    without_order,
)
from streaming_jobs.sinks.row_rules import comparable
from streaming_jobs.storage.locations import Location, delta_table


@dataclass(frozen=True)
class RememberedDeletes:
    """One version of a table of remembered deletes, for the driver and for Spark's Python processes."""

    path: Location
    version: int
    keys: Sequence[str]
    bounded: Sequence[str]
    """The columns that have bounds in the table's log."""
    handle: DeltaTable | None = field(default=None, repr=False)
    """The open version; another process opens it again."""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "handle": None}

    def of_keys(self, rows: pa.Table, columns: Sequence[str]) -> pa.Table:
        """The remembered deletes of the rows' keys, in the rows' types, nullable.

        Files are read one after the other; those whose keys are all below or above the rows' keys are not read.
        """
        wanted = pa.schema([rows.schema.field(column).with_nullable(True) for column in columns])
        if not rows.num_rows:
            return wanted.empty_table()
        handle = self.handle or delta_table(self.path, self.version)
        if not handle.get_add_actions().num_rows:
            return wanted.empty_table()
        parts = []
        for batch in dataset(handle, self.path).to_batches(columns=list(columns), filter=self._near(rows)):
            part = pa.Table.from_batches([batch]).cast(wanted)
            for key in self.keys:
                wanted_keys = comparable(rows[key]).combine_chunks()
                part = part.filter(pc.is_in(comparable(part[key]), value_set=wanted_keys))
            parts.append(part)
        return pa.concat_tables(parts) if parts else wanted.empty_table()

    def _near(self, rows: pa.Table) -> pc.Expression | None:
        """The range of the rows' keys, for keys with bounds that are exact in every file; None without any."""
        keys = [key for key in self.keys if key in self.bounded and not rows[key].null_count]
        return within({key: tuple(pc.min_max(rows[key]).values()) for key in keys})

    def split(self, rows: pa.Table, order: EventOrder) -> tuple[pa.Table, pa.Table]:
        """The reduced events to merge into the table, and the events that change its remembered deletes (`notes`).

        A row older than the remembered delete of its key is in neither.
        """
        keys = list(self.keys)
        columns = list(dict.fromkeys([*keys, *order.all]))
        deletes = self.of_keys(rows, columns)
        number = deletes.num_rows
        both = pa.concat_tables([deletes, rows.select(columns).cast(deletes.schema)])
        by_order = sorted_by(both, order.all)
        ranks = np.empty(both.num_rows, np.int64)
        ranks[by_order] = np.arange(both.num_rows)
        ranked = by_key(both, keys, **{ROW_COLUMN: ranks, "__number": np.arange(both.num_rows)})
        last = ranked.aggregate([(ROW_COLUMN, "max"), ("__number", "min"), ("__number", "max")])
        greatest = by_order[last[f"{ROW_COLUMN}_max"].to_numpy()]
        newer = np.zeros(rows.num_rows, np.bool_)
        newer[greatest[greatest >= number] - number] = True
        has = np.zeros(rows.num_rows, np.bool_)
        # A key of several columns may be among the remembered deletes without being a key of the rows.
        row = last["__number_max"].to_numpy()
        has[row[(row >= number) & (last["__number_min"].to_numpy() < number)] - number] = True
        deleted = rows[DELETE_COLUMN].to_numpy()
        reset = rows[RESET_COLUMN].to_numpy()
        ordered = deleted & ~without_order(rows, order.columns)
        noted = rows.filter(pa.array(ordered | (reset & has)))
        return rows.filter(pa.array(newer | reset | deleted)), noted


def notes(rows: pa.Table, keys: Sequence[str], order: EventOrder) -> pa.Table:
    """Changes to the remembered deletes: deletes with an order are added, other events of a reset key remove one."""
    names = list(dict.fromkeys([*keys, *order.columns]))
    positions = rows[POSITION_COLUMN] if order.by_position else pa.nulls(rows.num_rows, pa.int64())
    ordered = rows[DELETE_COLUMN].to_numpy() & ~without_order(rows, order.columns)
    at = pa.array([int(time.time() * 1_000_000)] * rows.num_rows, pa.timestamp("us", tz="UTC"))
    return (
        rows.select(names)
        .append_column(POSITION_COLUMN, positions)
        .append_column(DELETED_AT_COLUMN, at)
        .append_column(DELETE_COLUMN, pa.array(~ordered))
        .append_column(RESET_COLUMN, rows[RESET_COLUMN])
    )
