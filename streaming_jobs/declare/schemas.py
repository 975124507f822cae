"""A schema from plain Python, without Spark: `{"id": "bigint not null", "legs": ["int"], "place": {"x": "double"}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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

from streaming_jobs.errors import UsageError
from streaming_jobs.text.spelling import instead

if TYPE_CHECKING:
    import pyarrow as pa

_KINDS: tuple[type[DataType], ...] = (
    BooleanType,
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    FloatType,
    DoubleType,
    DecimalType,
    StringType,
    DateType,
    TimestampType,
    TimestampNTZType,
)
_TYPES = {name: kind for kind in _KINDS for name in (kind().simpleString(), kind.typeName())}
"""By the two names that Spark has for each: `bigint` and `long`."""
_DECIMAL = re.compile(r"decimal\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_ARRAY = re.compile(r"array<(.+)>", re.DOTALL)
_REQUIRED = re.compile(r"\s+not\s+null$")


def schema_of(declared: object) -> StructType:
    """The schema as it is, or of a mapping of names to types; raises UsageError for anything else."""
    if isinstance(declared, StructType):
        return declared
    if not isinstance(declared, Mapping):
        raise UsageError(
            f"{declared!r} is no schema of records",
            "write a StructType, or a mapping such as {'id': 'bigint not null', 'note': 'string'}",
        )
    return StructType([_field(str(name), kind) for name, kind in declared.items()])


def _field(name: str, declared: object) -> StructField:
    text = declared.strip().lower() if isinstance(declared, str) else declared
    if isinstance(text, str) and (required := _REQUIRED.search(text)):
        return StructField(name, _type(name, text[: required.start()]), nullable=False)
    return StructField(name, _type(name, text))


def _type(name: str, declared: object) -> DataType:
    if isinstance(declared, DataType):
        return declared
    if isinstance(declared, type) and issubclass(declared, DataType):
        return declared()
    if isinstance(declared, Mapping):
        return schema_of(declared)
    if isinstance(declared, list) and len(declared) == 1:
        return ArrayType(_type(name, declared[0]))
    text = str(declared).strip().lower()
    if decimal := _DECIMAL.fullmatch(text):
        return DecimalType(int(decimal[1]), int(decimal[2]))
    if array := _ARRAY.fullmatch(text):
        return ArrayType(_type(name, array[1]))
    if not isinstance(declared, str) or text not in _TYPES:
        raise UsageError(f"field '{name}' has the type {declared!r}, which is unknown", instead(text, _TYPES))
    return _TYPES[text]()


def nullable(kind: DataType) -> Any:
    """The type with nulls allowed at every depth: a refused record has none of its fields."""
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, nullable(field.dataType)) for field in kind.fields])
    return ArrayType(nullable(kind.elementType)) if isinstance(kind, ArrayType) else kind


def arrow_struct(schema: StructType) -> pa.StructType:
    """Arrow's type of decoded records, with nulls allowed at every depth."""
    from pyspark.sql.pandas.types import to_arrow_type  # here: a declaration needs no Arrow

    return to_arrow_type(nullable(schema), timezone="UTC")
