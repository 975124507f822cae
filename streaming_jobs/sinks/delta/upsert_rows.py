"""Rows of an upsert, in Arrow: null keys aside, and one row per key."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from streaming_jobs.errors import OutputMismatch

_POSITION = "__position"


def split_null_keys(rows: pa.Table, keys: Sequence[str]) -> tuple[pa.Table, pa.Table]:
    """Rows whose keys are all there, and rows with a null in a key."""
    null = pc.is_null(rows[keys[0]])
    for key in keys[1:]:
        null = pc.or_(null, pc.is_null(rows[key]))
    if not pc.any(null, min_count=0).as_py():
        return rows, rows.slice(0, 0)
    return rows.filter(pc.invert(null)), rows.filter(null)


def last_per_key(rows: pa.Table, keys: Sequence[str], order_by: Sequence[str]) -> pa.Table:
    """One row per key: the greatest by `order_by` (columns that are all there; nulls lose).

    With no order, rows must be unique already: OutputMismatch names a doubled key, because a merge would
    insert both.
    """
    if order_by:
        rows = rows.take(pc.sort_indices(rows, [(c, "ascending", "at_start") for c in order_by]))
    numbered = rows.append_column(_POSITION, pa.array(range(rows.num_rows), pa.int64()))
    grouped = numbered.select([*keys, _POSITION]).group_by(list(keys), use_threads=False)
    last = grouped.aggregate([(_POSITION, "max"), (_POSITION, "count")])
    if last.num_rows == rows.num_rows:
        return rows
    if not order_by:
        doubled = last.filter(pc.greater(last[f"{_POSITION}_count"], 1)).select(list(keys)).slice(0, 1).to_pylist()
        raise OutputMismatch(
            f"a batch has several rows for the key {doubled[0]} and nothing says which one is last",
            "set order_by on the sink, or keep the column _source in the stream's output",
        )
    return rows.take(last[f"{_POSITION}_max"])
