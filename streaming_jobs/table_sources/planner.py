"""The planner of a table's batches: decides at which version the next batch ends, and what each of its tasks reads.

A batch has at least one version, however large, and no more versions than the bound on its rows and bytes allows. A
range that begins at 0 is one batch with the table's content: versions cannot divide it. A batch ends before a version
that is not settled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BooleanType, StructField, StructType

from streaming_jobs.declare.schemas import nullable
from streaming_jobs.errors import OffsetsLost
from streaming_jobs.sources.planner import BatchLimits, BatchSize, up_to_step
from streaming_jobs.sources.record_blocks import POSITION, RECORD, REFUSED, TIME, read_used
from streaming_jobs.storage.locations import Location, opened_for_reading
from streaming_jobs.table_sources.versions import DataFile, TableVersions, Version
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from streaming_jobs.declare.table_source import DeltaSource


# Rows of a table as Arrow record batches, in the form that records of topics have (`sources/record_blocks.py`).
#
# The columns of the table are in `_record`; `offset` is the version, `timestamp` the time of its commit. A row is
# bad if its event time is too far after that time. A column that a file does not have yet is null.

BLOCK = 10_000
"""Rows of one Arrow batch, at most."""


@dataclass(frozen=True)
class FileToRead:
    """A file of a version, with the time of the version's commit (milliseconds since 1970)."""

    version: int
    at: int
    file: DataFile


