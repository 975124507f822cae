"""Rows that a Delta table cannot hold as they are: detected before anything is written, they become dead letters.

| reason              | what                                                                                         |
|---------------------|----------------------------------------------------------------------------------------------|
| `not_utf8`          | a text, also inside of a struct, list or map, whose bytes are not UTF-8 (bytes cast to       |
|                     | text): the Parquet file could not be read, nor the table be merged into or compacted         |
| `time_out_of_range` | a date or time, also inside of those, before the year 1 or after 9999 (see below)     |
| `partition_value`   | a text that cannot be a folder's name (255 bytes with the column's name, five for each byte  |
|                     | that is percent-encoded), or that Delta reads back as null; an empty key, which Delta stores |
|                     | as null                                                                                      |

300,000 rows that are all fine take 12 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StringType, StructType

from streaming_jobs.declare.columns import REASON_COLUMN
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.sinks.delta.parquet import NULL_PARTITION

NOT_UTF8, TIME_OUT_OF_RANGE, PARTITION_VALUE = "not_utf8", "time_out_of_range", "partition_value"
DETAILS = {
    NOT_UTF8: "a text of the output row is not UTF-8",
    TIME_OUT_OF_RANGE: "a date or time of the output row is not in the years 1 to 9999",
    PARTITION_VALUE: "a text of the output row cannot name a partition",
}
"""The text of a dead letter by its reason."""
_NAME_BYTES = 255
_BLOCK = 1024


def split(declared: DeclaredTable, schema: StructType, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Two tables: rows that the table can hold, and refused rows with their `__reason`."""
    wrong = [_table(rows, [], NOT_UTF8)]
    try:
        rows.validate(full=True)
    except pa.ArrowInvalid:
        bad = _not_utf8(rows)
        wrong.append(_table(rows, bad, NOT_UTF8))
        left = pa.array(sorted(set(range(rows.num_rows)) - set(bad)), pa.int64())
        rows = rows.take(left)
    if len(outside := rows_outside(rows)):
        wrong.append(_table(rows, outside, TIME_OUT_OF_RANGE))
        rows = rows.take(pc.indices_nonzero(pc.invert(pc.is_in(pa.array(range(rows.num_rows)), outside))))
    for column in _text_partitions(declared, schema):
        known = pc.unique(rows[column]).to_pylist()
        bad_values = [value for value in known if value is not None and not _names_a_folder(declared, column, value)]
        if bad_values:
            hit = pc.is_in(rows[column], pa.array(bad_values, pa.string()))
            wrong.append(_table(rows, pc.indices_nonzero(hit), PARTITION_VALUE))
            rows = rows.filter(pc.invert(hit))
    return rows, pa.concat_tables(wrong)


def with_bytes(rows: pa.Table) -> pa.Table:
    """The rows with bytes in place of text, dates and times, so that every value can be shown."""
    texts = rows.cast(pa.schema([(field.name, _each(field.type, as_text)) for field in rows.schema]))
    return texts.cast(pa.schema([(field.name, _each(field.type, _bytes)) for field in texts.schema]))


def _names_a_folder(declared: DeclaredTable, column: str, value: str) -> bool:
    if value == NULL_PARTITION or (value == "" and column in declared.keys):
        return False
    return _encoded(value) <= _room(column)


def _room(column: str) -> int:
    """The number of bytes that a folder's name leaves for a value."""
    return _NAME_BYTES - _encoded(column) - 1


def _encoded(text: str) -> int:
    """Bytes of a text in a folder's name as deltalake writes it: percent-encoded, and its `%` and `~` once more.

    Spark encodes less, but deltalake may have to write the partition later, when it compacts.
    """
    once = quote(text, safe="")
    return len(once) + 2 * (once.count("%") + once.count("~"))


def _text_partitions(declared: DeclaredTable, schema: StructType) -> list[str]:
    return [c for c in declared.partition_by if isinstance(schema[c].dataType, StringType)]


