"""Names of the columns that Recourse adds to records and tables, and checks of the other columns' names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from streaming_jobs.errors import UsageError
from streaming_jobs.text.spelling import instead

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


# The types of columns that a table can store, or can be partitioned by; `docs/values.md` shows them all.

_NUMBERS = ("byte", "short", "integer", "long", "float", "double", "decimal")
_NESTED = ("array", "map", "struct")
_STORED = frozenset({*_NUMBERS, *_NESTED, "boolean", "string", "binary", "date", "timestamp", "timestamp_ntz"})
_NO_PARTITION = frozenset({"binary", *_NESTED})
_UNSAFE_PARTITION = frozenset({"decimal", "float", "double"})


def checked_types(table: str, schema: StructType, partition_by: Sequence[str]) -> None:
    """Raise UsageError for a column that no table can store, or that a table cannot be partitioned by."""
    for place, kind in _kinds(schema):
        if kind == "void":
            raise UsageError(
                f"table {table}: column {place} is a null without a type",
                "give it one: F.lit(None).cast('string')",
            )
        if kind not in _STORED:
            raise UsageError(
                f"table {table}: column {place} has the type {kind}, which is not stored",
                "cast it to a type of docs/values.md",
            )
    _refuse(table, schema, partition_by, _NO_PARTITION)


def checked_keys(table: str, schema: StructType, keys: Sequence[str]) -> None:
    """Raise UsageError for a key column whose values cannot be grouped: a struct, an array or a map."""
    for field in schema.fields:
        if field.name in keys and (kind := field.dataType.typeName()) in _NESTED:
            raise UsageError(
                f"table {table}: '{field.name}' of its keys has the type {kind}, whose values cannot be grouped",
                "name the columns inside of it as keys, or a text that is made of them: to_json(...)",
            )


def checked_new_partitions(table: str, schema: StructType, partition_by: Sequence[str]) -> None:
    """Raise UsageError for a column by which a new table should not be partitioned.

    A partition value is text in the log, and deltalake writes a negative decimal and an infinite number in a form that
    no reader can decode.
    """
    _refuse(table, schema, partition_by, _UNSAFE_PARTITION)


def _refuse(table: str, schema: StructType, partition_by: Sequence[str], kinds: frozenset[str]) -> None:
    for field in schema.fields:
        if field.name in partition_by and (kind := field.dataType.typeName()) in kinds:
            raise UsageError(
                f"table {table} cannot be partitioned by '{field.name}', which has the type {kind}",
                "partition by a column of text, whole numbers, booleans, dates or timestamps: hex(...) of bytes",
            )


def _kinds(kind: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """The type of every column and of every nested field and element, each with its path."""
    for field in getattr(kind, "fields", ()):
        inner = f"{place}.{field.name}".lstrip(".")
        yield inner, field.dataType.typeName()
        yield from _kinds(field.dataType, inner)
    for part, name in (("elementType", "element"), ("keyType", "key"), ("valueType", "value")):
        if (inside := getattr(kind, part, None)) is not None:
            yield f"{place}.{name}", inside.typeName()
            yield from _kinds(inside, f"{place}.{name}")
