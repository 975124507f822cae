"""JSON records with a declared schema: every record is decoded whole or refused, and never half of it.

    Json(StructType([StructField("id", LongType(), nullable=False), StructField("note", StringType())]))

Two halves give the same verdict. `json_columns` decides in Spark, in native expressions, for every record;
`json_reading` decides in Python, for the refused ones, and says why. docs/json.md has the table of verdicts.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    StructType,
    TimestampNTZType,
    TimestampType,
)

from streaming_jobs.errors import UsageError
from streaming_jobs.formats.json_reading import END_MARK, REASONS, Refused, read_record

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REQUIRED_CONF = {
    # A time without a zone is UTC.
    "spark.sql.session.timeZone": "UTC",
    # Spark's default: a filter on a decoded field must not move below the decoding, which would then run twice.
    "spark.sql.optimizer.avoidDoubleFilterEval": "true",
    # Of two fields with one name the last one wins, inside a VARIANT too.
    "spark.sql.variant.allowDuplicateKeys": "true",
}
"""Session properties that `Json.decode` relies on; it refuses a session that has others."""

_LEAVES = (
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


@dataclass(frozen=True)
class Json:
    """One JSON object per record, read by `schema`; `nullable=False` means required. Unknown fields are ignored.

    Raises UsageError for a type that JSON has no strict reading for, and for names that differ only in case.
    """

    schema: StructType

    def __post_init__(self) -> None:
        if END_MARK in self.schema.fieldNames():
            raise UsageError(f"{END_MARK!r} is a reserved name", "name the field otherwise")
        _check(self.schema, "the record")

    def decode(self, frame: DataFrame, value: str) -> DataFrame:
        """Add `_record` and `_bad`. A null value is bad; `_record` means something only where `_bad` is false."""
        from streaming_jobs.formats.json_columns import add_record

        session = frame.sparkSession.conf
        for name, wanted in REQUIRED_CONF.items():
            current = str(session.get(name))
            if current != wanted:
                raise UsageError(f"{name} is '{current}', JSON is decoded with '{wanted}'", f"set {name}={wanted}")
        return add_record(self.schema, frame, value)

    @property
    def reasons(self) -> frozenset[str]:
        """Every reason for which a record can be refused."""
        return REASONS

    def read(self, value: bytes | None) -> dict[str, Any]:
        """The record in these bytes as Python values; raises an error with `reason` and `detail`. Needs no Spark."""
        return read_record(self.schema, value)

    def diagnose(self, value: bytes | None) -> tuple[str, str]:
        """Reason and detail of the refusal of these bytes; never raises. Needs no Spark."""
        try:
            read_record(self.schema, value)
        except Refused as refused:
            return refused.reason, refused.detail
        except Exception as error:  # noqa: BLE001 (a dead letter without words is better than a stopped stream)
            return "unreadable", f"reading it again failed: {type(error).__name__}"
        return "unreadable", "Spark refused it, but a strict reading finds nothing wrong"


def _check(kind: DataType, where: str) -> None:
    if isinstance(kind, StructType):
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
    elif not (isinstance(kind, _LEAVES) or kind == StringType()):
        raise UsageError(f"{where} is {kind.simpleString()}, which JSON records cannot have here", _NEXT)
