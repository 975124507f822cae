"""Parquet files that Spark's executors wrote, described as Delta `add` actions without reading their rows.

Statistics come from the files' footers: the rules for what may stand in `stats` are those of Delta's protocol,
section "Per-file Statistics". Text longer than 32 characters gets no bound; timestamps are widened to whole
milliseconds, since that is what Delta readers compare with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
from deltalake.transaction import AddAction

_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_TEXT_BOUND = 32
_INDEXED_COLUMNS = 32


def add_actions(table: Path, folder: Path, partition_by: Sequence[str]) -> tuple[list[AddAction], int]:
    """The `add` actions for every Parquet file below `folder`, and the number of rows in them."""
    actions, rows = [], 0
    for file in sorted(folder.rglob("*.parquet")):
        metadata = pq.read_metadata(file)
        if metadata.num_rows == 0:
            continue
        rows += metadata.num_rows
        status = file.stat()
        actions.append(
            AddAction(
                path=file.relative_to(table).as_posix(),
                size=status.st_size,
                partition_values=_partition_values(file.relative_to(folder), partition_by),
                modification_time=int(status.st_mtime * 1000),
                data_change=True,
                stats=json.dumps(statistics(metadata)),
            )
        )
    return actions, rows


def statistics(metadata: pq.FileMetaData) -> dict[str, Any]:
    """The file's statistics as Delta writes them: numRecords, minValues, maxValues, nullCount."""
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for index in range(min(metadata.num_columns, _INDEXED_COLUMNS)):
        if "." in (name := metadata.schema.column(index).path):
            continue  # nested fields carry no bounds here: readers then simply do not skip by them
        columns = [metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups)]
        if any(c is None or not c.has_null_count for c in columns):
            continue
        nulls[name] = sum(c.null_count for c in columns)
        bounded = [c for c in columns if c.num_values]
        if bounded and all(c.has_min_max for c in bounded):
            low, high = _low(min(c.min for c in bounded)), _high(max(c.max for c in bounded))
            if low is not None and high is not None:
                lows[name], highs[name] = low, high
    return {"numRecords": metadata.num_rows, "minValues": lows, "maxValues": highs, "nullCount": nulls}


def _partition_values(path: Path, partition_by: Sequence[str]) -> dict[str, str | None]:
    found = dict(_folders(path))
    return {column: found[column] for column in partition_by}


def _folders(path: Path) -> Iterator[tuple[str, str | None]]:
    for part in path.parts[:-1]:
        column, _, value = part.partition("=")
        yield unquote(column), None if value == _NULL_PARTITION else unquote(value)


def _low(value: Any) -> Any:
    return _bound(value, up=False)


def _high(value: Any) -> Any:
    return _bound(value, up=True)


def _bound(value: Any, *, up: bool) -> Any:
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if len(value) <= _TEXT_BOUND else None
    if isinstance(value, datetime):
        utc = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        if up and utc.microsecond % 1000:
            utc += timedelta(milliseconds=1)
        return utc.strftime("%Y-%m-%dT%H:%M:%S.") + f"{utc.microsecond // 1000:03d}Z"
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        # The digits that JSON will show must be the value's own: a rounded bound would hide rows from readers.
        return shown if Decimal(repr(shown := float(value))) == value else None
    return None
