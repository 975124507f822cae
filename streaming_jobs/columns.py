"""Names of the columns that Recourse adds to records and tables, and checks of the other columns' names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from streaming_jobs.errors import UsageError
from streaming_jobs.spelling import instead

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SOURCE_COLUMN = "_source"
"""Struct of every decoded record: topic, partition, offset, timestamp, key, tombstone, and headers if declared."""

POSITION_COLUMN = "_position"
"""Column that Recourse adds to a table with `order_by` whose rows carry `_source`: it breaks ties of the order."""
REASON_COLUMN, DETAIL_COLUMN = "__reason", "__detail"
"""Columns of output rows that become dead letters: the reason, a stable word, and where it has more words, these."""
DELETED_AT_COLUMN = "_deleted_at"
OWN_COLUMN = "recourse.column"
"""In a table's schema, the metadata of a column that Recourse has added."""

_OWN_COLUMNS = frozenset(
    {"__delete", "__reset", "__reset_at", "__topic", "__partition", "__offset", "__position"}
    | {"__row", "__number", "__broken", "__reason", "__detail"}
)
_UNORDERED = frozenset({"array", "map", "struct", "variant", "void"})


def checked_columns(table: str, names: Iterable[str]) -> None:
    """Raise UsageError for a column name that cannot be quoted, or that Recourse uses in a batch."""
    for name in names:
        if "`" in name:
            raise UsageError(f"table {table}: column {name!r} has a backtick in its name", "rename the column")
        if name.lower() in _OWN_COLUMNS:
            raise UsageError(f"table {table}: the column name {name} is taken by Recourse itself", "rename the column")


def checked_order(table: str, order_by: Sequence[str], schema: StructType) -> None:
    """Raise UsageError for a column of `order_by` that the rows lack, or whose type has no order."""
    kinds = {field.name: field.dataType.typeName() for field in schema.fields}
    for column in order_by:
        if column not in kinds:
            raise UsageError(
                f"table {table}: order_by '{column}' is not a column of its rows",
                instead(column, kinds),
            )
        if kinds[column] in _UNORDERED:
            raise UsageError(f"table {table}: order_by '{column}' has the type {kinds[column]}, which has no order")
    if order_by and any(f.name == POSITION_COLUMN and OWN_COLUMN not in f.metadata for f in schema.fields):
        raise UsageError(
            f"table {table}: the column name {POSITION_COLUMN} is taken by Recourse itself", "rename the column"
        )
