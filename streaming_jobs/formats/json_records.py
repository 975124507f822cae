"""The declared schema as classes of msgspec, which decodes a record straight into them and checks types on the way.

The fields of a class are called f0, f1, ... and renamed to the record's fields, so any name is possible that msgspec
finds in a record: all but those with a quote, a backslash or a control character.
"""

from __future__ import annotations

from typing import Annotated, Any, Optional

import msgspec
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructType,
)

INTEGER_BITS: dict[type[DataType], int] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}


def record_class(schema: StructType) -> type[msgspec.Struct]:
    """The class of a record: a field without a default is required, a nullable one is None if absent or null.

    Dates, times and text are strings here, decimals the bytes of their JSON: `json_columns.py` reads them by column.
    """
    fields: list[Any] = []
    for index, field in enumerate(schema.fields):
        wire = _wire(field.dataType, field.nullable)
        fields.append((attribute(index), wire, None) if field.nullable else (attribute(index), wire))
    names = {attribute(index): name for index, name in enumerate(schema.fieldNames())}
    # Without the garbage collector's list: records hold no cycles, and a block makes thousands at once.
    return msgspec.defstruct("Record", fields, rename=names, gc=False, kw_only=True)


def blank(record: type[msgspec.Struct]) -> msgspec.Struct:
    """A record with None in every field, required ones too: the row of a refused value."""
    return record(**dict.fromkeys(record.__struct_fields__))


def attribute(index: int) -> str:
    """The attribute of the schema's field at this index."""
    return f"f{index}"


def is_possible_name(name: str) -> bool:
    """False for a field name that msgspec cannot look for."""
    return not any(c in '"\\' or c < " " or "\ud800" <= c <= "\udfff" for c in name)


def _wire(kind: DataType, nullable: bool) -> Any:
    """The type that msgspec checks a value by."""
    if isinstance(kind, DecimalType):
        return msgspec.Raw  # any JSON; as a number it would lose digits, as a decimal a string would pass too
    wire = _required(kind)
    return Optional[wire] if nullable else wire  # noqa: UP045 - a type made while the program runs


def _required(kind: DataType) -> Any:
    if isinstance(kind, StructType):
        return record_class(kind)
    if isinstance(kind, ArrayType):
        return list[_wire(kind.elementType, kind.containsNull)]  # type: ignore[misc]
    if isinstance(kind, BooleanType):
        return bool
    if isinstance(kind, DoubleType | FloatType):
        return float
    bits = INTEGER_BITS.get(type(kind))
    if bits is not None:
        return Annotated[int, msgspec.Meta(ge=-(1 << bits - 1), le=(1 << bits - 1) - 1)]
    return str
