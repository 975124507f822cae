"""The contract of a format: a block of values becomes Arrow columns, with a verdict for every value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from streaming_jobs.errors import UsageError
from streaming_jobs.text.spelling import instead

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

MAX_DETAIL = 400
"""Characters of a refusal's detail; a longer one is cut."""


@dataclass(frozen=True)
class Refusal:
    """The verdict on a refused value: `reason` is a stable word, `detail` says what was expected, found and where.

    A detail of more than `most` characters is cut.
    """

    reason: str
    detail: str
    most: int = field(default=MAX_DETAIL, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.detail) > self.most:
            object.__setattr__(self, "detail", f"{self.detail[: self.most - 3]}...")


class Refused(Exception):
    """A single record is refused, with `reason` and `detail`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.place = ""

    def within(self, place: str) -> Refused:
        """The same, of what lies at this place of the record: `.field` or `[3]`."""
        self.place = place + self.place
        return self

    @property
    def verdict(self) -> Refusal:
        return Refusal(self.reason, f"{self.detail} - at `${self.place}`" if self.place else self.detail)


@dataclass(frozen=True)
class Block:
    """The columns of a block of values, and the refusals by the value's index.

    `columns` has the requested fields, in the schema's order, one row per value. All fields are nullable, at
    every depth. The types are Arrow's for the Spark types: timestamp("us", tz="UTC"), timestamp("us") for one without a
    zone, date32, decimal128(p, s), string, binary, bool, numbers, list and struct; there are no maps. The row of a
    refused value is null in every column.
    """

    columns: pa.RecordBatch
    refused: Mapping[int, Refusal]


class BlockReader(Protocol):
    """A reading of blocks; it belongs to one process and is not pickled."""

    def read(self, values: Sequence[bytes | None]) -> Block:
        """Decode the values. Nothing that they hold makes it raise; None is refused with the reason `empty_value`."""


@dataclass(frozen=True)
class Written:
    """The values of a block of rows, and the refusals by the row's index: the value of such a row is None."""

    values: Sequence[bytes | None]
    refused: Mapping[int, Refusal]


class BlockWriter(Protocol):
    """A writing of blocks; it belongs to one process and is not pickled.

    With an attribute `headers`, pairs of name and bytes, the records of all its values get these headers.
    """

    def write(self, rows: pa.RecordBatch) -> Written:
        """The value of each row of the schema's fields. The format's reader reads it back as the same row.

        A row without such a value is refused; no content of a row makes the method raise.
        """


class WritableFormat(Protocol):
    """A format in which a stream can write a topic, too."""

    @property
    def schema(self) -> StructType:
        """Fields of a row."""

    def writer(self) -> BlockWriter:
        """A writer of rows."""


class Format(Protocol):
    """A format of records; picklable."""

    @property
    def schema(self) -> StructType:
        """Fields of a decoded record; `nullable=False` means required."""

    @property
    def reasons(self) -> frozenset[str]:
        """Every reason for which a value can be refused."""

    def reader(self, fields: Sequence[str] | None = None) -> BlockReader:
        """A reader that validates every record whole, and builds the columns of these top-level fields; None: all.

        Raises UsageError for a name that is not a field.
        """


class DeclaredFormat(Protocol):
    """What formats share that are dataclasses: the declaration alone travels to other processes, not its reader."""

    def reader(self, fields: Sequence[str] | None = None) -> BlockReader:
        """As `Format.reader`."""

    def read(self, value: bytes | None) -> dict[str, Any]:
        """The record in these bytes as Python values, times in UTC; raises Refused."""
        return read_one(self._reader, value)

    @cached_property
    def _reader(self) -> BlockReader:
        return self.reader()

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(cast("Any", self))}


@dataclass(frozen=True)
class RegisteredSchema:
    """A schema of a registry: `kind` is AVRO, PROTOBUF or JSON; `references` has the texts that it needs, by name."""

    kind: str
    text: str
    references: Mapping[str, str] = field(default_factory=dict)


class Schemas(Protocol):
    """The schemas of a registry, as a process reaches them; what was answered once never changes."""

    def of(self, prefixes: Sequence[bytes]) -> Mapping[bytes, RegisteredSchema | Refusal]:
        """The schema that each prefix of a value names, or why values with this prefix are refused.

        Raises SchemaUnavailable if the registry does not answer, or may yet get to know one of them.
        """

    def prefix(self, subject: str, schema: RegisteredSchema) -> bytes:
        """The prefix of values that are written by a schema of the subject.

        Raises SchemaUnavailable if the registry does not answer, and ConfigurationError for a schema that it does not
        take or does not have.
        """


@runtime_checkable
class RegistryFormat(Protocol):
    """A format whose records name their schemas; its other methods are those of `Format`, of what `bound` returns."""

    def bound(self, schemas: Schemas, topic: str) -> Format:
        """The format of this topic's records, which reads and writes with these schemas."""


Headers = Sequence[tuple[str, bytes | None]]
"""The headers of one record, in their order."""


class HeaderFrame(Protocol):
    """What a format needs of a record's headers, in the bytes that its reader gets."""

    def one(self, value: bytes, headers: Headers) -> bytes:
        """The bytes to read for the value of a record with these headers."""

    def block(self, values: Sequence[bytes | None], headers: pa.Array) -> list[bytes | None]:
        """The same for the values of many records; None stays None."""


def checked_fields(schema: StructType, fields: Sequence[str] | None) -> frozenset[str]:
    """The names of the fields to build; raises UsageError for an unknown field."""
    names = schema.fieldNames()
    if fields is None:
        return frozenset(names)
    for name in fields:
        if name not in names:
            raise UsageError(f"'{name}' is not a field of the records", instead(name, names))
    return frozenset(fields)


def record_batch(rows: int, columns: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """The columns as a batch of so many rows, also if there are no columns."""
    import pyarrow as pa  # here: a declaration needs no Arrow

    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def with_null_rows(batch: pa.RecordBatch, rows: Iterable[int]) -> pa.RecordBatch:
    """The batch with null in every column of these rows, which are refused."""
    import numpy as np
    import pyarrow as pa

    mask = np.zeros(batch.num_rows, np.bool_)
    mask[list(rows)] = True
    if not batch.num_columns or not mask.any():
        return batch
    return batch.take(pa.array(np.arange(batch.num_rows), mask=mask))


def read_one(reader: BlockReader, value: bytes | None) -> dict[str, Any]:
    """The record of one value as Python values; raises Refused."""
    block = reader.read([value])
    for refusal in block.refused.values():
        raise Refused(refusal.reason, refusal.detail)
    record: dict[str, Any] = block.columns.to_pylist()[0]
    return record
