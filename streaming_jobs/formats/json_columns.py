"""Values that JSON has no type for, checked and cast a column at a time: dates, times, decimals, single floats.

Texts are joined and matched by one pattern. It accepts exactly the texts that Arrow's cast accepts, so the
cast never fails; single values are checked only if the whole does not match.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from streaming_jobs.formats.json_records import attribute

# Exact, leap years included, so that nothing is left for the cast to refuse.
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = (
    "(?!0000)(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_USUAL_DAY = f"(?=[12]){_DAY}"  # of a year that no zone moves out of 1 to 9999
_CLOCK = "T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_ZONE = "(?:Z|[+-](?:(?:0[0-9]|1[0-7]):[0-5][0-9]|18:00))"
_MICROSECONDS = "(?:[.][0-9]{1,6})?"
_NANOSECONDS = "(?:[.][0-9]{1,9})?"
FIRST_MICROSECOND, LAST_MICROSECOND = (
    (limit.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    for limit in (datetime.min, datetime.max)
)
"""The first and the last time that can be read, microseconds since 1970."""
FIRST_DAY, LAST_DAY = (micros // 86_400_000_000 for micros in (FIRST_MICROSECOND, LAST_MICROSECOND))
"""The same in days."""
_MAX_DIGITS = 38
_SHOWN = 40


class ValueFault(NamedTuple):
    """A value that is refused: its position in the column, the reason, the words, and the place below the column."""

    position: int
    reason: str
    words: str
    place: str = ""


class Built(NamedTuple):
    """A column and its faults; the column's value at a fault means nothing."""

    array: pa.Array
    faults: Sequence[ValueFault]


class Form:
    """A form of text, for one value and for many; its pattern matches no newline."""

    def __init__(self, pattern: str) -> None:
        self._one = re.compile(pattern)
        self._many = re.compile(f"(?:{pattern}\n)*+")

    def holds(self, texts: Sequence[str | None]) -> bool:
        there = texts if None not in texts else [text for text in texts if text is not None]
        lines = "\n".join([*there, ""])  # type: ignore[list-item]
        # The count: two lines in one text are not two texts.
        return self._many.fullmatch(lines) is not None and lines.count("\n") == len(there)

    def others(self, texts: Sequence[str | None]) -> list[int]:
        """The positions of the texts that are not of this form."""
        if self.holds(texts):
            return []
        matches = self._one.fullmatch
        return [position for position, text in enumerate(texts) if text is not None and not matches(text)]


@dataclass(frozen=True)
class TimeColumn:
    """A date or time as text, within the years 1 to 9999.

    `usual` is the form that Arrow casts as it is, in years that no zone moves out of these; `form` is all that is
    accepted. `zoned`: a time in UTC, from text in any zone.
    """

    name: str
    type: pa.DataType
    usual: Form
    form: Form
    zoned: bool = False

    checked = True

    def build(self, values: Sequence[str | None]) -> Built:
        """The times; a missing zone is UTC, and what is finer than a microsecond is cut off."""
        if self.usual.holds(values):
            return Built(pa.array(values, pa.string()).cast(self.type), ())
        bad = self.form.others(values)
        texts = pa.array(_without(values, bad), pa.string())
        texts = pc.replace_substring_regex(texts, pattern="([.][0-9]{6})[0-9]+", replacement=r"\1")
        if self.zoned:
            bare = pc.match_substring_regex(texts, f"{_CLOCK}{_MICROSECONDS}$")
            texts = pc.if_else(bare, pc.binary_join_element_wise(texts, "Z", ""), texts)
        times = texts.cast(self.type)
        if self.zoned:
            number = times.view(pa.int64())
            bad += pc.indices_nonzero(
                pc.or_(pc.less(number, FIRST_MICROSECOND), pc.greater(number, LAST_MICROSECOND))
            ).to_pylist()
        return Built(times, [wrong_value(position, self.name, str(values[position])) for position in bad])