def _table(rows: pa.Table, positions: Sequence[int] | pa.Array, reason: str) -> pa.Table:
    taken = rows.take(pa.array(positions, pa.uint64()) if isinstance(positions, list) else positions)
    return taken.append_column(REASON_COLUMN, pa.array([reason] * taken.num_rows, pa.string()))


def _not_utf8(rows: pa.Table) -> list[int]:
    """Positions of the rows with a text that is not UTF-8.

    Blocks are copied before they are validated: for a slice of a nested array Arrow validates all values below it.
    """
    bad: set[int] = set()
    for column in rows.column_names:
        values = rows.select([column])
        waiting = [(at, min(at + _BLOCK, rows.num_rows)) for at in range(0, rows.num_rows, _BLOCK)]
        while waiting:
            begin, end = waiting.pop()
            try:
                values.take(pa.array(range(begin, end), pa.int64())).validate(full=True)
            except pa.ArrowInvalid:
                if end - begin == 1:
                    bad.add(begin)
                else:
                    middle = (begin + end) // 2
                    waiting += [(begin, middle), (middle, end)]
    return sorted(bad)


def _each(kind: pa.DataType, changed: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """A type with every type inside of it that holds values changed."""
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _each(field.type, changed)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_each(kind.key_type, changed), _each(kind.item_type, changed))
    return pa.list_(_each(kind.value_type, changed)) if pa.types.is_list(kind) else changed(kind)


def _bytes(kind: pa.DataType) -> pa.DataType:
    return pa.large_binary() if pa.types.is_large_string(kind) else pa.binary() if pa.types.is_string(kind) else kind


# Dates and times of the years 1 to 9999: those that every reader of a table can represent.
#
# Spark has years beyond both ends. Python has no such dates, so pyarrow's bounds and `to_pylist` fail on them, and
# a bound of the year 10000 makes a whole table unreadable for pyarrow.

_FIRST, _LAST = datetime.min, datetime.max


def rows_outside(rows: pa.Table) -> pa.Array:
    """Positions of the rows with a date or time outside of these years, also inside of a struct, list or map."""
    positions = [_outside(rows[name]) for name in rows.column_names]
    return pa.array(np.unique(np.concatenate([np.empty(0, np.int64), *positions])), pa.int64())


def without_outside(values: pa.Array) -> pa.Array:
    """A column of times with null in place of those outside of these years."""
    return pc.if_else(_is_outside(values), pa.scalar(None, values.type), values)


def as_text(kind: pa.DataType) -> pa.DataType:
    """Text in place of a date or time; any other type as it is."""
    return pa.string() if pa.types.is_temporal(kind) else kind


def _is_outside(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    kind = values.type
    zone = UTC if pa.types.is_timestamp(kind) and kind.tz is not None else None
    first, last = (pa.scalar(at if pa.types.is_timestamp(kind) else at.date(), kind) for at in (_FIRST, _LAST))
    if zone is not None:
        first, last = (pa.scalar(at.replace(tzinfo=zone), kind) for at in (_FIRST, _LAST))
    return pc.fill_null(pc.or_(pc.less(values, first), pc.greater(values, last)), False)


def _outside(values: pa.ChunkedArray) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Positions, some of them more than once."""
    kind = values.type
    if not _holds_times(kind):
        return np.empty(0, np.int64)
    if pa.types.is_struct(kind):
        return np.concatenate([_outside(pc.struct_field(values, [i])) for i in range(kind.num_fields)])
    if pa.types.is_map(kind):  # Arrow flattens lists only
        kind = pa.list_(pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)]))
        values = values.cast(kind)
    if pa.types.is_list(kind):
        parents = pc.list_parent_indices(values).to_numpy()
        return np.asarray(parents[_outside(pc.list_flatten(values))], np.int64)
    return np.asarray(pc.indices_nonzero(_is_outside(values)).to_numpy(), np.int64)


def _holds_times(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_holds_times(kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_date32(kind) or (pa.types.is_timestamp(kind) and kind.unit == "us"))
