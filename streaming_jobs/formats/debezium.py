"""Change events of Debezium as rows: the row after the change, or before a delete, and what the change was.

    CUSTOMERS = KafkaTopic("db.shop.customers", value=Debezium({"id": "bigint not null", "name": "string"}),
                           tombstones="keep")

    @stream(source=CUSTOMERS, sink=DeltaTable("customers", keys=["id"], delete_when="_op = 'd'"))
    def customers(customers):
        return customers.where("not _source.tombstone")

docs/debezium.md has the rules and the verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType

from streaming_jobs.declare.format import (
    Block,
    BlockReader,
    DeclaredFormat,
    Format,
    HeaderFrame,
    Refusal,
    RegistryFormat,
    Schemas,
    checked_fields,
    record_batch,
    with_null_rows,
)
from streaming_jobs.declare.schemas import nullable, schema_of
from streaming_jobs.errors import UsageError
from streaming_jobs.formats.json import Json

if TYPE_CHECKING:
    import pyarrow as pa

OP, TIME = "_op", "_ts_ms"
"""Columns beside those of the row: `c`, `u`, `r` (read by a snapshot) or `d`, and when Debezium saw the change."""
_KNOWN = ("c", "u", "r", "d")
_ENVELOPE = ("before", "after", "op", "ts_ms")
_UNKNOWN = Refusal("unknown_op", "the change is none of c, u, r and d; truncations and messages have no row")
_NO_AFTER = Refusal("missing_row", "the change has no row in `after`")
_NO_BEFORE = Refusal("missing_row", "the delete has no row in `before`; see REPLICA IDENTITY of the database's table")


@dataclass(frozen=True, init=False)
class Debezium(DeclaredFormat):
    """Change events in JSON, of rows with these columns; or events in a format whose records have the envelope.

    `payload`: the envelope of a JSON event is in its field `payload`, as with the converter's `schemas.enable`. A
    format such as `Avro` declares the fields `before`, `after`, `op` and `ts_ms`; further ones are not read. The row
    of a delete has the columns that the database writes into `before`; the others are null.

    Raises UsageError for a format without these fields, and for a row with a column `_op` or `_ts_ms`.
    """

    value: Format
    payload: bool = False

    def __init__(self, value: Format | StructType | Mapping[str, object], *, payload: bool = False) -> None:
        declared = _json(schema_of(value), payload=payload) if isinstance(value, (StructType, Mapping)) else value
        object.__setattr__(self, "value", declared)
        object.__setattr__(self, "payload", payload)
        _ = self.schema

    @cached_property
    def schema(self) -> StructType:
        """The row's columns, all nullable, then `_op` and `_ts_ms`."""
        envelope = self.value.schema
        if self.payload:
            envelope = _struct(envelope, "payload")
        before, after = (_struct(envelope, name) for name in ("before", "after"))
        if nullable(before) != nullable(after):
            raise UsageError(
                "Debezium: `before` and `after` have different columns", "declare the same record for both"
            )
        kinds: Mapping[str, tuple[type[DataType], ...]] = {"op": (StringType,), "ts_ms": (LongType,)}
        for name, kind in kinds.items():
            if name not in envelope.fieldNames() or not isinstance(envelope[name].dataType, kind):
                raise UsageError(f"Debezium: the events have no field `{name}` of its type", "declare the envelope")
        if taken := sorted({OP, TIME}.intersection(after.fieldNames())):
            raise UsageError(f"Debezium: the row has a column {taken[0]}", "rename the column in the connector")
        row = [StructField(each.name, each.dataType) for each in after.fields]
        return StructType([*row, StructField(OP, StringType(), False), StructField(TIME, LongType())])

    @property
    def reasons(self) -> frozenset[str]:
        return frozenset({*self.value.reasons, _UNKNOWN.reason, _NO_AFTER.reason})

    @property
    def header_frame(self) -> HeaderFrame | None:
        """That of the events' format."""
        return getattr(self.value, "header_frame", None)

    def bound(self, schemas: Schemas, topic: str) -> Debezium:
        """The format with the schemas of the events' format at hand."""
        if not isinstance(self.value, RegistryFormat):
            return self
        return Debezium(self.value.bound(schemas, topic), payload=self.payload)

    def reader(self, fields: Sequence[str] | None = None) -> DebeziumReader:
        """A reader; raises UsageError for a name that is not a field."""
        wanted = checked_fields(self.schema, fields)
        names = [name for name in self.schema.fieldNames() if name in wanted]
        needed = ["payload"] if self.payload else list(_ENVELOPE)
        order = [name for name in self.value.schema.fieldNames() if name in needed]
        return DebeziumReader(self.value.reader(order), self.payload, names)


@dataclass(frozen=True)
class DebeziumReader:
    """Makes rows of what `events` reads, and keeps the columns in `names`."""

    events: BlockReader
    payload: bool
    names: Sequence[str]

    def read(self, values: Sequence[bytes | None]) -> Block:
        """Decode the values; an event without a row is refused."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        block = self.events.read(values)
        envelope = dict(zip(block.columns.schema.names, block.columns.columns, strict=True))
        if self.payload:
            envelope = _flat(envelope["payload"])
        op, before, after = envelope["op"], envelope["before"], envelope["after"]
        deleted = pc.fill_null(pc.equal(op, "d"), False)
        refused = dict(block.refused)
        for refusal, mask in (
            (_UNKNOWN, pc.invert(pc.is_in(op, pa.array(_KNOWN)))),
            (_NO_AFTER, pc.and_(pc.invert(deleted), pc.is_null(after))),
            (_NO_BEFORE, pc.and_(deleted, pc.is_null(before))),
        ):
            for index in np.flatnonzero(np.asarray(mask)).tolist():
                refused.setdefault(index, refusal)
        old, new = _flat(before), _flat(after)
        row = {name: pc.if_else(deleted, old[name], new[name]) for name in self.names if name in new}
        columns = {**row, OP: op, TIME: envelope["ts_ms"]}
        rows = record_batch(len(values), {name: columns[name] for name in self.names})
        return Block(with_null_rows(rows, refused), refused)


def _flat(struct: pa.StructArray) -> dict[str, pa.Array]:
    """The fields by name; null where the struct is."""
    return dict(zip((field.name for field in struct.type), struct.flatten(), strict=True))


def _json(row: StructType, *, payload: bool) -> Json:
    envelope = StructType(
        [
            StructField("before", nullable(row)),
            StructField("after", row),
            StructField("op", StringType(), nullable=False),
            StructField("ts_ms", LongType()),
        ]
    )
    return Json(StructType([StructField("payload", envelope, nullable=False)]) if payload else envelope)


def _struct(schema: StructType, name: str) -> StructType:
    kind = schema[name].dataType if name in schema.fieldNames() else None
    if not isinstance(kind, StructType):
        raise UsageError(
            f"Debezium: the events have no field `{name}` that is a record",
            "declare the envelope: before, after, op and ts_ms; or payload=, where it is in a field of that name",
        )
    return kind
