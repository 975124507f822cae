"""Avro records: read by the declared schema, whichever schema of the registry has written them.

    Avro(Path(__file__).with_name("order.avsc"))
    Avro({"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]})

`avro_resolution.py` compares both schemas, `avro_steps.py` reads, `avro_writer.py` writes; docs/registry.md has the
rules and the verdicts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from streaming_jobs.declare.format import Refusal, RegisteredSchema
from streaming_jobs.declare.schemas import arrow_struct
from streaming_jobs.errors import UsageError
from streaming_jobs.formats.avro_schema import Node, SchemaFault, columns_of, parsed
from streaming_jobs.formats.framing import Ids, WithId, checked_ids

if TYPE_CHECKING:
    from streaming_jobs.declare.format import BlockWriter
    from streaming_jobs.formats.framing import PayloadReader

REASONS = frozenset({"invalid_utf8", "malformed", "out_of_range", "trailing_data", "wrong_type"})
"""Every reason of a refusal, beside those of the id."""


@dataclass(frozen=True, init=False)
class Avro(WithId):
    """Records of an Avro schema: a file of it, which is read at the declaration, its JSON text, or a mapping.

    The columns are those of this schema, which is the reader's. `ids` says where a record names its writer's schema:
    in its first bytes ("prefix"), or in a header, and in the first bytes of records without one ("header"); "none":
    records have no id, are written by this very schema, and need no registry. A stream that writes the topic finds
    the schema's id by `subject`; None: the topic's name and `-value`.

    Raises UsageError for a text that is no schema, and for types that no column can have.
    """

    text: str
    ids: Ids = "prefix"
    subject: str | None = None

    def __init__(
        self, schema: str | Mapping[str, Any] | Path, *, ids: Ids = "prefix", subject: str | None = None
    ) -> None:
        object.__setattr__(self, "text", _text(schema))
        object.__setattr__(self, "ids", checked_ids("Avro", ids))
        object.__setattr__(self, "subject", subject)
        _ = self.schema

    @cached_property
    def node(self) -> Node:
        """The declared schema."""
        try:
            return parsed(self.text)
        except SchemaFault as fault:
            raise UsageError(f"the Avro schema cannot be read: {fault}", "correct the schema") from fault

    @cached_property
    def schema(self) -> StructType:
        """The columns; `nullable=False` where the schema has no null."""
        try:
            return columns_of(self.node)
        except SchemaFault as fault:
            raise UsageError(
                f"the Avro schema is not one of columns: {fault}",
                "declare the fields that the stream needs: those of the writer that are not declared are skipped",
            ) from fault

    @property
    def registered(self) -> RegisteredSchema:
        return RegisteredSchema("AVRO", self.text)

    @property
    def payload_reasons(self) -> frozenset[str]:
        return REASONS

    def reader_of(self, written: RegisteredSchema, names: Sequence[str]) -> PayloadReader | Refusal:
        """A reader of values of a writer's schema, which builds these columns; a refusal if the schemas do not fit."""
        from streaming_jobs.formats.avro_resolution import Incompatible, steps
        from streaming_jobs.formats.lane_reader import LaneReader

        try:
            if written.kind != "AVRO":
                raise Incompatible(f"the record's schema is of {written.kind}, not of AVRO")
            read = steps(parsed(written.text, written.references), self.node, arrow_struct(self.schema))
        except SchemaFault as fault:
            return Incompatible(str(fault)).verdict
        except Incompatible as error:
            return error.verdict
        return LaneReader(read, names)

    def payload_writer(self) -> BlockWriter:
        from streaming_jobs.formats.avro_writer import AvroWriter

        return AvroWriter(self.node, self.schema)


def _text(schema: str | Mapping[str, Any] | Path) -> str:
    """The schema on one line, so that layout is no change."""
    try:
        if isinstance(schema, Path):
            schema = schema.read_text(encoding="utf-8")
        return json.dumps(json.loads(schema) if isinstance(schema, str) else schema, separators=(",", ":"))
    except OSError as error:
        raise UsageError(f"the Avro schema {error.filename}: {error.strerror}", "name a file of the schema") from error
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the Avro schema is not JSON: {error}",
            "write Avro(Path(__file__).with_name('order.avsc')), the schema's text, or a mapping",
        ) from error
