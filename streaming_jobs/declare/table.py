"""The declaration of a table that a stream writes, whatever store keeps it: the options of one sink.

`DeltaTable` in `stream.py` is one, `MemoryDeclaration` in `streaming_jobs.testing` another. `sinks/tables.py` finds the
store that opens the table.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from streaming_jobs.declare.columns import (
    DELETED_AT_COLUMN,
    POSITION_COLUMN,
    checked_columns,
    checked_keys,
    checked_order,
    checked_types,
)
from streaming_jobs.declare.names import checked_choice, checked_name, checked_time
from streaming_jobs.errors import UsageError
from streaming_jobs.text.spelling import instead

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Mode = Literal["append", "upsert"]

Emit = Literal["update", "close"]
"""When an operator with state emits: at each change of a result, or once, when the watermark has closed it.

Spark calls these the output modes update and append.
"""

DELETES = "_deletes"
"""Ends the name of a table that remembers the deletes of another."""

LateRows = Literal["keep", "count"]
"""What becomes of records that come too late for a window of a table: kept in a table beside it, or only counted."""

LATE = "_late"
"""Ends the name of a table that keeps the late records of another."""


class DeclaredTable(Protocol):
    """A sink as it was declared, with the options of `DeltaTable`."""

    @property
    def name(self) -> str:
        """The table's name, also in ledger entries."""

    @property
    def schema(self) -> StructType | None:
        """The columns that the table must have; None: the columns that the function returns."""

    @property
    def keys(self) -> Sequence[str]:
        """The columns of the key: no two rows have the same values in them."""

    @property
    def order_by(self) -> Sequence[str]:
        """The columns that order the rows of a key; the greatest is the newest."""

    @property
    def delete_when(self) -> str | None:
        """The SQL condition of rows that delete their key."""

    @property
    def deletes_kept(self) -> str:
        """The time for which a delete is remembered."""

    @property
    def partition_by(self) -> Sequence[str]:
        """The columns by which its files are partitioned."""

    @property
    def description(self) -> str:
        """A text for people."""

    @property
    def owners(self) -> Sequence[str]:
        """The people or teams that answer for it."""

    @property
    def fresh_within(self) -> str | None:
        """The freshness objective: the age that its newest committed rows may reach; None: there is no objective."""

    @property
    def emit(self) -> Emit | None:
        """When an operator with state emits; None: at each change if the table has keys, else on close."""

    @property
    def mode(self) -> Mode:
        """`upsert` when the table has keys."""

    @property
    def deletes(self) -> DeclaredTable | None:
        """The table that remembers this one's deletes; it lies in the same store."""


_OPTIONS = tuple(name for name, value in vars(DeclaredTable).items() if isinstance(value, property))
_MISSING = object()


def emits(table: DeclaredTable) -> Emit:
    """When the results of an operator with state are written to the table."""
    return table.emit or ("update" if table.mode == "upsert" else "close")


def is_declared_table(part: object) -> bool:
    """True if it has every option of a declaration."""
    return all(inspect.getattr_static(part, name, _MISSING) is not _MISSING for name in _OPTIONS)


def check_options(table: DeclaredTable) -> None:
    """Raise UsageError for options of a declared table that do not go together, or that its schema rules out."""
    if (table.order_by or table.delete_when) and not table.keys:
        raise UsageError(f"table {table.name}: order_by and delete_when are for upserts", "name the keys")
    if table.emit is not None:
        checked_choice(f"table {table.name}", "emit", table.emit, get_args(Emit))
    if table.emit == "update" and not table.keys:
        raise UsageError(
            f"table {table.name}: emit='update' writes a result again at each change, and without keys every one of "
            "these rows would stay",
            "name the keys, or write emit='close' for final results",
        )
    checked_columns(table.name, table.keys)
    checked_time(f"table {table.name}", "deletes_kept", table.deletes_kept)
    if table.fresh_within is not None:
        checked_time(f"table {table.name}", "fresh_within", table.fresh_within)
    taken = {POSITION_COLUMN, DELETED_AT_COLUMN} & {*table.keys, *table.order_by} if table.order_by else set()
    if taken:
        raise UsageError(
            f"table {table.name}: the column name {min(taken)} is taken by Recourse itself", "rename the column"
        )
    if table.order_by and table.delete_when:
        checked_name("table", f"{table.name}{DELETES}")
    if table.schema is not None:
        _check_schema(table, table.schema)


def _check_schema(table: DeclaredTable, schema: StructType) -> None:
    names = schema.fieldNames()
    checked_columns(table.name, names)
    for option in ("keys", "order_by", "partition_by"):
        for column in getattr(table, option):
            if column not in names:
                raise UsageError(
                    f"table {table.name}: '{column}' is not a column of its schema ({option})",
                    instead(column, names),
                )
    checked_types(table.name, schema, table.partition_by)
    checked_keys(table.name, schema, table.keys)
    checked_order(table.name, table.order_by, schema)
