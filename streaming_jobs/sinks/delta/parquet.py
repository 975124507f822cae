"""Parquet files that Spark's executors wrote, described as Delta `add` actions without reading their rows.

Statistics come from the files' footers, for the columns that have bounds (`column_bounds.py`), in the form of Delta's
protocol, section "Per-file Statistics".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from urllib.parse import unquote

import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.transaction import AddAction

from streaming_jobs.errors import PermanentError
from streaming_jobs.storage.locations import Location, opened_for_reading
from streaming_jobs.text.spelling import counted

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_SPECIAL = frozenset("\"#%'*/:=?\\{[]^\x7f")
_JULIAN_END, _GREGORIAN_BEGIN = date(1582, 10, 4), date(1582, 10, 15)
_LAST = datetime.max - timedelta(milliseconds=1)
_FEW, _AT_ONCE = 2, 16
"""Files whose footers are read one after the other; footers that are read at the same time."""


def add_actions(
    table: Location, files: Iterable[str], partition_by: Sequence[str], bounded: Sequence[str]
) -> tuple[list[AddAction], int]:
    """The `add` actions for Parquet files below the table's folder, and the number of rows in those that are there.

    `bounded` are the columns that have bounds (`column_bounds.py`).
    """

    def described(path: str) -> tuple[AddAction, int] | None:
        file = table / path
        try:
            status = file.stat()
        except FileNotFoundError:
            return None
        metadata = pq.read_metadata(opened_for_reading(file))
        action = AddAction(
            path=path,
            size=status.st_size,
            partition_values=_partition_values(path, partition_by),
            modification_time=int(status.st_mtime * 1000),
            data_change=True,
            stats=json.dumps(statistics(file, metadata, bounded)),
        )
        return action, metadata.num_rows

    paths = sorted(files)
    if len(paths) <= _FEW:
        found = [described(path) for path in paths]
    else:  # each footer is a round trip or more where the table is not on a disk of this machine
        with ThreadPoolExecutor(min(len(paths), _AT_ONCE), thread_name_prefix="footers") as pool:
            found = list(pool.map(described, paths))
    there = [each for each in found if each is not None]
    return [action for action, _ in there], sum(rows for _, rows in there)


def checked_actions(
    table: Location, files: Iterable[str], partition_by: Sequence[str], bounded: Sequence[str], expected: int
) -> tuple[list[AddAction], int]:
    """`add_actions`; raises PermanentError if the driver does not see as many rows as were written."""
    actions, count = add_actions(table, files, partition_by, bounded)
    if count != expected:
        raise PermanentError(
            f"the executors wrote {counted(expected, 'row')} for table {table.name}, and its files have {count:,} as "
            "the driver sees them",
            "let the driver and all executors see one file system: they share the folders of tables and of state",
        )
    return actions, count


def statistics(file: Location, metadata: pq.FileMetaData, bounded: Sequence[str]) -> dict[str, Any]:
    """The file's statistics as Delta writes them: numRecords, minValues, maxValues, nullCount."""
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for index in range(metadata.num_columns):
        column = metadata.schema.column(index)
        if column.path != column.name or column.name not in bounded:  # a field inside of another has a longer path
            continue
        name = column.name
        nulls[name], low, high = _from_footer(metadata, index) or _from_rows(file, name)
        if low is not None and high is not None:
            lows[name], highs[name] = _bound(low, up=False), _bound(high, up=True)
    return {"numRecords": metadata.num_rows, "minValues": lows, "maxValues": highs, "nullCount": nulls}


def _from_footer(metadata: pq.FileMetaData, index: int) -> tuple[int, Any, Any] | None:
    """Nulls, least and greatest value of a column over all row groups; None if the footer lacks one of them."""
    groups = [metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups)]
    if any(group is None or not group.has_null_count for group in groups):
        return None
    valued = [group for group in groups if group.num_values]
    if not all(group.has_min_max for group in valued):
        return None
    nulls = sum(group.null_count for group in groups)
    return nulls, min((group.min for group in valued), default=None), max((group.max for group in valued), default=None)


def _from_rows(file: Location, name: str) -> tuple[int, Any, Any]:
    """The same from the column itself: a file without bounds for a column that has them elsewhere hides its rows."""
    values = pq.ParquetFile(opened_for_reading(file)).read(columns=[name])[name]
    bounds = pc.min_max(values).as_py()
    return values.null_count, bounds["min"], bounds["max"]


def partition_folder(values: Mapping[str, str | None]) -> str:
    """The folder of a partition, named as Spark does (`ExternalCatalogUtils.escapePathName`)."""
    return "/".join(
        f"{_escaped(column)}={_escaped(value) if value else NULL_PARTITION}" for column, value in values.items()
    )


def _escaped(text: str) -> str:
    return "".join(f"%{ord(c):02X}" if c in _SPECIAL or ord(c) < 32 else c for c in text)


def _partition_values(path: str, partition_by: Sequence[str]) -> dict[str, str | None]:
    values = dict(_folders(path))
    return {column: values[column] for column in partition_by}


def _folders(path: str) -> Iterator[tuple[str, str | None]]:
    for part in path.split("/")[:-1]:
        column, _, value = part.partition("=")
        yield unquote(column), None if value == NULL_PARTITION else unquote(value)


def _bound(value: Any, *, up: bool) -> Any:
    """The value as the log writes it: times cut to milliseconds, upper ones widened while the calendar has room.

    Spark reads bounds with a calendar that has no days between 1582-10-04 and 1582-10-15, and would move them.
    """
    if isinstance(value, datetime):
        naive = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
        if _JULIAN_END < naive.date() < _GREGORIAN_BEGIN:
            naive = datetime.combine(_GREGORIAN_BEGIN if up else _JULIAN_END, time())
        if up and naive.microsecond % 1000 and naive <= _LAST:
            naive += timedelta(milliseconds=1)
        return naive.isoformat(timespec="milliseconds") + ("" if value.tzinfo is None else "Z")
    if isinstance(value, date):
        if _JULIAN_END < value < _GREGORIAN_BEGIN:
            value = _GREGORIAN_BEGIN if up else _JULIAN_END
        return value.isoformat()
    return value
