"""The rows of an upsert: one event per key, and which event a table with `order_by` keeps.

An event of a key is a row, or a delete (`delete_when` holds). Its order is the values of the `order_by` columns, then
its source position. Nulls are lower than every value; NaN is higher than every other number; -0.0 equals 0.0. The
greatest event wins over the table's whole life, whatever the batches are and in whatever order events arrive: the
table's row and the remembered delete (`remembered_deletes.py`) take part. Of events of equal order and position the
later one wins.

A delete without any order value, such as a Kafka tombstone, counts by its position alone: it removes all events of its
key that were read before it, the remembered delete too; events that are read after it start from nothing.

So a batch is reduced to one event per key, the greatest of those after the key's last tombstone, or that tombstone
itself if nothing came after it; `__reset` is true if there was one. `clauses` has the conditions of the merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from streaming_jobs.declare.columns import POSITION_COLUMN
from streaming_jobs.errors import OutputMismatch
from streaming_jobs.sinks.row_rules import comparable
from streaming_jobs.sinks.schemas import TOPICS, is_position

DELETE_COLUMN = "__delete"
RESET_COLUMN = "__reset"
FLAGS = (DELETE_COLUMN, RESET_COLUMN)
"""Columns of an event that no table has."""
ROW_COLUMN = "__row"
_PARTITION_BITS, _OFFSET_BITS = 14, 46


@dataclass(frozen=True)
class EventOrder:
    """The order of one table: its columns, those of them that are floating-point, and whether positions decide ties."""

    columns: Sequence[str]
    floating: frozenset[str]
    by_position: bool

    @property
    def all(self) -> tuple[str, ...]:
        """The columns that are compared, in order."""
        return (*self.columns, POSITION_COLUMN) if self.by_position else tuple(self.columns)


@dataclass(frozen=True)
class Clauses:
    """SQL conditions of a merge of `s` into `t`, in the order of its clauses.

    None means always; if `delete` is None, the merge has no such clause.
    """

    delete: str | None
    update: str | None
    insert: str | None


def order_of(schema: T.StructType, order_by: Sequence[str], *, by_position: bool) -> EventOrder:
    """The order of a table with this schema; positions count only if the table has their column."""
    floating = frozenset(f.name for f in schema.fields if isinstance(f.dataType, (T.FloatType, T.DoubleType)))
    has_position = any(is_position(f) for f in schema.fields)
    return EventOrder(tuple(order_by), floating, bool(order_by) and by_position and has_position)


def packed(topics: Sequence[str], source: str) -> str:
    """SQL for the position of a record as one number: topic by name, partition, offset, the higher the later.

    `source` is the struct with topic, partition and offset. A position that does not fit into it is an error.
    """
    names = ", ".join("'" + name.replace("\\", "\\\\").replace("'", "\\'") + "'" for name in sorted(topics))
    topic = f"coalesce(array_position(array({names}), {source}.topic), 0) - 1" if len(topics) > 1 else "0"
    number = (
        f"shiftleft(cast({topic} as bigint), {_PARTITION_BITS + _OFFSET_BITS}) "
        f"+ shiftleft(cast({source}.partition as bigint), {_OFFSET_BITS}) + cast({source}.offset as bigint)"
    )
    fits = (
        f"{topic} between 0 and {TOPICS - 1} and {source}.partition < {1 << _PARTITION_BITS} "
        f"and {source}.offset < {1 << _OFFSET_BITS}"
    )
    text = f"concat('the position of a record does not fit {POSITION_COLUMN}: ', to_json({source}))"
    return (
        f"case when {source}.partition is null or {source}.offset is null then cast(null as bigint) "
        f"when {fits} then {number} else raise_error({text}) end"
    )


def at_least(order: EventOrder) -> str:
    """SQL, never null: `s` is not older than `t`. DataFusion and Spark evaluate it alike."""
    condition = "true"
    for column in reversed(order.all):
        s, t = f"s.`{column}`", f"t.`{column}`"
        greater, equal = f"{s} > {t}", f"{s} = {t}"
        if column in order.floating:  # DataFusion has -0.0 below 0.0, and NaN with a sign below everything
            zero = "CAST(0 AS DOUBLE)"
            greater = f"(NOT isnan({t}) AND (isnan({s}) OR {s} + {zero} > {t} + {zero}))"
            numbers = f"NOT isnan({s}) AND NOT isnan({t}) AND {s} + {zero} = {t} + {zero}"
            equal = f"((isnan({s}) AND isnan({t})) OR ({numbers}))"
        greater = f"({s} IS NOT NULL AND ({t} IS NULL OR {greater}))"
        equal = f"(({s} IS NULL AND {t} IS NULL) OR ({s} IS NOT NULL AND {t} IS NOT NULL AND {equal}))"
        condition = f"({greater} OR ({equal} AND {condition}))"
    return condition


def clauses(order: EventOrder, columns: Sequence[str]) -> Clauses:
    """The conditions of a merge of reduced events with these columns."""
    wins = at_least(order) if order.columns else None
    if wins is not None and RESET_COLUMN in columns:
        wins = f"(s.`{RESET_COLUMN}` OR {wins})"
    if DELETE_COLUMN not in columns:
        return Clauses(None, wins, None)
    gone = f"s.`{DELETE_COLUMN}`"
    and_wins = f" AND {wins}" if wins else ""
    return Clauses(f"{gone}{and_wins}", f"NOT {gone}{and_wins}", f"NOT {gone}")


def split_null_keys(rows: pa.Table, keys: Sequence[str]) -> tuple[pa.Table, pa.Table]:
    """Rows whose keys are all there, and rows with a null in a key."""
    null = pc.is_null(rows[keys[0]])
    for key in keys[1:]:
        null = pc.or_(null, pc.is_null(rows[key]))
    if not pc.any(null, min_count=0).as_py():
        return rows, rows.slice(0, 0)
    return rows.filter(pc.invert(null)), rows.filter(null)


def by_key(rows: pa.Table, keys: Sequence[str], **numbers: Any) -> pa.TableGroupBy:
    """The rows' keys, comparable, grouped together with columns of numbers."""
    columns = {key: comparable(rows[key]) for key in keys} | numbers
    return pa.table(columns).group_by(list(keys), use_threads=False)


