"""JSON records with a declared schema: every record is decoded completely or refused.

    Json(StructType([StructField("id", LongType(), nullable=False), StructField("note", StringType())]))

One reading decides and words the refusal: `json_reader.py`. docs/json.md has the table of verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    StructType,
    TimestampNTZType,
    TimestampType,
)

from streaming_jobs.declare.format import DeclaredFormat, Refused
from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.errors import UsageError
from streaming_jobs.formats.json_records import is_possible_name

if TYPE_CHECKING:
    from streaming_jobs.formats.json_reader import JsonReader
    from streaming_jobs.formats.json_writer import JsonWriter

REASONS = frozenset(
    {
        "empty_value",
        "invalid_utf8",
        "malformed_json",
        "missing_field",
        "not_an_object",
        "trailing_data",
        "unreadable",
        "wrong_type",
    }
)
"""Every reason of a refusal."""

LEAVES = (
    BooleanType,
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    FloatType,
    DoubleType,
    DecimalType,
    DateType,
    TimestampType,
    TimestampNTZType,
)
_NEXT = "use boolean, integer, float, double, decimal, date, timestamp or plain string, and structs and arrays of them"


@dataclass(frozen=True, init=False)
class Json(DeclaredFormat):
    """One JSON object per record, read by `schema`; `nullable=False` means required. Unknown fields are ignored.

    A mapping of names to types becomes a schema: `Json({"id": "bigint not null", "note": "string"})`.

    Raises UsageError for a type that JSON has no strict reading for, for names that differ only in case, and for
    names with a quote, a backslash or a control character.
    """

    schema: StructType

    def __init__(self, schema: StructType | Mapping[str, object]) -> None:
        object.__setattr__(self, "schema", schema_of(schema))
        _check(self.schema, "the record")

    @property
    def reasons(self) -> frozenset[str]:
        """Every reason for which a record can be refused."""
        return REASONS

    def reader(self, fields: Sequence[str] | None = None) -> JsonReader:
        """A reader that validates every record whole, and builds the columns of these top-level fields; None: all.

        Raises UsageError for a name that is not a field.
        """
        from streaming_jobs.formats.json_reader import JsonReader  # here: a declaration needs no Arrow

        return JsonReader(self.schema, fields)

    def writer(self) -> JsonWriter:
        """A writer of rows whose values `reader` reads back equal."""
        from streaming_jobs.formats.json_writer import JsonWriter

        return JsonWriter(self.schema)

    def diagnose(self, value: bytes | None) -> tuple[str, str]:
        """Reason and detail of the refusal of these bytes."""
        try:
            self.read(value)
        except Refused as refused:
            return refused.reason, refused.detail
        return "unreadable", "it was refused, but the strict reading finds nothing wrong"


def _check(kind: DataType, where: str) -> None:
    if isinstance(kind, StructType):
        impossible = [name for name in kind.fieldNames() if not is_possible_name(name)]
        if impossible:
            raise UsageError(
                f"{where} has the field name {impossible[0]!a}",
                "use names without quotes, backslashes and control characters",
            )
        names = [name.lower() for name in kind.fieldNames()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"{where} has several fields named {twice}", "names that differ only in case are one")
        if not names:
            raise UsageError(f"{where} declares no field")
        for field in kind.fields:
            _check(field.dataType, f"field '{field.name}'")
    elif isinstance(kind, ArrayType):
        _check(kind.elementType, f"an element of {where}")
    elif not (isinstance(kind, LEAVES) or kind == StringType()):
        raise UsageError(f"{where} is {kind.simpleString()}, which JSON records cannot have here", _NEXT)
