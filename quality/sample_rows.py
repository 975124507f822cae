"""The rows of a sample's files as Arrow, the same for both engines.

A column that a file lacks is null in its rows; a partition column has the value of the log. NaN is null: it stands
for a value that is missing, and pandas and Spark compare it differently. A row's position is `file << 40 | row`, by its
place in the sample; so a failing row leads to the file that it was read from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quality.sample import SampleFile, SuiteSample, TimeRange
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.storage.locations import opened_for_reading

_BITS = 40


@dataclass(frozen=True)
class SampleReader:
    """Reads the files of a sample one by one; small enough to be sent to Spark's executors."""

    name: str
    version: int
    files: tuple[SampleFile, ...]
    schema: pa.Schema
    times: TimeRange | None

    @classmethod
    def of(cls, chosen: SuiteSample) -> SampleReader:
        return cls(chosen.table.name, chosen.version, chosen.files, plain(chosen.schema), chosen.times)

    def file(self, number: int) -> pa.Table:
        """The rows of one file, filtered by the range of times; raises PreflightRefused if the file is gone."""
        file = self.files[number]
        try:
            rows = pq.ParquetFile(opened_for_reading(file.path)).read()
        except FileNotFoundError as error:
            raise PreflightRefused(
                f"file {file.path.name} of table {self.name}, version {self.version}, was removed while it was read",
                "run it again; deleted files are kept for `table.deleted_file_retention`",
            ) from error
        columns = [self._column(rows, file, field) for field in self.schema]
        table = pa.table(columns, schema=self.schema)
        return table if self.times is None else table.filter(_in_range(table[self.times.column], self.times))

    def _column(self, rows: pa.Table, file: SampleFile, field: pa.Field) -> pa.ChunkedArray | pa.Array:
        if field.name in file.partition:
            return _repeated(file.partition[field.name], field.type, rows.num_rows)
        if field.name not in rows.column_names:
            return pa.nulls(rows.num_rows, field.type)
        values = rows[field.name]
        if values.type != field.type:
            values = values.cast(field.type, safe=False)
        if pa.types.is_floating(field.type):
            values = pc.if_else(pc.is_nan(values), pa.scalar(None, field.type), values)
        return values

    def tables(self, numbers: Sequence[int] | None = None) -> Iterator[tuple[int, pa.Table]]:
        """Yields each file's number and rows, in order."""
        for number in range(len(self.files)) if numbers is None else numbers:
            yield number, self.file(number)


def plain(schema: pa.Schema) -> pa.Schema:
    """The schema with types that every reader has, all columns nullable and without comments."""
    return pa.schema([pa.field(field.name, _plain(field.type)) for field in schema])


def position(file: int, row: int) -> int:
    """The position of the row number `row` of the file number `file` of the sample."""
    return file << _BITS | row


def file_and_row(at: int) -> tuple[int, int]:
    """The numbers of a position's file and row."""
    return at >> _BITS, at & ((1 << _BITS) - 1)


def rows_at(reader: SampleReader, positions: Sequence[int]) -> dict[int, dict[str, object]]:
    """The rows at these positions, read again from their files."""
    wanted: dict[int, list[int]] = {}
    for at in sorted(set(positions)):
        file, row = file_and_row(at)
        wanted.setdefault(file, []).append(row)
    rows: dict[int, dict[str, object]] = {}
    for number, table in reader.tables(list(wanted)):
        for row, values in zip(wanted[number], table.take(wanted[number]).to_pylist(), strict=True):
            rows[position(number, row)] = values
    return rows


def _repeated(text: str | None, kind: pa.DataType, count: int) -> pa.Array:
    """A partition value, which the log has as text, for every row."""
    if text is None or (text == "" and not pa.types.is_string(kind)):
        return pa.nulls(count, kind)
    value = pa.scalar(text, pa.string())
    if pa.types.is_timestamp(kind):
        value = value.cast(pa.timestamp("us")) if not text.endswith("Z") else value.cast(pa.timestamp("us", "UTC"))
        return pa.repeat(pa.scalar(value.value, kind), count)
    return pa.repeat(value.cast(kind), count)


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    return kind


def _in_range(values: pa.ChunkedArray, times: TimeRange) -> pa.ChunkedArray:
    kind = values.type
    if pa.types.is_date(kind):
        # A date is its midnight: it is compared as a time, so that a range within a day has no date in it.
        values, kind = values.cast(pa.timestamp("us")), pa.timestamp("us")
    mask = pc.is_valid(values)
    for bound, compare in ((times.begin, pc.greater_equal), (times.end, pc.less)):
        if bound is not None:
            at = bound if kind.tz is not None else bound.replace(tzinfo=None)
            mask = pc.and_(mask, compare(values, pa.scalar(at, kind)))
    return pc.fill_null(mask, False)
