"""Which columns of a Parquet file have a dictionary: all but those whose values are almost all distinct.

By default a writer makes a dictionary of each column, and gives it up once it is larger than 1 MiB. For an id, an
offset or a time in microseconds, that takes most of the time of writing and saves no byte. A column of 100,000 numbers
is smaller with its dictionary in a file of a million rows, and so is one in which neighbours are equal.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_FEWEST = 16_384
"""Rows below which the choice would take longer than the dictionaries."""
_BLOCKS, _BLOCK = 16, 256
"""The sample: blocks of adjacent rows. Blocks show equal neighbours, and their number shows values that come back."""
_HALF = _BLOCKS * _BLOCK // 2
_DISTINCT = 0.99
"""A sample of 200,000 equally frequent values has 99 % distinct ones; 1 MiB has room for 131,072 values of 8 bytes."""


def almost_distinct(rows: pa.Table) -> list[str]:
    """The top-level columns whose values are almost all distinct in a sample; empty for a small table."""
    if rows.num_rows < _FEWEST:
        return []
    able = rows.select(
        [name for name, kind in zip(rows.column_names, rows.schema.types, strict=True) if _is_wide(kind)]
    )
    starts = np.linspace(0, rows.num_rows - _BLOCK, _BLOCKS, dtype=np.int64).tolist()
    sample = pa.concat_tables([able.slice(start, _BLOCK) for start in starts])  # without a copy
    return [name for name in sample.column_names if _is_almost_distinct(sample[name])]


def _is_wide(kind: pa.DataType) -> bool:
    """A page has room for more values of narrower types than the sample tells apart from distinct ones."""
    wide_number = pa.types.is_int64(kind) or pa.types.is_float64(kind) or pa.types.is_decimal(kind)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    octets = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return bool(wide_number or text or octets or pa.types.is_timestamp(kind))


def _is_almost_distinct(column: pa.ChunkedArray) -> bool:
    known = len(column) - column.null_count
    return known >= _HALF and int(pc.count_distinct(column).as_py()) > _DISTINCT * known
