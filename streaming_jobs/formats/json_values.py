"""Columns as JSON's Python values, with a refusal of each row that the reader would refuse."""

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
from streaming_jobs.record_format import Refusal


@dataclass
class Column:
    """The JSON values of a column, and the refusals of its rows by their index."""

    values: Sequence[Any]
    refused: dict[int, Refusal]


def _records(schema: StructType, arrays: Sequence[pa.Array], rows: int, place: str) -> Column:
    """The rows of these fields as dictionaries; `place` is that of the struct, with a dot after it."""
    names = schema.fieldNames()
    refused: dict[int, Refusal] = {}
    columns = []
    for field, array in zip(schema.fields, arrays, strict=True):
        column = column_values(field.dataType, array, f"{place}{field.name}")
        missing = {} if field.nullable else missing_values(array, f"{place}{field.name}")
        refused = {**column.refused, **missing, **refused}
        columns.append(column.values)
    if not columns:
        return Column([{} for _ in range(rows)], refused)
    return Column([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)], refused)


def missing_values(array: pa.Array, place: str) -> dict[int, Refusal]:
    """The refusals of the rows that are null in a column that the schema requires."""
    nulls = _rows(pc.is_null(array)) if array.null_count else []
    return _refusals(nulls, "missing_field", f"{place} is null, and the topic's schema requires it")


def column_values(kind: DataType, array: pa.Array, place: str) -> Column:
    """The values of a column; `place` names it in refusals."""
    if isinstance(kind, StructType):
        return _structs(kind, array, place)
    if isinstance(kind, ArrayType):
        return _lists(kind, array, place)
    for types, convert in _LEAVES:
        if isinstance(kind, types):
            return convert(array, place)
    return Column(array.to_pylist(), {})


def _structs(kind: StructType, array: pa.Array, place: str) -> Column:
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
    return Column(values, {rows[index]: refusal for index, refusal in written.refused.items()})


def _lists(kind: ArrayType, array: pa.Array, place: str) -> Column:
    flat = array.flatten()  # without what lies below null lists
    inner = column_values(kind.elementType, flat, f"{place}[]")
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
    return Column(values, refused)


def _texts(array: pa.Array, place: str) -> Column:
    try:
        return Column(array.to_pylist(), {})
    except UnicodeDecodeError:
        values, refused = [], {}
        for row, value in enumerate(array.cast(pa.binary()).to_pylist()):
            try:
                values.append(None if value is None else value.decode())
            except UnicodeDecodeError:
                values.append(None)
                refused[row] = Refusal("not_utf8", f"the text of {place} is not UTF-8")
        return Column(values, refused)


def _floats(array: pa.Array, place: str) -> Column:
    values = array.to_pylist()
    bad = [row for row, value in enumerate(values) if value is not None and not math.isfinite(value)]
    return Column(values, _refusals(bad, "not_finite", f"{place} is not a finite number, and JSON has no other"))


def _decimals(array: pa.Array, place: str) -> Column:  # noqa: ARG001 - every decimal can be written
    return Column([None if value is None else msgspec.Raw(f"{value:f}".encode()) for value in array.to_pylist()], {})


def _times(array: pa.Array, place: str) -> Column:
    texts, refused = time_texts(array, place)
    return Column(texts.to_pylist(), refused)


def time_texts(array: pa.Array, place: str) -> tuple[pa.Array, dict[int, Refusal]]:
    """Dates or times as JSON's texts, and the refusals of those that have none."""
    if pa.types.is_date(array.type):
        return array.cast(pa.string()), _outside(array.cast(pa.int32()), FIRST_DAY, LAST_DAY, place)
    zoned = array.type.tz is not None
    plain = array.cast(pa.timestamp("us", tz="UTC" if zoned else None)).view(pa.timestamp("us"))
    texts = pc.replace_substring(plain.cast(pa.string()), " ", "T")
    if zoned:
        texts = pc.binary_join_element_wise(texts, "Z", "")
    return texts, _outside(plain.cast(pa.int64()), FIRST_MICROSECOND, LAST_MICROSECOND, place)


def _outside(numbers: pa.Array, first: int, last: int, place: str) -> dict[int, Refusal]:
    rows = _rows(pc.or_(pc.less(numbers, first), pc.greater(numbers, last)))
    return _refusals(rows, "time_out_of_range", f"{place} is not in the years 1 to 9999")


_LEAVES: tuple[tuple[tuple[type[DataType], ...], Callable[[pa.Array, str], Column]], ...] = (
    ((StringType,), _texts),
    ((DoubleType, FloatType), _floats),
    ((DecimalType,), _decimals),
    ((DateType, TimestampType, TimestampNTZType), _times),
)


def _rows(mask: pa.Array) -> list[int]:
    indices: list[int] = pc.indices_nonzero(pc.fill_null(mask, False)).to_pylist()
    return indices


def _refusals(rows: Iterable[int], reason: str, detail: str) -> dict[int, Refusal]:
    refusal = Refusal(reason, detail)
    return dict.fromkeys(rows, refusal)