def last_per_key(rows: pa.Table, keys: Sequence[str], order_by: Sequence[str]) -> pa.Table:
    """One row per key: the greatest by `order_by` (columns that are all there; nulls lose).

    With no order, rows must be unique already: OutputMismatch names a doubled key, because a merge would
    insert both.
    """
    if order_by:
        rows = rows.take(pc.sort_indices(rows, [(c, "ascending", "at_start") for c in order_by]))
    last = by_key(rows, keys, **{ROW_COLUMN: np.arange(rows.num_rows)}).aggregate(
        [(ROW_COLUMN, "max"), (ROW_COLUMN, "count")]
    )
    if last.num_rows == rows.num_rows:
        return rows
    if not order_by:
        doubled = last.filter(pc.greater(last[f"{ROW_COLUMN}_count"], 1)).select(list(keys)).slice(0, 1).to_pylist()
        raise OutputMismatch(
            f"a batch has several rows for the key {doubled[0]} and nothing says which one is last",
            "set order_by on the sink, or keep the column _source in the stream's output",
        )
    return rows.take(last[f"{ROW_COLUMN}_max"])


def last_events(rows: pa.Table, keys: Sequence[str], order: EventOrder) -> pa.Table:
    """One event per key, in Arrow; with the column `__delete`, the column `__reset` is added."""
    reset = None
    if DELETE_COLUMN in rows.column_names:
        reset, rows = _resets(rows, keys, order)
    by_order = sorted_by(rows, [*order.all])
    ranks = np.empty(rows.num_rows, np.int64)
    ranks[by_order] = np.arange(rows.num_rows)
    last = by_key(rows, keys, **{ROW_COLUMN: ranks}).aggregate([(ROW_COLUMN, "max")])
    if last.num_rows < rows.num_rows:
        chosen = by_order[last[f"{ROW_COLUMN}_max"].to_numpy()]
        rows, reset = rows.take(pa.array(chosen)), None if reset is None else reset[chosen]
    return rows if reset is None else rows.append_column(RESET_COLUMN, pa.array(reset))


def sorted_by(rows: pa.Table, columns: Sequence[str]) -> np.ndarray[Any, Any]:
    """Row numbers in ascending order of the columns; rows that are equal in them stay as they are."""
    compared: dict[str, Any] = {}
    for column in columns:
        values = rows[column]
        if pa.types.is_floating(values.type):
            nan = pc.is_nan(values)
            compared[f"{len(compared)}"] = nan
            values = pc.if_else(nan, 0.0, pc.add(values, 0.0))
        compared[f"{len(compared)}"] = values
    compared[f"{len(compared)}"] = pa.array(np.arange(rows.num_rows))
    keys = [(name, "ascending", "at_start") for name in compared]
    return np.asarray(pc.sort_indices(pa.table(compared), keys).to_numpy(), np.int64)


def without_order(rows: pa.Table, order_by: Sequence[str]) -> np.ndarray[Any, Any]:
    """A mask of the rows that are deletes without any order value, which count by their position."""
    mask = rows[DELETE_COLUMN]
    for column in order_by:
        mask = pc.and_(mask, pc.is_null(rows[column]))
    return np.asarray(mask.to_numpy(zero_copy_only=False), np.bool_)


def _resets(rows: pa.Table, keys: Sequence[str], order: EventOrder) -> tuple[np.ndarray[Any, Any], pa.Table]:
    """Of each key the rows from its last reset on, that one included, and before them a mask: the key was reset."""
    resets = without_order(rows, order.columns)
    if not resets.any():
        return resets, rows
    sequence = np.empty(rows.num_rows, np.int64)
    sequence[sorted_by(rows, [POSITION_COLUMN] if order.by_position else [])] = np.arange(rows.num_rows)
    numbered = by_key(rows, keys, **{ROW_COLUMN: np.arange(rows.num_rows)})
    lists = numbered.aggregate([(ROW_COLUMN, "list")])[f"{ROW_COLUMN}_list"]
    groups = np.empty(rows.num_rows, np.int64)
    groups[pc.list_flatten(lists).to_numpy()] = pc.list_parent_indices(lists).to_numpy()
    last = np.full(len(lists), -1, np.int64)
    np.maximum.at(last, groups[resets], sequence[resets])
    from_reset = last[groups]
    remaining = sequence >= from_reset
    return (from_reset >= 0)[remaining], rows.filter(pa.array(remaining))
