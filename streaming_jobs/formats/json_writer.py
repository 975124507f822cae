"""Rows as JSON values: what the declaration's own reader reads back equal, and nothing else.

Every field of the schema is in every record, null where it may be. Numbers are JSON numbers, decimals with all digits
of their scale; dates and times are text: `2013-01-31`, `2013-01-31T05:06:07.000001Z`, TIMESTAMP_NTZ without the zone.
A row that the reader would refuse is refused here: a null in a required field, a number that is not finite, a text that
is not UTF-8, a year before 1 or after 9999.

The texts of a column are made by Arrow at once, as far as its type allows, and joined to records by Arrow too: a third
of the time of encoding row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from streaming_jobs.declare.format import Refusal, Written
from streaming_jobs.formats.json_columns import FIRST_DAY, FIRST_MICROSECOND, LAST_DAY, LAST_MICROSECOND

# Columns as JSON's Python values, with a refusal of each row that the reader would refuse.


@dataclass
class WrittenColumn:
    """The JSON values of a column, and the refusals of its rows by their index."""

    values: Sequence[Any]
    refused: dict[int, Refusal]


def _records(schema: StructType, arrays: Sequence[pa.Array], rows: int, place: str) -> WrittenColumn:
    """The rows of these fields as dictionaries; `place` is that of the struct, with a dot after it."""
    names = schema.fieldNames()
    refused: dict[int, Refusal] = {}
    columns = []
    for declared, array in zip(schema.fields, arrays, strict=True):
        column = column_values(declared.dataType, array, f"{place}{declared.name}")
        missing = {} if declared.nullable else missing_values(array, f"{place}{declared.name}")
        refused = {**column.refused, **missing, **refused}
        columns.append(column.values)
    if not columns:
        return WrittenColumn([{} for _ in range(rows)], refused)
    return WrittenColumn([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)], refused)


def missing_values(array: pa.Array, place: str) -> dict[int, Refusal]:
    """The refusals of the rows that are null in a column that the schema requires."""
    nulls = _rows(pc.is_null(array)) if array.null_count else []
    return _refusals(nulls, "missing_field", f"{place} is null, and the topic's schema requires it")


def column_values(kind: DataType, array: pa.Array, place: str) -> WrittenColumn:
    """The values of a column; `place` names it in refusals."""
    if isinstance(kind, StructType):
        return _structs(kind, array, place)
    if isinstance(kind, ArrayType):
        return _lists(kind, array, place)
    for types, convert in _LEAVES:
        if isinstance(kind, types):
            return convert(array, place)
    return WrittenColumn(array.to_pylist(), {})


def _structs(kind: StructType, array: pa.Array, place: str) -> WrittenColumn:
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
    return WrittenColumn(values, {rows[index]: refusal for index, refusal in written.refused.items()})


def _lists(kind: ArrayType, array: pa.Array, place: str) -> WrittenColumn:
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
    return WrittenColumn(values, refused)


def _texts(array: pa.Array, place: str) -> WrittenColumn:
    try:
        return WrittenColumn(array.to_pylist(), {})
    except UnicodeDecodeError:
        values, refused = [], {}
        for row, value in enumerate(array.cast(pa.binary()).to_pylist()):
            try:
                values.append(None if value is None else value.decode())
            except UnicodeDecodeError:
                values.append(None)
                refused[row] = Refusal("not_utf8", f"the text of {place} is not UTF-8")
        return WrittenColumn(values, refused)


def _floats(array: pa.Array, place: str) -> WrittenColumn:
    values = array.to_pylist()
    bad = [row for row, value in enumerate(values) if value is not None and not math.isfinite(value)]
    return WrittenColumn(values, _refusals(bad, "not_finite", f"{place} is not a finite number, and JSON has no other"))


def _decimals(array: pa.Array, place: str) -> WrittenColumn:  # noqa: ARG001 - every decimal can be written
    return WrittenColumn(
        [None if value is None else msgspec.Raw(f"{value:f}".encode()) for value in array.to_pylist()], {}
    )


def _times(array: pa.Array, place: str) -> WrittenColumn:
    texts, refused = time_texts(array, place)
    return WrittenColumn(texts.to_pylist(), refused)


def time_texts(array: pa.Array, place: str) -> tuple[pa.Array, dict[int, Refusal]]:
    """Dates or times as JSON texts, and the refusals of values without a text."""
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


_LEAVES: tuple[tuple[tuple[type[DataType], ...], Callable[[pa.Array, str], WrittenColumn]], ...] = (
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


_ENCODE = msgspec.json.Encoder().encode
_ESCAPED = bytes(range(0x20)) + b'"\\'
"""The bytes that a text of JSON cannot hold as they are."""


@dataclass(frozen=True)
class _Texts:
    """The JSON texts of a column, one a row, without the `quotes` around each of them."""

    texts: pa.Array
    quotes: str = ""
    refused: Mapping[int, Refusal] = field(default_factory=dict)


class JsonWriter:
    """A writer of rows by one schema; it belongs to one process."""

    def __init__(self, schema: StructType) -> None:
        self._schema = schema
        self._names = [_ENCODE(name).decode() for name in schema.fieldNames()]

    def write(self, rows: pa.RecordBatch) -> Written:
        """The value of each row; `rows` has the schema's fields."""
        if not self._names or not rows.num_rows:
            return Written([b"{}"] * rows.num_rows, {})
        refused: dict[int, Refusal] = {}
        parts: list[Any] = []
        literal = "{"
        for name, each in zip(self._names, self._schema.fields, strict=True):
            array = rows.column(each.name)
            column = _column(each.dataType, array, each.name)
            missing = {} if each.nullable else missing_values(array, each.name)
            refused = {**column.refused, **missing, **refused}
            parts += [f"{literal}{name}:{column.quotes}", column.texts]
            literal = f"{column.quotes},"
        values: list[bytes | None] = (
            pc.binary_join_element_wise(*parts, f"{literal[:-1]}}}", "").cast(pa.binary()).to_pylist()
        )
        for row in refused:
            values[row] = None
        return Written(values, refused)


