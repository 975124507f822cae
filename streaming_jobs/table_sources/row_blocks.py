"""Rows of a table as Arrow record batches, in the form that records of topics have (`sources/record_blocks.py`).

The columns of the table are in `_record`; `offset` is the version, `timestamp` the time of its commit. A row is bad if
its event time is too far after that time. A column that a file does not have yet is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, BooleanType, StringType, StructField, StructType

from streaming_jobs.sources.record_blocks import HEADERS, POSITION, RECORD, TIME, nullable, read_used
from streaming_jobs.table_sources.versions import DataFile, TableVersions

if TYPE_CHECKING:
    from streaming_jobs.delta_source import DeltaSource

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

    `used` is a file that may list the columns that somebody looks at, as for `RecordBlocks`.
    """

    versions: TableVersions
    columns: StructType
    event_time: str | None
    ahead: timedelta | None
    max_ahead: str | None
    rows: Literal["all", "refused"]
    used: Path | None = None

    @classmethod
    def of(
        cls, source: DeltaSource, versions: TableVersions, rows: Literal["all", "refused"], used: Path | None = None
    ) -> RowBlocks:
        """The blocks of a declared source."""
        return cls(versions, source.columns, source.event_time, source.ahead, source.max_ahead, rows, used)

    @cached_property
    def spark_schema(self) -> StructType:
        """The columns of each batch as Spark's types."""
        if self.rows == "refused":
            reason = [StructField("reason", StringType()), StructField("detail", StringType())]
            value = StructField("value", BinaryType())
            return StructType([*POSITION, value, StructField("headers", HEADERS), *reason])
        tombstone, bad = StructField("tombstone", BooleanType()), StructField("_bad", BooleanType())
        return StructType([*POSITION, tombstone, StructField(RECORD, nullable(self.columns)), bad])

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of each batch."""
        return to_arrow_schema(self.spark_schema, timezone="UTC")

    @cached_property
    def _used(self) -> frozenset[str] | None:
        return None if self.used is None else read_used(self.used)

    @cached_property
    def _record(self) -> list[pa.Field]:
        """The table's columns as fields, all of them."""
        return list(to_arrow_schema(nullable(self.columns), timezone="UTC"))

    def _wanted(self, name: str) -> bool:
        """True if a column of the table is built: somebody looks at it, or the verdict needs it."""
        if self.rows == "refused" or self._used is None or f"{RECORD}.{name}" in self._used:
            return True
        return self.ahead is not None and name == self.event_time

    def of_files(self, files: Iterable[FileToRead]) -> Iterator[pa.RecordBatch]:
        """Yields the rows of files, in their order; raises OffsetsLost for a file that is gone."""
        for each in files:
            for rows in self._read(each.file):
                yield self._batch(rows, each)

    def _read(self, file: DataFile) -> Iterator[list[pa.Array]]:
        """Yields the table's columns of a file, block by block; one that is not wanted is null."""
        if (path := self.versions.on_disk(file.path)) is None:
            raise self.versions.file_gone(file.path)
        try:
            parquet = pq.ParquetFile(path, coerce_int96_timestamp_unit="us")
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
        for field in self._record:
            if field.name in read:
                columns.append(_as_type(read[field.name], field.type))
            elif field.name in file.partition and self._wanted(field.name):
                columns.append(pa.repeat(partition_value(file.partition[field.name], field.type), size))
            else:
                columns.append(pa.nulls(size, field.type))
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
        if self.ahead is None or self.event_time is None:
            return np.zeros(size, dtype=bool)
        events = columns[self.columns.fieldNames().index(self.event_time)]
        micros = pc.cast(pc.cast(events, pa.timestamp("us")), pa.int64())
        latest = (at + self.ahead // timedelta(milliseconds=1)) * 1000
        return np.asarray(pc.fill_null(pc.greater(micros, latest), False))

    def _refused(
        self, columns: Sequence[pa.Array], position: dict[str, pa.Array], rows: np.ndarray, at: int
    ) -> pa.RecordBatch:
        chosen = pa.table(columns, names=self.columns.fieldNames()).take(pa.array(rows)).to_pylist()
        when = datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
        details = [
            f"column '{self.event_time}' is {row[str(self.event_time)]}, more than {self.max_ahead} after the "
            f"commit of the row, {when}"
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
