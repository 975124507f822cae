"""The choice of columns with bounds (min and max per file) in a table's log, one for every writer and reader.

By its bounds a reader skips a file. A bound that is narrower than the file's values hides rows, and the writers of
Delta logs round some types:

| type                                 | why it has bounds, or none                                                  |
|--------------------------------------|-----------------------------------------------------------------------------|
| byte, short, integer, long, date     | exact in every writer                                                       |
| timestamp, timestamp without zone    | whole milliseconds in the log; every reader widens them                     |
| decimal                              | none: deltalake writes them as doubles                                      |
| float, double                        | none: NaN is left out of them, and is the greatest number for Spark         |
| text                                 | none: writers cut it off, each in its own way, or leave a long one without  |
| binary, boolean, fields inside       | none: no writer has them all                                                |

deltalake and delta-spark follow the table property `delta.dataSkippingStatsColumns` when they write, append, merge and
compact alike, and when they read: bounds of other columns in the log are ignored, also older ones. pyarrow
(`DeltaTable.to_pyarrow_dataset`) takes a file without bounds for an empty one when the column is in the property. So a
column is in it only while every live file has its bounds; a column that was added later never is. Inside of a file
readers still use the statistics of Parquet, except those of floats that deltalake writes: NaN is left out of them too.
Spark's own Parquet files have none where there is a NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import ColumnProperties, DeltaTable, WriterProperties
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

if TYPE_CHECKING:
    from collections.abc import Iterator

PROPERTY = "delta.dataSkippingStatsColumns"
_EXACT = frozenset({"byte", "short", "integer", "long", "date", "timestamp", "timestamp_ntz"})
_ROUNDED = frozenset({"decimal", "float", "double"})
_FLOATS = frozenset({"float", "double"})
_ZSTD_LEVEL = 4  # deltalake's default when it compacts
_AT_MOST = 32
_NAME = re.compile(r"`([^`]+)`|([^`,\s][^`,]*)")


def wanted(handle: DeltaTable, schema: StructType, partition_by: Sequence[str], first: Sequence[str]) -> str:
    """The value that the property of a table should have: its columns of now that have bounds in every live file.

    For a table without the property, or without files: all columns that may have bounds.
    """
    able = boundable(schema, partition_by, first)
    now = handle.metadata().configuration.get(PROPERTY)
    files = pa.table(handle.get_add_actions(flatten=True))
    if now is not None and files.num_rows:
        able = tuple(column for column in able if column in decode(now))
    return encode(_bounded_everywhere(files, able))


def boundable(schema: StructType, partition_by: Sequence[str], first: Sequence[str] = ()) -> tuple[str, ...]:
    """The columns that may have bounds: at most 32, those named in `first` before the others.

    deltalake matches the columns of the property by their last name. So a column is left out if a field of the same
    name inside of another column would be rounded.
    """
    hidden = {name for field in schema.fields for name, kind in _inside(field.dataType) if kind in _ROUNDED}
    able = [
        field.name
        for field in schema.fields
        if field.dataType.typeName() in _EXACT and field.name not in hidden and field.name not in partition_by
    ]
    chosen = [*(name for name in able if name in first), *(name for name in able if name not in first)][:_AT_MOST]
    return tuple(name for name in able if name in chosen)


def _bounded_everywhere(files: pa.Table, columns: Sequence[str]) -> tuple[str, ...]:
    """Those of the columns that have bounds in every file in which they have a value."""
    if not files.num_rows:
        return tuple(columns)
    names = set(files.column_names)
    return tuple(
        column
        for column in columns
        if {f"null_count.{column}", f"min.{column}", f"max.{column}"} <= names and _whole(files, column)
    )


def bounded_in(stats: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> tuple[str, ...]:
    """Those of the columns that have bounds in every file, for files given by their statistics as the log has them."""
    left = list(columns)
    for each in stats:
        records, nulls = each.get("numRecords"), each.get("nullCount") or {}
        both = (each.get("minValues") or {}, each.get("maxValues") or {})
        known = [name for name in left if all(bound.get(name) is not None for bound in both)]
        left = [name for name in left if name in nulls and (name in known or nulls[name] == records)]
    return tuple(left)


def within(bounds: Mapping[str, tuple[pa.Scalar, pa.Scalar]]) -> pc.Expression | None:
    """The rows whose values are within these bounds, ends included; None without any.

    A dataset skips files by it, so only columns with bounds in every file may be named.
    """
    ranges = [(pc.field(name) >= least) & (pc.field(name) <= greatest) for name, (least, greatest) in bounds.items()]
    return reduce(and_, ranges) if ranges else None


def encode(columns: Iterable[str]) -> str:
    return ",".join(f"`{column}`" for column in columns)


def decode(value: str) -> tuple[str, ...]:
    """The columns that a value of the property names."""
    return tuple(quoted or plain.strip() for quoted, plain in _NAME.findall(value))


def writer_properties(schema: StructType, compression: Literal["SNAPPY", "ZSTD"] = "SNAPPY") -> WriterProperties:
    """Settings for the Parquet files that deltalake writes: no statistics of floats, otherwise its defaults.

    Only top-level columns can be named, so with a float inside of a struct no nested column has statistics.
    """
    floats = [field.name for field in schema.fields if field.dataType.typeName() in _FLOATS]
    nested = any(kind in _FLOATS for field in schema.fields for _, kind in _inside(field.dataType))
    plain = [field.name for field in schema.fields if not _is_nested(field.dataType) and field.name not in floats]
    without, having = ColumnProperties(statistics_enabled="NONE"), ColumnProperties(statistics_enabled="PAGE")
    return WriterProperties(
        compression=compression,
        compression_level=_ZSTD_LEVEL if compression == "ZSTD" else None,
        default_column_properties=without if nested else None,
        column_properties={**dict.fromkeys(floats, without), **(dict.fromkeys(plain, having) if nested else {})},
    )


def _is_nested(kind: DataType) -> bool:
    return isinstance(kind, StructType | ArrayType | MapType)


def _whole(files: pa.Table, column: str) -> bool:
    nulls, low, high = (files[f"{kind}.{column}"] for kind in ("null_count", "min", "max"))
    known = pc.and_(pc.is_valid(low), pc.is_valid(high))
    empty = pc.fill_null(pc.equal(nulls, files["num_records"]), False)
    fine = pc.and_(pc.is_valid(nulls), pc.or_(known, empty))
    return bool(pc.all(fine).as_py())


def _inside(kind: DataType) -> Iterator[tuple[str, str]]:
    """Name and type of each field inside of structs, however deep; lists and maps have no bounds in any writer."""
    if isinstance(kind, StructType):
        for field in kind.fields:
            yield field.name, field.dataType.typeName()
            yield from _inside(field.dataType)
