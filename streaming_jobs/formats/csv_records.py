"""Reading and writing of separated values, a block at a time.

A block without quotes, whose records all have the declared number of fields, is split at once. Of any other block each
record is split by itself (`_Judge`), which decides, and words the refusal. Types are then checked by column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    StringType,
    StructField,
    TimestampNTZType,
    TimestampType,
)

from streaming_jobs.declare.format import Block, Refusal, Written, checked_fields, record_batch, with_null_rows
from streaming_jobs.formats.json_columns import (
    Built,
    DecimalColumn,
    FloatColumn,
    Form,
    PlainColumn,
    ValueFault,
    field_column,
    wrong_value,
)
from streaming_jobs.formats.json_records import INTEGER_BITS
from streaming_jobs.formats.json_writer import column_values, missing_values
from streaming_jobs.formats.utf8 import joined, not_utf8

if TYPE_CHECKING:
    from streaming_jobs.formats.csv import Csv

Texts = Sequence[str | None]
"""The texts of a field, by record; None is null."""

_EMPTY = Refusal("empty_value", "the value is null, or has no character")
_OPEN = Refusal("malformed_csv", "a quoted field has no end")
_AFTER_QUOTE = Refusal("malformed_csv", "a quoted field is followed by more than a delimiter")
_INNER_QUOTE = Refusal("malformed_csv", "a field without quotes has one in it")
_LINES = Refusal("malformed_csv", "the value has several lines; a line's end belongs into quotes")


class CsvReader:
    """The reader of one declaration. It checks all fields, and builds only requested ones."""

    def __init__(self, declared: Csv, fields: Sequence[str] | None) -> None:
        self._names = checked_fields(declared.schema, fields)
        self._fields = declared.schema.fields
        self._judge = _Judge(declared)
        self._columns = [_text_column(field) for field in self._fields]

    def read(self, values: Sequence[bytes | None]) -> Block:
        """Decode the values."""
        refused = dict(not_utf8(values, joined(values)))
        texts = [None if value is None or index in refused else value.decode() for index, value in enumerate(values)]
        columns = self._judge.at_once(texts) or self._one_by_one(texts, refused)
        built: dict[str, pa.Array] = {}
        for field, column, content in zip(self._fields, self._columns, columns, strict=True):
            array, faults = column(content)
            if field.name in self._names:
                built[field.name] = array
            if not field.nullable and None in content:
                missing = Refusal("missing_field", f"the field is null, and required - at `$.{field.name}`")
                for row in (row for row, text in enumerate(content) if text is None):
                    refused.setdefault(row, missing)
            for fault in faults:
                refused.setdefault(fault.position, Refusal(fault.reason, f"{fault.words} - at `$.{field.name}`"))
        return Block(with_null_rows(record_batch(len(values), built), refused), refused)

    def _one_by_one(self, texts: Texts, refused: dict[int, Refusal]) -> Sequence[Texts]:
        """The fields by column; None in each column for a record that is refused."""
        rows: list[Texts] = []
        none: Texts = [None] * len(self._fields)
        for row, text in enumerate(texts):
            split = none if row in refused else self._judge.split(text)
            if isinstance(split, Refusal):
                refused[row] = split
            rows.append(none if isinstance(split, Refusal) else split)
        return list(zip(*rows, strict=True)) if rows else [[] for _ in self._fields]


class _Judge:
    """Splits records into fields."""

    def __init__(self, declared: Csv) -> None:
        self._delimiter, self._quote, self._null = declared.delimiter, declared.quote, declared.null
        self._count = len(declared.schema.fields)
        self._special = "\r\n" + (declared.quote or "")

    def at_once(self, texts: Texts) -> Sequence[Texts] | None:
        """The fields by column; None for a block in which not every record is a plain one."""
        if not texts or None in texts or "" in texts:
            return None
        block = self._delimiter.join(texts)  # type: ignore[arg-type]
        if any(sign in block for sign in self._special):
            return None
        if set(map(methodcaller("count", self._delimiter), texts)) != {self._count - 1}:
            return None
        fields = block.split(self._delimiter)
        return [self._with_nulls(fields[place :: self._count]) for place in range(self._count)]

    def split(self, text: str | None) -> Texts | Refusal:
        """The fields of one record."""
        if not text or (line := _line(text)) == "":
            return _EMPTY
        if self._quote is None or self._quote not in line:
            if "\n" in line or "\r" in line:
                return _LINES
            return self._counted(self._with_nulls(line.split(self._delimiter)))
        fields: list[str | None] = []
        rest: str | None = line
        while rest is not None:
            part = self._quoted(rest) if rest.startswith(self._quote) else self._plain(rest)
            if isinstance(part, Refusal):
                return part
            field, rest = part
            fields.append(field)
        return self._counted(fields)

    def _quoted(self, rest: str) -> tuple[str, str | None] | Refusal:
        """The field in quotes with which the rest begins, and what comes after the delimiter; None at the end."""
        quote, end = str(self._quote), 1
        while (end := rest.find(quote, end)) >= 0 and rest.startswith(quote, end + 1):
            end += 2
        if end < 0:
            return _OPEN
        field, after = rest[1:end].replace(2 * quote, quote), rest[end + 1 :]
        if not after:
            return field, None
        return (field, after[1:]) if after.startswith(self._delimiter) else _AFTER_QUOTE

    def _plain(self, rest: str) -> tuple[str | None, str | None] | Refusal:
        field, delimiter, after = rest.partition(self._delimiter)
        if str(self._quote) in field:
            return _INNER_QUOTE
        if "\n" in field or "\r" in field:
            return _LINES
        return (None if field == self._null else field), (after if delimiter else None)

    def _with_nulls(self, fields: Sequence[str]) -> Texts:
        return [None if field == self._null else field for field in fields] if self._null in fields else fields

    def _counted(self, fields: Texts) -> Texts | Refusal:
        if len(fields) == self._count:
            return fields
        return Refusal("field_count", f"Expected {self._count} fields, got {len(fields)}")


def _line(text: str) -> str:
    """The text without the line's end that may follow it."""
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


