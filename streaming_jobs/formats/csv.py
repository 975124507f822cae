"""Records of separated values: one line per record, without a header line, its fields by their place.

    Csv({"id": "bigint not null", "note": "string", "at": "timestamp"}, delimiter=";")

docs/csv.md has the rules and the verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.types import StringType, StructType

from streaming_jobs.declare.format import DeclaredFormat
from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.errors import UsageError
from streaming_jobs.formats.json import LEAVES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streaming_jobs.formats.csv_records import CsvReader, CsvWriter

REASONS = frozenset({"empty_value", "field_count", "invalid_utf8", "malformed_csv", "missing_field", "wrong_type"})
"""Every reason of a refusal."""


@dataclass(frozen=True, init=False)
class Csv(DeclaredFormat):
    """One record of separated values, read by `schema`: as many fields, in its order; `nullable=False` means required.

    A field may be in quotes: `quote`, doubled within; None: quotes are letters like others. `null`: a field with this
    text is null, unless it is in quotes. Raises UsageError for a type that is not one text, and for options that
    contradict each other.
    """

    schema: StructType
    delimiter: str = ","
    quote: str | None = '"'
    null: str = ""

    def __init__(
        self,
        schema: StructType | Mapping[str, object],
        *,
        delimiter: str = ",",
        quote: str | None = '"',
        null: str = "",
    ) -> None:
        for name, value in {"schema": schema_of(schema), "delimiter": delimiter, "quote": quote, "null": null}.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        if not self.schema.fields:
            raise UsageError("Csv: the record declares no field")
        for field in self.schema.fields:
            if not (isinstance(field.dataType, LEAVES) or field.dataType == StringType()):
                raise UsageError(
                    f"Csv: field '{field.name}' is {field.dataType.simpleString()}, which is not one text",
                    "use boolean, integer, float, double, decimal, date, timestamp or plain string",
                )
        names = [name.lower() for name in self.schema.fieldNames()]
        if len(set(names)) < len(names):
            raise UsageError("Csv: the record has a field name twice", "names that differ only in case are one")
        special = [self.delimiter, *([] if self.quote is None else [self.quote])]
        for sign in special:
            if len(sign) != 1 or sign in "\r\n":
                raise UsageError(f"Csv: {sign!r} is not one character of a line", "such as ',', ';' or '\\t'")
        if len(set(special)) < len(special):
            raise UsageError(f"Csv: delimiter and quote are both {self.delimiter!r}", "choose two")
        if any(sign in self.null for sign in (*special, "\r", "\n")):
            raise UsageError(f"Csv: null={self.null!r} has a delimiter, a quote or a line's end", "choose another text")

    @property
    def reasons(self) -> frozenset[str]:
        return REASONS

    def reader(self, fields: Sequence[str] | None = None) -> CsvReader:
        """A reader; raises UsageError for a name that is not a field."""
        from streaming_jobs.formats.csv_records import CsvReader  # here: a declaration needs no Arrow

        return CsvReader(self, fields)

    def writer(self) -> CsvWriter:
        """A writer of rows whose values `reader` reads back equal."""
        from streaming_jobs.formats.csv_records import CsvWriter

        return CsvWriter(self)
