"""Rows that a Delta table cannot hold as they are: detected before anything is written, they become dead letters.

| reason              | what                                                                                         |
|---------------------|----------------------------------------------------------------------------------------------|
| `not_utf8`          | a text, also inside of a struct, list or map, whose bytes are not UTF-8 (bytes cast to       |
|                     | text): the Parquet file could not be read, nor the table be merged into or compacted         |
| `time_out_of_range` | a date or time, also inside of those, before the year 1 or after 9999 (see `time_range`)     |
| `partition_value`   | a text that cannot be a folder's name (255 bytes with the column's name, five for each byte  |
|                     | that is percent-encoded), or that Delta reads back as null; an empty key, which Delta stores |
|                     | as null                                                                                      |

300,000 rows that are all fine take 12 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StringType, StructType

from streaming_jobs.declare.columns import REASON_COLUMN
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.sinks.delta import time_range
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
    if len(outside := time_range.rows_outside(rows)):
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
    texts = rows.cast(pa.schema([(field.name, _each(field.type, time_range.as_text)) for field in rows.schema]))
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