# Columns of texts: what a declared type accepts.

_INTEGER = Form("-?[0-9]+")
_NUMBER = Form("-?(?:[0-9]+(?:[.][0-9]*)?|[.][0-9]+)(?:[eE][+-]?[0-9]+)?")
_BOOLEAN = Form("(?i:true|false)")
_LONGEST = 40
"""Characters of an integer that may fit, zeros in front included."""


class TextColumn(Protocol):
    def __call__(self, texts: Texts, /) -> Built:
        """The column of these texts, and its faults."""


def _text_column(field: StructField) -> TextColumn:
    kind = field.dataType
    if isinstance(kind, DecimalType):
        return DecimalColumn(kind.precision, kind.scale, required=False).of_texts
    if isinstance(kind, BooleanType):
        return _booleans
    if isinstance(kind, DoubleType | FloatType):
        return _floats(kind)
    if (bits := INTEGER_BITS.get(type(kind))) is not None:
        return _integers(kind, bits)
    return field_column(field).build


def _converted(
    texts: Texts, form: Form, name: str, convert: Callable[[str], Any]
) -> tuple[list[Any], list[ValueFault]]:
    """The values of texts of a form, None for others, and the faults."""
    bad = form.others(texts)
    faults = [wrong_value(row, name, str(texts[row])) for row in bad]
    if not bad and None not in texts:
        return list(map(convert, texts)), []  # type: ignore[arg-type]
    without = set(bad)
    return [None if text is None or row in without else convert(text) for row, text in enumerate(texts)], faults


def _booleans(texts: Texts) -> Built:
    values, faults = _converted(texts, _BOOLEAN, "boolean", lambda text: text.lower() == "true")
    return Built(pa.array(values, pa.bool_()), faults)


