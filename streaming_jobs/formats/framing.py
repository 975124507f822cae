"""Records of a schema registry: their first bytes name the writer's schema, the rest is read by it.

    00 00 00 00 07 ...    the registry's number of the schema, four bytes
    01 <16 bytes> ...     its UUID

Newer clients put these bytes into a header of the record (`ID_HEADER`); such a record is read as if they came first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Literal, Protocol, cast

from streaming_jobs.declare.format import (
    Block,
    BlockReader,
    BlockWriter,
    DeclaredFormat,
    HeaderFrame,
    Headers,
    Refusal,
    RegisteredSchema,
    Schemas,
    Written,
    checked_fields,
    record_batch,
)
from streaming_jobs.declare.names import checked_choice
from streaming_jobs.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql.types import StructType

Ids = Literal["prefix", "header", "none"]
ID_HEADER = "__value_schema_id"
"""The header's name, as Confluent's clients write it."""
_ID_REASONS = frozenset({"incompatible_schema", "not_framed", "unknown_schema"})
_LENGTHS = {0: 5, 1: 17}
"""Bytes of an id by the first one of them."""
_EMPTY = Refusal("empty_value", "the value is null or empty")


class PayloadReader(Protocol):
    """A reader of values that one schema has written."""

    def read(self, values: Sequence[bytes], skip: int) -> Block:
        """Decode the values after their first `skip` bytes; `BlockReader` has the rest of the contract."""


class WithId(DeclaredFormat, Protocol):
    """A format whose records name their writer's schema, as it is declared; `bound` adds the registry."""

    ids: Ids
    subject: str | None

    @property
    def schema(self) -> StructType:
        """The columns of a record."""

    @property
    def registered(self) -> RegisteredSchema:
        """The declared schema: that of records without an id, and that of a topic that a stream writes."""

    @property
    def payload_reasons(self) -> frozenset[str]:
        """The reasons of refusals, beside those of the id."""

    def reader_of(self, written: RegisteredSchema, names: Sequence[str]) -> PayloadReader | Refusal:
        """A reader of values of a writer's schema, which builds these columns; a refusal if the schemas do not fit."""

    def payload_writer(self) -> BlockWriter:
        """A writer of values by the declared schema, without an id."""

    @property
    def reasons(self) -> frozenset[str]:
        return self.payload_reasons | {"empty_value"} | (_ID_REASONS if self.ids != "none" else frozenset())

    def bound(self, schemas: Schemas, topic: str) -> Registered:
        """The format with a registry at hand."""
        return Registered(self, schemas, self.subject or f"{topic}-value")

    def reader(self, fields: Sequence[str] | None = None) -> BlockReader:
        """A reader of records without ids; raises UsageError for others: `bound` has their reader."""
        return self._alone.reader(fields)

    def writer(self) -> BlockWriter:
        """A writer of records without ids; raises UsageError for others."""
        return self._alone.writer()

    @property
    def _alone(self) -> Registered:
        if self.ids != "none":
            raise UsageError(
                f"records of {type(self).__name__} name schemas of a registry, and none is at hand",
                "use what KafkaTopic.bound returns",
            )
        return Registered(self, None, "")


@dataclass(frozen=True)
class Registered(DeclaredFormat):
    """A format of records with ids, and the schemas that they name; None: of records without ids."""

    format: WithId
    schemas: Schemas | None
    subject: str

    @property
    def schema(self) -> StructType:
        return self.format.schema

    @property
    def reasons(self) -> frozenset[str]:
        return self.format.reasons

    @property
    def header_frame(self) -> HeaderFrame | None:
        """What reads ids in headers."""
        return IdFrame() if self.format.ids == "header" else None

    def reader(self, fields: Sequence[str] | None = None) -> FramedReader:
        wanted = checked_fields(self.schema, fields)
        names = [name for name in self.schema.fieldNames() if name in wanted]
        return FramedReader(self.format, self.schemas if self.format.ids != "none" else None, names)

    def writer(self) -> BlockWriter:
        """A writer of values that begin with the id of the declared schema."""
        if self.format.ids == "none" or self.schemas is None:
            return self.format.payload_writer()
        schema_id = self.schemas.prefix(self.subject, self.format.registered)
        if self.header_frame is None:
            return FramedWriter(self.format.payload_writer(), schema_id)
        return FramedWriter(self.format.payload_writer(), b"", ((ID_HEADER, schema_id),))