@dataclass(frozen=True)
class DecimalColumn:
    """A decimal from the text of its JSON: digits that the type holds exactly, at most 38 of them as written."""

    precision: int
    scale: int
    required: bool

    checked = True

    @property
    def type(self) -> pa.DataType:
        return pa.decimal128(self.precision, self.scale)

    @cached_property
    def form(self) -> Form:
        """The form of accepted numbers: zeros may follow the declared digits, up to 38 in all."""
        whole = self.precision - self.scale
        digits = f"(?:0|[1-9][0-9]{{0,{whole - 1}}})" if whole else "0"
        fraction = f"(?=[0-9])[0-9]{{0,{self.scale}}}0{{0,{_MAX_DIGITS - self.scale}}}"
        return Form(f"-?{digits}(?:[.]{fraction})?")

    def build(self, values: Sequence[Any]) -> Built:
        """The decimals of msgspec's raw values; None and `null` are null."""
        written = [None if value is None else str(value, "utf-8") for value in values]
        missing: list[ValueFault] = []
        if "null" in written:
            nulls = [position for position, text in enumerate(written) if text == "null"]
            written = _without(written, nulls)
            if self.required:
                words = f"Expected `{self._name}`, got `null`"
                missing = [ValueFault(position, "missing_field", words) for position in nulls]
        array, faults = self.of_texts(written)
        return Built(array, [*missing, *faults])

    def of_texts(self, texts: Sequence[str | None]) -> Built:
        """The decimals of texts; None is null."""
        bad = self.form.others(texts)
        bad += [position for position, text in enumerate(texts) if text is not None and _is_too_long(text)]
        faults = [wrong_value(position, self._name, str(texts[position])) for position in bad]
        return Built(pa.array(_without(texts, bad) if bad else texts, pa.string()).cast(self.type), faults)

    @property
    def _name(self) -> str:
        return f"decimal({self.precision},{self.scale})"


@dataclass(frozen=True)
class FloatColumn:
    """A FLOAT: a number that msgspec has read as a double, rounded; refused if it does not fit."""

    checked = True

    @property
    def type(self) -> pa.DataType:
        return pa.float32()

    def build(self, values: Sequence[float | None]) -> Built:
        """The numbers; an overflow is a fault."""
        array = pa.array(values, pa.float32())
        infinite = np.flatnonzero(np.isinf(array.to_numpy(zero_copy_only=False)))
        return Built(array, [ValueFault(int(position), "wrong_type", "Number out of range") for position in infinite])


def date_column() -> TimeColumn:
    """A DATE: `2013-01-31`."""
    return TimeColumn("date", pa.date32(), Form(_DAY), Form(_DAY))


def timestamp_column() -> TimeColumn:
    """A TIMESTAMP: `2013-01-31T05:06:07`, with 1 to 9 digits of a second, and a zone of at most 18 hours."""
    usual = Form(f"{_USUAL_DAY}{_CLOCK}{_MICROSECONDS}{_ZONE}")
    form = Form(f"{_DAY}{_CLOCK}{_NANOSECONDS}{_ZONE}?")
    return TimeColumn("timestamp", pa.timestamp("us", "UTC"), usual, form, zoned=True)


def timestamp_ntz_column() -> TimeColumn:
    """A TIMESTAMP_NTZ: the same without a zone."""
    usual, form = (Form(f"{_DAY}{_CLOCK}{fraction}") for fraction in (_MICROSECONDS, _NANOSECONDS))
    return TimeColumn("timestamp_ntz", pa.timestamp("us"), usual, form)


def _without(texts: Sequence[str | None], positions: Sequence[int]) -> list[str | None]:
    """The texts with None at these positions."""
    rest = list(texts)
    for position in positions:
        rest[position] = None
    return rest


def _is_too_long(number: str) -> bool:
    """True for a number of more digits than any decimal has, without zeros in front."""
    return len(number) > _MAX_DIGITS and len(number.lstrip("-0.").replace(".", "")) > _MAX_DIGITS


def wrong_value(position: int, name: str, text: str) -> ValueFault:
    """The fault of a text that is none of a type."""
    shown = ascii(text[:_SHOWN]) + ("..." if len(text) > _SHOWN else "")
    return ValueFault(position, "wrong_type", f"Expected `{name}`, got {shown}")