def _integers(kind: DataType, bits: int) -> TextColumn:
    least, most = -(1 << bits - 1), (1 << bits - 1) - 1
    arrow = pa.int64() if bits == 64 else {8: pa.int8(), 16: pa.int16(), 32: pa.int32()}[bits]

    def convert(text: str) -> int:
        return int(text) if len(text) <= _LONGEST else most + 1

    def build(texts: Texts) -> Built:
        values, faults = _converted(texts, _INTEGER, kind.simpleString(), convert)
        try:
            return Built(pa.array(values, arrow), faults)
        except (OverflowError, pa.ArrowInvalid):
            large = [row for row, value in enumerate(values) if value is not None and not least <= value <= most]
            for row in large:
                values[row] = None
            faults += [wrong_value(row, kind.simpleString(), str(texts[row])) for row in large]
            return Built(pa.array(values, arrow), faults)

    return build


def _floats(kind: DataType) -> TextColumn:
    column = FloatColumn() if isinstance(kind, FloatType) else PlainColumn(pa.float64())

    def build(texts: Texts) -> Built:
        values, faults = _converted(texts, _NUMBER, kind.simpleString(), float)
        infinite = [row for row, value in enumerate(values) if value is not None and math.isinf(value)]
        faults += [wrong_value(row, kind.simpleString(), str(texts[row])) for row in infinite]
        array, wrong = column.build(values)
        return Built(array, [*faults, *wrong])

    return build


# Writing: what the declaration's own reader reads back equal, and nothing else.


@dataclass(frozen=True)
class CsvWriter:
    """A writer of rows by one declaration; it belongs to one process."""

    declared: Csv

    def write(self, rows: pa.RecordBatch) -> Written:
        """The value of each row; a row that could not be read back is refused."""
        refused: dict[int, Refusal] = {}
        columns: list[Texts] = []
        for field in self.declared.schema.fields:
            array = rows.column(field.name)
            texts, faults = _texts_of(field.dataType, array, field.name)
            missing = {} if field.nullable else missing_values(array, field.name)
            refused = {**faults, **missing, **refused}
            columns.append(self._fields(texts, field, refused))
        values: list[bytes | None] = []
        for row, fields in enumerate(zip(*columns, strict=True)):
            line = self.declared.delimiter.join(field or "" for field in fields)
            if not line and row not in refused:
                refused[row] = Refusal("empty_value", "the row is a line of no character, which has no record")
            values.append(None if row in refused else line.encode())
        return Written(values, refused)

    def _fields(self, texts: Texts, field: StructField, refused: dict[int, Refusal]) -> Texts:
        """The texts as fields of a line: in quotes where that is needed, `null` for null."""
        delimiter, quote, null = self.declared.delimiter, self.declared.quote, self.declared.null
        special = re.compile(f"[\r\n{re.escape(delimiter)}{re.escape(quote or '')}]")
        fields: list[str] = []
        for row, text in enumerate(texts):
            if text is None:
                fields.append(null)
            elif text != null and not special.search(text):
                fields.append(text)
            elif quote is not None:
                fields.append(f"{quote}{text.replace(quote, 2 * quote)}{quote}")
            else:
                refused.setdefault(row, Refusal("needs_quotes", f"{field.name} cannot be written without quotes"))
                fields.append("")
        return fields


def _texts_of(kind: DataType, array: pa.Array, place: str) -> tuple[Texts, dict[int, Refusal]]:
    """The texts of a column, and the refusals of rows without one."""
    column = column_values(kind, array, place)
    if isinstance(kind, (StringType, DateType, TimestampType, TimestampNTZType)):
        return column.values, column.refused
    if isinstance(kind, DecimalType):
        return [None if value is None else f"{value:f}" for value in array.to_pylist()], {}
    if isinstance(kind, DoubleType | FloatType):
        return [None if value is None else repr(value) for value in column.values], column.refused
    return pc.cast(array, pa.string()).to_pylist(), {}