@dataclass(frozen=True)
class RowBlocks:
    """Makes record batches of a table's rows. `rows`: "all", or the "refused" ones with reason and detail.

    `used` is a file that may list the columns in use, as for `RecordBlocks`.
    """

    declared: DeltaSource
    versions: TableVersions
    rows: Literal["all", "refused"]
    used: Location | None = None

    @cached_property
    def spark_schema(self) -> StructType:
        if self.rows == "refused":
            return REFUSED
        tombstone, bad = StructField("tombstone", BooleanType()), StructField("_bad", BooleanType())
        return StructType([*POSITION, tombstone, StructField(RECORD, nullable(self.declared.columns)), bad])

    @cached_property
    def schema(self) -> pa.Schema:
        return to_arrow_schema(self.spark_schema, timezone="UTC")

    @cached_property
    def _used(self) -> frozenset[str] | None:
        return read_used(self.used)

    @cached_property
    def _record(self) -> list[pa.Field]:
        """The table's columns as fields, all of them."""
        return list(to_arrow_schema(nullable(self.declared.columns), timezone="UTC"))

    def _wanted(self, name: str) -> bool:
        """True if a column of the table has to be built: for the stream, or for the verdict."""
        if self.rows == "refused" or self._used is None or f"{RECORD}.{name}" in self._used:
            return True
        return self.declared.ahead is not None and name == self.declared.event_time

    def of_files(self, files: Iterable[FileToRead]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of files, in their order; raises OffsetsLost for a file that is gone."""
        for each in files:
            for rows in self.columns_of(each.file):
                yield self._batch(rows, each)

    def columns_of(self, file: DataFile) -> Iterator[list[pa.Array]]:
        """Yields the table's columns of a file, block by block; unused columns are null."""
        if (path := self.versions.on_disk(file.path, file.root)) is None:
            raise self.versions.file_gone(file.path)
        try:
            parquet = pq.ParquetFile(opened_for_reading(path), coerce_int96_timestamp_unit="us")
        except FileNotFoundError:
            raise self.versions.file_gone(file.path) from None
        with parquet:
            there = set(parquet.schema_arrow.names)
            read = [f.name for f in self._record if f.name in there and self._wanted(f.name)]
            if not read:  # only the number of rows counts
                left = parquet.metadata.num_rows
                while left > 0:
                    yield self._columns({}, file, min(left, BLOCK))
                    left -= BLOCK
                return
            for block in parquet.iter_batches(BLOCK, columns=read):
                yield self._columns(dict(zip(block.schema.names, block.columns, strict=True)), file, block.num_rows)

    def _columns(self, read: dict[str, pa.Array], file: DataFile, size: int) -> list[pa.Array]:
        columns = []
        for column in self._record:
            if column.name in read:
                columns.append(_as_type(read[column.name], column.type))
            elif column.name in file.partition and self._wanted(column.name):
                columns.append(pa.repeat(partition_value(file.partition[column.name], column.type), size))
            else:
                columns.append(pa.nulls(size, column.type))
        return columns

    def _batch(self, columns: list[pa.Array], of: FileToRead) -> pa.RecordBatch:
        size = len(columns[0])
        late = self._too_far_ahead(columns, of.at)
        position = {
            "topic": pa.repeat(pa.scalar(self.versions.name, pa.string()), size),
            "partition": pa.repeat(pa.scalar(0, pa.int32()), size),
            "offset": pa.repeat(pa.scalar(of.version, pa.int64()), size),
            "timestamp": pa.repeat(pa.scalar(of.at * 1000, TIME), size),
            "key": pa.nulls(size, pa.binary()),
        }
        if self.rows == "refused":
            return self._refused(columns, position, np.flatnonzero(late), of.at)
        built = {
            **position,
            "tombstone": pa.repeat(pa.scalar(False), size),
            RECORD: pa.StructArray.from_arrays(columns, fields=list(self.schema.field(RECORD).type)),
            "_bad": pa.array(late),
        }
        return pa.RecordBatch.from_arrays([built[f.name] for f in self.schema], schema=self.schema)

    def _too_far_ahead(self, columns: Sequence[pa.Array], at: int) -> np.ndarray:
        """By row whether its event time is more than `ahead` after its commit."""
        size = len(columns[0])
        if self.declared.ahead is None or self.declared.event_time is None:
            return np.zeros(size, dtype=bool)
        events = columns[self.declared.columns.fieldNames().index(self.declared.event_time)]
        micros = pc.cast(pc.cast(events, pa.timestamp("us")), pa.int64())
        latest = (at + self.declared.ahead // timedelta(milliseconds=1)) * 1000
        return np.asarray(pc.fill_null(pc.greater(micros, latest), False))

    def _refused(
        self, columns: Sequence[pa.Array], position: dict[str, pa.Array], rows: np.ndarray, at: int
    ) -> pa.RecordBatch:
        chosen = pa.table(columns, names=self.declared.columns.fieldNames()).take(pa.array(rows)).to_pylist()
        when = datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
        column, bound = str(self.declared.event_time), self.declared.max_ahead
        details = [
            f"column '{column}' is {row[column]}, more than {bound} after the commit of the row, {when}"
            for row in chosen
        ]
        built = {
            **{name: column.slice(0, len(rows)) for name, column in position.items()},
            "value": pa.array([json.dumps(row, default=str).encode() for row in chosen], pa.binary()),
            "headers": pa.nulls(len(rows), self.schema.field("headers").type),
            "reason": pa.array(["event_time_ahead"] * len(rows), pa.string()),
            "detail": pa.array(details, pa.string()),
        }
        return pa.RecordBatch.from_arrays([built[f.name] for f in self.schema], schema=self.schema)


def partition_value(text: str | None, kind: pa.DataType) -> pa.Scalar:
    """A partition value as Delta's protocol serialises it ("Partition Value Serialization"); "" and None are null."""
    if text is None or text == "":
        return pa.scalar(None, kind)
    if pa.types.is_binary(kind):
        return pa.scalar(text.encode(), kind)
    if pa.types.is_timestamp(kind):
        moment = datetime.fromisoformat(text)
        if kind.tz is not None and moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return pa.scalar(moment, kind)
    return pa.scalar(text).cast(kind)


def _as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column in the declared type; a time without a zone is UTC."""
    return column if column.type.equals(kind) else _cast(column, kind)


def _cast(column: pa.Array, kind: pa.DataType) -> Any:
    if pa.types.is_struct(kind) and pa.types.is_struct(column.type):
        names = [f.name for f in column.type]
        fields = [
            _as_type(pc.struct_field(column, [f.name]), f.type) if f.name in names else pa.nulls(len(column), f.type)
            for f in kind
        ]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=pc.is_null(column))
    return column.cast(kind)


SMALL_ROWS = 20_000
SMALL_BYTES = 8 << 20
"""Rows, and bytes of files, that the planner reads itself, at most; larger batches are read by tasks."""

_LOOK = 0.02
"""Seconds between two looks for a new version."""
_CHECK_EVERY = 5.0
"""Seconds between two looks whether an idle table still has what the stream reads next."""
_MOST_VERSIONS = 2_000
"""Versions of one batch: each is a file of the log that is read."""


@dataclass
class TablePlanner:
    """Plans the batches of one query from one table."""

    versions: TableVersions
    limits: BatchLimits
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _size: BatchSize = field(init=False)
    _stop_at: int | None = field(default=None, init=False)
    _planned: tuple[int, float] | None = field(default=None, init=False)
    _checked: float | None = field(default=None, init=False)
    _known: dict[int, Version] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._size = BatchSize(self.limits.seconds, self.limits.records, self.limits.bytes, self.limits.first)

    def next_end(self, start: Mapping[int, int]) -> dict[int, int]:
        """As `next_version`, with the version as the offset of partition 0."""
        return {0: self.next_version(start.get(0, 0))}

    def close(self) -> None:
        """Nothing: no connection is open."""

    def next_version(self, start: int) -> int:
        """The end of the batch that begins at version `start`; equal to it if nothing new is there.

        Raises OffsetsLost for a version that is gone, and for a table that ends before `start`.
        """
        if self._planned is not None:
            rows, at = self._planned
            self._size.took(rows, self.monotonic() - at)
        end = self._end(start)
        self._planned = None
        if end <= start:
            return start
        if start == 0:
            return end
        end = up_to_step({0: start}, {0: end}, self.limits.steps)[0]
        rows = size = 0
        at = start
        while at < end and at - start < _MOST_VERSIONS:
            version = self._version(at)
            if not version.settled:
                break
            if at > start and (rows + version.rows > self._size.limit or size + version.size > self.limits.bytes):
                break
            rows, size, at = rows + version.rows, size + version.size, self.versions.after(at)
        self._planned = (rows, self.monotonic()) if rows else None
        return at

    def files(self, start: int, end: int) -> list[FileToRead]:
        """The files of a range, in the order in which they are read."""
        if start == 0:
            versions = list(self.versions.between(0, end))
        else:
            versions = []
            while start < end:
                versions.append(self._version(start))
                start = self.versions.after(start)
            self._known = {number: version for number, version in self._known.items() if number >= end}
        return [FileToRead(each.number, each.at, file) for each in versions for file in each.files]

    def stop_at_present_end(self) -> None:
        """Plan no batch beyond the table's present end, or beyond the bound that the limits give."""
        until = self.limits.until
        self._stop_at = self._present_end() if until is None else until.get(0, 0)
        if until is not None and self._stop_at > (end := self._present_end()):
            raise self._ends_before(end, self._stop_at)

    def _end(self, start: int) -> int:
        """The version after the newest one that may be read; waits for a first one as long as the limits say."""
        if self._stop_at is not None:
            return self._stop_at
        if start == 0:
            return self._present_end()
        until = self.monotonic() + self.limits.wait
        while not self.versions.has(start):
            if self.monotonic() >= until:
                self._check(start)
                return start
            self.sleep(_LOOK)
        end = start + 1
        while end - start < _MOST_VERSIONS and self.versions.has(end):
            end += 1
        return end

    def _present_end(self) -> int:
        newest = self.versions.newest()
        return 0 if newest is None else newest + 1

    def _check(self, start: int) -> None:
        """Raise OffsetsLost if there is nothing at `start`, although the table does not end there.

        It lists the log, so an idle stream does it every few seconds only.
        """
        if self._checked is not None and self.monotonic() - self._checked < _CHECK_EVERY:
            return
        self._checked = self.monotonic()
        end = self._present_end()
        if end > start and not self.versions.has(start):
            raise self.versions.gone(start, max(self.versions.first(), start + 1))
        if end < start:
            raise self._ends_before(end, start)

    def _ends_before(self, end: int, start: int) -> OffsetsLost:
        return OffsetsLost(
            f"table {self.versions.name} ends at version {end - 1}, and the stream has read up to {start - 1}",
            f"see `{commands.status()}`",
        )

    def _version(self, number: int) -> Version:
        if number in self._known:
            return self._known[number]
        version = self.versions.version(number)
        if version.settled:
            self._known[number] = version
        return version


def is_small(files: Sequence[FileToRead]) -> bool:
    """True if the planner reads the files itself and sends the rows along."""
    rows, size = sum(each.file.rows for each in files), sum(each.file.size for each in files)
    return rows <= SMALL_ROWS and size <= SMALL_BYTES


def tasks(files: Sequence[FileToRead], workers: int) -> list[list[FileToRead]]:
    """The files in at most `workers` runs of about the same bytes, in order: one per task."""
    total, parts, done = sum(each.file.size for each in files), [list[FileToRead]()], 0
    for each in files:
        if parts[-1] and len(parts) < workers and done >= total * len(parts) / workers:
            parts.append([])
        parts[-1].append(each)
        done += each.file.size
    return [part for part in parts if part]