def _column(kind: DataType, array: pa.Array, place: str) -> _Texts:
    for types, texts in _QUICK:
        if isinstance(kind, types) and (made := texts(array, place)) is not None:
            return made
    column = column_values(kind, array, place)
    return _Texts(pa.array([_ENCODE(value) for value in column.values], pa.string()), refused=column.refused)


def _plain(array: pa.Array, place: str) -> _Texts:  # noqa: ARG001 - of every column
    return _Texts(array.cast(pa.string()).fill_null("null"))


def _numbers(array: pa.Array, place: str) -> _Texts:
    """Fractions: the shortest text that reads back equal; no number's text has a comma."""
    column = column_values(DoubleType(), array, place)
    return _Texts(pa.array(_ENCODE(column.values)[1:-1].split(b","), pa.string()), refused=column.refused)


def _strings(array: pa.Array, place: str) -> _Texts | None:  # noqa: ARG001 - of every column
    """None if a text needs escapes, or is not UTF-8."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return None
    content = _content(array)
    return _quoted(array) if len(content.translate(None, _ESCAPED)) == len(content) else None


def _time_texts(array: pa.Array, place: str) -> _Texts:
    texts, refused = time_texts(array, place)
    return replace(_quoted(texts), refused=refused)


def _quoted(texts: pa.Array) -> _Texts:
    if not texts.null_count:
        return _Texts(texts, '"')
    return _Texts(pc.binary_join_element_wise('"', texts, '"', "").fill_null("null"))


def _content(array: pa.Array) -> bytes:
    """The bytes of all texts; between them may lie bytes of rows that are null."""
    _, offsets, data = array.buffers()
    if data is None or offsets is None:
        return b""
    places = memoryview(offsets).cast("q" if pa.types.is_large_string(array.type) else "i")
    return bytes(memoryview(data)[places[array.offset] : places[array.offset + len(array)]])


_QUICK: tuple[tuple[tuple[type[DataType], ...], Callable[[pa.Array, str], _Texts | None]], ...] = (
    ((StringType,), _strings),
    ((IntegralType, BooleanType), _plain),
    ((DoubleType, FloatType), _numbers),
    ((DateType, TimestampType, TimestampNTZType), _time_texts),
)
