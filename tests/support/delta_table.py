"""The Delta table of the tests of sinks: its name, its rows, and partition values that have to be escaped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from streaming_jobs.sinks.delta.sink import DeltaSink

TABLE = "evens"
ROWS = pa.table({"k": ["x", "y"], "n": [1, 2]})
AWKWARD = ("a b", "c:d", "50%", "e/f", "gö", "x=y", "%20", "日本", "it's", 'a"b', "a?b#c", "a\\b", "[x]{y}", "plain")


Make = Callable[..., DeltaSink]


def rows_in(sink: DeltaSink) -> list[dict[str, Any]]:
    """The table's rows as any reader sees them."""
    rows: list[dict[str, Any]] = DeltaTable(sink.path).to_pyarrow_table().to_pylist()
    return sorted(rows, key=repr)