class FramedReader:
    """Reads each value by the schema that it names; without `schemas`, all of them by the declared one."""

    def __init__(self, declared: WithId, schemas: Schemas | None, names: Sequence[str]) -> None:
        self._declared = declared
        self._schemas = schemas
        self._names = names
        self._readers: dict[bytes, PayloadReader | Refusal] = {}
        if schemas is None:
            self._readers[b""] = declared.reader_of(declared.registered, names)

    def read(self, values: Sequence[bytes | None]) -> Block:
        """Decode the values; raises SchemaUnavailable if the registry is needed, and does not answer."""
        rows, refused = self._by_schema(values)
        self._look_up(rows)
        pieces: list[tuple[Sequence[int], Block]] = []
        for prefix, chosen in rows.items():
            reader = self._readers[prefix]
            if isinstance(reader, Refusal):
                refused |= dict.fromkeys(chosen, reader)
                continue
            some = values if len(chosen) == len(values) else [values[row] for row in chosen]
            pieces.append((chosen, reader.read(cast("Sequence[bytes]", some), len(prefix))))
        return gathered(len(values), self._declared.schema, self._names, pieces, refused)

    def _by_schema(self, values: Sequence[bytes | None]) -> tuple[dict[bytes, Sequence[int]], dict[int, Refusal]]:
        """The rows by the id of their values; mostly all have the same."""
        if self._schemas is None and None not in values:
            return {b"": range(len(values))}, {}
        if self._schemas is not None and values and (first := values[0]) and len(first) >= _LENGTHS.get(first[0], 99):
            prefix = first[: _LENGTHS[first[0]]]
            if None not in values and all(map(methodcaller("startswith", prefix), values)):
                return {prefix: range(len(values))}, {}
        rows: dict[bytes, list[int]] = {}
        refused: dict[int, Refusal] = {}
        for row, value in enumerate(values):
            if value is None or (not value and self._schemas is not None):
                refused[row] = _EMPTY
            elif self._schemas is None:  # no bytes are a message of defaults, too
                rows.setdefault(b"", []).append(row)
            elif len(value) < (length := _LENGTHS.get(value[0], len(value) + 1)):
                refused[row] = _unframed(value)
            else:
                rows.setdefault(value[:length], []).append(row)
        return dict(rows), refused

    def _look_up(self, prefixes: Iterable[bytes]) -> None:
        fresh = [prefix for prefix in prefixes if prefix not in self._readers]
        if not fresh or self._schemas is None:
            return
        for prefix, schema in self._schemas.of(fresh).items():
            if isinstance(schema, Refusal):
                self._readers[prefix] = schema
            else:
                self._readers[prefix] = self._declared.reader_of(schema, self._names)


@dataclass(frozen=True)
class FramedWriter:
    """Writes values after the id of their schema, which may be in `headers` instead."""

    payloads: BlockWriter
    prefix: bytes
    headers: Sequence[tuple[str, bytes]] = ()

    def write(self, rows: pa.RecordBatch) -> Written:
        made = self.payloads.write(rows)
        return Written([None if value is None else self.prefix + value for value in made.values], made.refused)


def checked_ids(what: str, ids: str) -> Ids:
    """The option as it is; raises UsageError for a value that it does not have."""
    checked_choice(what, "ids", ids, ("prefix", "header", "none"))
    return cast("Ids", ids)


def _unframed(value: bytes) -> Refusal:
    found = f"{len(value)} bytes" if value[0] in _LENGTHS else f"0x{value[0]:02x}"
    return Refusal("not_framed", f"expected 0x00 and the 4 bytes of a schema's id, or 0x01 and 16 bytes, found {found}")


def gathered(
    size: int,
    schema: StructType,
    names: Sequence[str],
    pieces: Sequence[tuple[Sequence[int] | np.ndarray, Block]],
    refused: Mapping[int, Refusal],
) -> Block:
    """One block of blocks, each with the rows that its values have; the other rows are those of `refused`."""
    import numpy as np
    import pyarrow as pa

    if len(pieces) == 1 and not refused and len(pieces[0][0]) == size:
        return pieces[0][1]
    places, begin = np.full(size, -1), 0
    refused = dict(refused)
    for rows, block in pieces:
        places[rows] = np.arange(begin, begin + len(rows))
        begin += len(rows)
        refused |= {int(rows[index]): refusal for index, refusal in block.refused.items()}
    if not names:
        return Block(record_batch(size, {}), refused)
    places[list(refused)] = -1
    whole = pa.concat_batches([block.columns for _, block in pieces]) if pieces else _empty(schema, names)
    return Block(whole.take(pa.array(places, pa.int64(), mask=places < 0)), refused)


def _empty(schema: StructType, names: Sequence[str]) -> pa.RecordBatch:
    from streaming_jobs.declare.schemas import arrow_struct

    struct = arrow_struct(schema)
    return record_batch(0, {name: _none(struct.field(name).type) for name in names})


def _none(kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    return pa.array([], kind)


class IdFrame:
    """Puts the id in a record's header before its value; a value without one stays as it is."""

    def one(self, value: bytes, headers: Headers) -> bytes:
        return next((content for name, content in headers if name == ID_HEADER and content), b"") + value

    def block(self, values: Sequence[bytes | None], headers: pa.Array) -> list[bytes | None]:
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        flat = pc.list_flatten(headers)
        at = np.flatnonzero(pc.fill_null(pc.equal(flat.field("key"), ID_HEADER), False))
        owners = np.asarray(pc.list_parent_indices(headers))[at].tolist()
        framed = list(values)
        for row, content in zip(owners, flat.field("value").take(pa.array(at)).to_pylist(), strict=True):
            if content and (value := values[row]) is not None:
                framed[row] = content + value
        return framed
