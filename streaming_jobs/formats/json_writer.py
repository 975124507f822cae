"""Rows as JSON values: what the declaration's own reader reads back equal, and nothing else.

Every field of the schema is in every record, null where it may be. Numbers are JSON numbers, decimals with all digits
of their scale; dates and times are text: `2013-01-31`, `2013-01-31T05:06:07.000001Z`, TIMESTAMP_NTZ without the zone.
A row that the reader would refuse is refused here: a null in a required field, a number that is not finite, a text that
is not UTF-8, a year before 1 or after 9999.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from streaming_jobs.formats.text_values import FIRST_DAY, FIRST_MICROSECOND, LAST_DAY, LAST_MICROSECOND
from streaming_jobs.record_format import Refusal, Written

_ENCODE = msgspec.json.Encoder().encode


@dataclass
class _Column:
    """The JSON values of a column, and the refusals of its rows by their index."""

    values: Sequence[Any]
    refused: dict[int, Refusal]


class JsonWriter:
    """A writer of rows by one schema; it belongs to one process."""

    def __init__(self, schema: StructType) -> None:
        self._schema = schema

    def write(self, rows: pa.RecordBatch) -> Written:
        """The value of each row; `rows` has the schema's fields."""
        arrays = [rows.column(name) for name in self._schema.fieldNames()]
        written = _records(self._schema, arrays, rows.num_rows, "")
        values = [None if index in written.refused else _ENCODE(value) for index, value in enumerate(written.values)]
        return Written(values, written.refused)


def _records(schema: StructType, arrays: Sequence[pa.Array], rows: int, place: str) -> _Column:
    """The rows of these fields as dictionaries; `place` is that of the struct, with a dot after it."""
    names = schema.fieldNames()
    refused: dict[int, Refusal] = {}
    columns = []
    for field, array in zip(schema.fields, arrays, strict=True):
        column = _column(field.dataType, array, f"{place}{field.name}")
        if not field.nullable and array.null_count:
            nulls = pc.indices_nonzero(pc.is_null(array)).to_pylist()
            _merge(refused, nulls, "missing_field", f"{place}{field.name} is null, and the topic's schema requires it")
        refused |= {row: refusal for row, refusal in column.refused.items() if row not in refused}
        columns.append(column.values)
    if not columns:
        return _Column([{} for _ in range(rows)], refused)
    return _Column([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)], refused)


def _column(kind: DataType, array: pa.Array, place: str) -> _Column:
    if isinstance(kind, StructType):
        return _structs(kind, array, place)
    if isinstance(kind, ArrayType):
        return _lists(kind, array, place)
    for types, convert in _LEAVES:
        if isinstance(kind, types):
            return convert(array, place)
    return _Column(array.to_pylist(), {})


def _structs(kind: StructType, array: pa.Array, place: str) -> _Column:
    present = pc.indices_nonzero(pc.is_valid(array))
    inner = array.take(present) if array.null_count else array
    fields = [inner.field(index) for index in range(len(kind.fields))]
    written = _records(kind, fields, len(inner), f"{place}.")
    if not array.null_count:
        return written
    rows = present.to_pylist()
    values: list[Any] = [None] * len(array)
    for row, value in zip(rows, written.values, strict=True):
        values[row] = value
    return _Column(values, {rows[index]: refusal for index, refusal in written.refused.items()})


def _lists(kind: ArrayType, array: pa.Array, place: str) -> _Column:
    flat = array.flatten()  # without what lies below null lists
    inner = _column(kind.elementType, flat, f"{place}[]")
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_pylist()
    missing = set() if kind.containsNull or not flat.null_count else set(_rows(pc.is_null(flat)))
    values: list[Any] = []
    refused: dict[int, Refusal] = {}
    begin = 0
    valid = pc.is_valid(array).to_pylist()
    for row, length in enumerate(lengths):
        end = begin + length
        values.append(list(inner.values[begin:end]) if valid[row] else None)
        for element in range(begin, end) if inner.refused or missing else ():
            if element in inner.refused:
                refused.setdefault(row, inner.refused[element])
            elif element in missing:
                refused.setdefault(row, Refusal("missing_field", f"{place} holds a null, and its type allows none"))
        begin = end
    return _Column(values, refused)


def _texts(array: pa.Array, place: str) -> _Column:
    try:
        return _Column(array.to_pylist(), {})
    except UnicodeDecodeError:
        values, refused = [], {}
        for row, value in enumerate(array.cast(pa.binary()).to_pylist()):
            try:
                values.append(None if value is None else value.decode())
            except UnicodeDecodeError:
                values.append(None)
                refused[row] = Refusal("not_utf8", f"the text of {place} is not UTF-8")
        return _Column(values, refused)


def _floats(array: pa.Array, place: str) -> _Column:
    values = array.to_pylist()
    bad = [row for row, value in enumerate(values) if value is not None and not math.isfinite(value)]
    refused: dict[int, Refusal] = {}
    _merge(refused, bad, "not_finite", f"{place} is not a finite number, and JSON has no other")
    return _Column(values, refused)


def _decimals(array: pa.Array, place: str) -> _Column:  # noqa: ARG001 - every decimal can be written
    return _Column([None if value is None else msgspec.Raw(f"{value:f}".encode()) for value in array.to_pylist()], {})


def _dates(array: pa.Array, place: str) -> _Column:
    return _times(array, place, array.cast(pa.int32()), (FIRST_DAY, LAST_DAY), lambda text: text)


def _timestamps(array: pa.Array, place: str) -> _Column:
    plain = array.cast(pa.timestamp("us", tz="UTC")).view(pa.timestamp("us"))
    return _moments(plain, place, "Z")


def _local_timestamps(array: pa.Array, place: str) -> _Column:
    return _moments(array.cast(pa.timestamp("us")), place, "")


def _moments(array: pa.Array, place: str, zone: str) -> _Column:
    limits = (FIRST_MICROSECOND, LAST_MICROSECOND)
    return _times(array, place, array.cast(pa.int64()), limits, lambda text: f"{text.replace(' ', 'T')}{zone}")


def _times(
    array: pa.Array, place: str, numbers: pa.Array, limits: tuple[int, int], shown: Callable[[str], str]
) -> _Column:
    outside = _rows(pc.or_(pc.less(numbers, limits[0]), pc.greater(numbers, limits[1])))
    refused: dict[int, Refusal] = {}
    _merge(refused, outside, "time_out_of_range", f"{place} is not in the years 1 to 9999")
    texts = array.cast(pa.string()).to_pylist()
    return _Column([None if text is None else shown(text) for text in texts], refused)


_LEAVES: tuple[tuple[tuple[type[DataType], ...], Callable[[pa.Array, str], _Column]], ...] = (
    ((StringType,), _texts),
    ((DoubleType, FloatType), _floats),
    ((DecimalType,), _decimals),
    ((DateType,), _dates),
    ((TimestampType,), _timestamps),
    ((TimestampNTZType,), _local_timestamps),
)


def _rows(mask: pa.Array) -> list[int]:
    indices: list[int] = pc.indices_nonzero(pc.fill_null(mask, False)).to_pylist()
    return indices


def _merge(refused: dict[int, Refusal], rows: Iterable[int], reason: str, detail: str) -> None:
    if rows:
        refusal = Refusal(reason, detail)
        refused.update((row, refusal) for row in rows if row not in refused)
