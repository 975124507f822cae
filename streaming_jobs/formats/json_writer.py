"""Rows as JSON values: what the declaration's own reader reads back equal, and nothing else.

Every field of the schema is in every record, null where it may be. Numbers are JSON numbers, decimals with all digits
of their scale; dates and times are text: `2013-01-31`, `2013-01-31T05:06:07.000001Z`, TIMESTAMP_NTZ without the zone.
A row that the reader would refuse is refused here: a null in a required field, a number that is not finite, a text that
is not UTF-8, a year before 1 or after 9999.

The texts of a column are made by Arrow at once, as far as its type allows, and joined to records by Arrow too: a third
of the time of encoding row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegralType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from streaming_jobs.formats.json_values import column_values, missing_values, time_texts
from streaming_jobs.record_format import Refusal, Written

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


def _times(array: pa.Array, place: str) -> _Texts:
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
    ((DateType, TimestampType, TimestampNTZType), _times),
)