# Arrow columns from decoded records, one class per shape of column.
#
# `checked` is true of a column in which values can still be refused; other columns have no faults.

_PLAIN: dict[type[DataType], pa.DataType] = {
    BooleanType: pa.bool_(),
    ByteType: pa.int8(),
    ShortType: pa.int16(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    DoubleType: pa.float64(),
    StringType: pa.string(),
}
_TIMES: dict[type[DataType], JsonColumn] = {
    DateType: date_column(),
    TimestampType: timestamp_column(),
    TimestampNTZType: timestamp_ntz_column(),
}


class JsonColumn(Protocol):
    """The way from decoded values to an Arrow array."""

    @property
    def type(self) -> pa.DataType:
        """The type in Arrow, nullable at every depth."""

    @property
    def checked(self) -> bool:
        """False if every decoded value is good."""

    def build(self, values: Sequence[Any]) -> Built:
        """The values as an array, and the faults among them."""


@dataclass(frozen=True)
class PlainColumn:
    """Values that Arrow takes as they are: numbers, text, booleans, arrays of them."""

    type: pa.DataType

    checked = False

    def build(self, values: Sequence[Any]) -> Built:
        """The array; it has no faults."""
        return Built(pa.array(values, self.type), ())


@dataclass(frozen=True)
class StructColumn:
    fields: Sequence[tuple[str, JsonColumn]]

    @cached_property
    def type(self) -> pa.DataType:
        return pa.struct([(name, column.type) for name, column in self.fields])

    @cached_property
    def checked(self) -> bool:
        return any(column.checked for _, column in self.fields)

    def build(self, values: Sequence[Any]) -> Built:
        """The structs, field by field; a null one is null in all of them."""
        null = [value is None for value in values]
        arrays, faults = [], []
        for index, (name, column) in enumerate(self.fields):
            inner = attrgetter(attribute(index))
            array, wrong = column.build([None if value is None else inner(value) for value in values])
            arrays.append(array)
            faults += [fault._replace(place=f".{name}{fault.place}") for fault in wrong]
        return Built(
            pa.StructArray.from_arrays(arrays, fields=list(self.type), mask=pa.array(null, pa.bool_())), faults
        )


@dataclass(frozen=True)
class ListColumn:
    """Arrays of objects, or of values that are checked."""

    element: JsonColumn

    @cached_property
    def type(self) -> pa.DataType:
        """A list, whose element is called as Spark calls it."""
        return _list_of(self.element)

    @cached_property
    def checked(self) -> bool:
        return self.element.checked

    def build(self, values: Sequence[Any]) -> Built:
        """The lists: their elements as one column, and where each list begins in it."""
        begins = list(accumulate((len(value) if value else 0 for value in values), initial=0))
        array, wrong = self.element.build(list(chain.from_iterable(value for value in values if value)))
        null = pa.array([value is None for value in values], pa.bool_())
        lists = pa.ListArray.from_arrays(pa.array(begins, pa.int32()), array, type=self.type, mask=null)
        faults = []
        for fault in wrong:
            row = bisect_right(begins, fault.position) - 1
            place = f"[{fault.position - begins[row]}]{fault.place}"
            faults.append(fault._replace(position=row, place=place))
        return Built(lists, faults)


def column_of(kind: DataType, nullable: bool) -> JsonColumn:
    if isinstance(kind, StructType):
        return StructColumn([(field.name, field_column(field)) for field in kind.fields])
    if isinstance(kind, ArrayType):
        element = column_of(kind.elementType, kind.containsNull)
        return PlainColumn(_list_of(element)) if isinstance(element, PlainColumn) else ListColumn(element)
    if isinstance(kind, DecimalType):
        return DecimalColumn(kind.precision, kind.scale, required=not nullable)
    if isinstance(kind, FloatType):
        return FloatColumn()
    time = _TIMES.get(type(kind))
    return time if time is not None else PlainColumn(_PLAIN[type(kind)])


def field_column(field: StructField) -> JsonColumn:
    return column_of(field.dataType, field.nullable)


def _list_of(element: JsonColumn) -> pa.DataType:
    return pa.list_(pa.field("element", element.type))
