"""Dates and times of the years 1 to 9999: those that every reader of a table can represent.

Spark has years beyond both ends. Python has no such dates, so pyarrow's bounds and `to_pylist` fail on them, and
a bound of the year 10000 makes a whole table unreadable for pyarrow.
"""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
