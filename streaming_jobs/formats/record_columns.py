"""Arrow columns from decoded records, one class per shape of column.

`checked` is true of a column in which values can still be refused; the others cannot have faults any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, Protocol

import pyarrow as pa
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
from streaming_jobs.formats.text_values import (
    Built,
    DecimalColumn,
    FloatColumn,
    date_column,
    timestamp_column,
    timestamp_ntz_column,
)

_PLAIN: dict[type[DataType], pa.DataType] = {
    BooleanType: pa.bool_(),
    ByteType: pa.int8(),
    ShortType: pa.int16(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    DoubleType: pa.float64(),
    StringType: pa.string(),
}
_TIMES: dict[type[DataType], Column] = {
    DateType: date_column(),
    TimestampType: timestamp_column(),
    TimestampNTZType: timestamp_ntz_column(),
}


class Column(Protocol):
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
    """Inner objects."""

    fields: Sequence[tuple[str, Column]]

    @cached_property
    def type(self) -> pa.DataType:
        """A struct."""
        return pa.struct([(name, column.type) for name, column in self.fields])

    @cached_property
    def checked(self) -> bool:
        """True if a field is."""
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

    element: Column

    @cached_property
    def type(self) -> pa.DataType:
        """A list, whose element is called as Spark calls it."""
        return _list_of(self.element)

    @cached_property
    def checked(self) -> bool:
        """True if the element is."""
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


def column_of(kind: DataType, nullable: bool) -> Column:
    """The column of a declared type."""
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


def field_column(field: StructField) -> Column:
    """The column of a declared field."""
    return column_of(field.dataType, field.nullable)


def _list_of(element: Column) -> pa.DataType:
    return pa.list_(pa.field("element", element.type))
