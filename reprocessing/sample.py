"""Some rows of a table, the newest first, read by DataFusion without Spark; nothing can be changed by it.

A table has no order of its own. Newest is by the columns that order an upsert, by the event time, by a time that
Recourse has written (dead letters, quarantines, remembered deletes), or by the first column that is a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltalake import DeltaTable, QueryBuilder
from deltalake.schema import PrimitiveType

from reprocessing.plan.conditions import columns, quoted, refuse_unaskable
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.columns import DELETED_AT_COLUMN
from streaming_jobs.errors import UsageError
from streaming_jobs.platform.table_rows import QueryFailed, is_of_surroundings, rows_of
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import all_tables, open_table
from streaming_jobs.stream import Stream
from streaming_jobs.text.spelling import instead

MOST = 10_000
"""Rows at most."""
_TIMES = ("timestamp", "timestamp_ntz", "date")
_OWN_ORDERS = (["_generation", "_batch"], [DELETED_AT_COLUMN], ["timestamp", "offset"], ["generation", "batch"])
"""Columns of a quarantine, remembered deletes, dead letters and late records that say which rows are newest."""


@dataclass(frozen=True)
class Sample:
    """Rows as column -> value. `order` are the columns that they are ordered by, descending; none: in no order."""

    table: str
    columns: tuple[str, ...]
    order: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]


def sample(
    settings: Settings, topology: Topology, table: str, *, rows: int, where: str | None = None, by: str | None = None
) -> Sample:
    """The newest rows that meet a condition (SQL); `by` is a column to order by, descending.

    Raises UsageError for an unknown table or column, and for a condition that cannot be evaluated.
    """
    stream, handle = _open(settings, topology, table)
    names = columns(handle)
    if by is not None and by not in names:
        raise UsageError(f"table {table} has no column '{by}'", instead(by, names))
    if where is not None:
        refuse_unaskable(handle, [f"{where}\n"])
    order = (by,) if by is not None else order_of(stream, table, handle)
    listed = ", ".join(quoted(name) for name in names)
    condition = f"WHERE ({where}\n)" if where is not None else ""
    ordered = "ORDER BY " + ", ".join(f"{quoted(name)} DESC NULLS LAST" for name in order) if order else ""
    sql = f'SELECT {listed} FROM "t" {condition} {ordered} LIMIT {min(rows, MOST)}'
    try:
        rows_found = rows_of(QueryBuilder().register("t", handle), sql, table)
    except QueryFailed as error:
        if where is None or is_of_surroundings(error):
            raise
        raise UsageError(
            f"the condition '{where}' cannot be evaluated on table {table}: {error.found}",
            "write a SQL condition on the table's columns",
        ) from error
    return Sample(table, tuple(names), order, tuple(rows_found))


def order_of(stream: Stream, table: str, handle: DeltaTable) -> tuple[str, ...]:
    """The columns that order the newest rows first; none if the table has no such column."""
    names = columns(handle)
    declared = next((sink for sink in stream.sinks.values() if sink.name == table), None)
    if declared is None:
        for own in _OWN_ORDERS:
            if set(own) <= set(names):
                return tuple(own)
    elif declared.order_by:
        return tuple(declared.order_by)
    for topic in stream.sources.values():
        if topic.time_column in names:
            return (topic.time_column,)
    return tuple(_times(handle)[:1])


def _times(handle: DeltaTable) -> Sequence[str]:
    fields = handle.schema().fields
    return [f.name for f in fields if isinstance(f.type, PrimitiveType) and f.type.type in _TIMES]


def _open(settings: Settings, topology: Topology, table: str) -> tuple[Stream, DeltaTable]:
    known = {
        declared.name: (stream, declared) for stream in topology.streams.values() for declared, _ in all_tables(stream)
    }
    if table not in known:
        raise UsageError(f"no stream writes a table '{table}'", instead(table, known))
    stream, declared = known[table]
    stored = open_table(settings, declared, stream.name)
    if stored is None:
        raise UsageError(f"table {table} does not exist yet", f"it is made when stream {stream.name} starts")
    return stream, stored.readable()
