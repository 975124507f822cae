"""Events of CloudEvents 1.0: their data by an inner format, and attributes as columns.

    ORDERS = KafkaTopic("orders", value=CloudEvents({"id": "bigint not null"}, attributes=["id", "time"]))

An event is a JSON object (structured mode), or its attributes are in the record's headers `ce_...` and the value is the
data (binary mode); a topic may have both. docs/cloud_events.md has the rules and the verdicts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from streaming_jobs.declare.format import DeclaredFormat, Format, RegistryFormat, Schemas, checked_fields
from streaming_jobs.declare.names import checked_names
from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.errors import UsageError
from streaming_jobs.formats.json import REASONS as JSON_REASONS
from streaming_jobs.formats.json import Json

if TYPE_CHECKING:
    from streaming_jobs.declare.format import WritableFormat
    from streaming_jobs.formats.event_records import CloudEventsReader, EventFrame
    from streaming_jobs.formats.event_writer import CloudEventsWriter

PREFIX = "ce_"
"""Begins the columns of attributes, and the headers of an event in binary mode."""
REQUIRED = ("specversion", "id", "source", "type")
_NAME = re.compile("[a-z0-9]{1,40}")
_OWN_REASONS = {"ambiguous_data", "malformed_base64", "unknown_version"}


@dataclass(frozen=True, init=False)
class CloudEvents(DeclaredFormat):
    """Events whose data are of the format `value`; a schema, or a mapping of names to types, is one of `Json`.

    `attributes` become columns `ce_id`, `ce_time` and so on after those of the data: `time` a TIMESTAMP, all others,
    extensions included, text; required ones are never null. Raises UsageError for a name that no attribute can have,
    for a column that the data have too, and for a format with ids in headers.
    """

    value: Format
    attributes: Sequence[str] = ()

    def __init__(self, value: Format | StructType | Mapping[str, object], *, attributes: Sequence[str] = ()) -> None:
        declared = Json(schema_of(value)) if isinstance(value, (StructType, Mapping)) else value
        object.__setattr__(self, "value", declared)
        object.__setattr__(self, "attributes", checked_names("CloudEvents", "attributes", attributes))
        for name in self.attributes:
            if not _NAME.fullmatch(name) or name == "data":
                raise UsageError(f"CloudEvents: '{name}' is not an attribute", "such as id, time, subject or source")
        if getattr(declared, "ids", None) == "header":
            raise UsageError("CloudEvents: ids in headers are for values without an envelope", "declare ids='prefix'")
        names = [name.lower() for name in self.schema.fieldNames()]
        if taken := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"CloudEvents: there are several columns {taken[0]}", "name each attribute once")

    @cached_property
    def schema(self) -> StructType:
        """The columns of the data, then those of the attributes."""
        columns = [
            StructField(PREFIX + name, TimestampType() if name == "time" else StringType(), name not in REQUIRED)
            for name in self.attributes
        ]
        return StructType([*self.value.schema.fields, *columns])

    @property
    def reasons(self) -> frozenset[str]:
        return frozenset({*self.value.reasons, *JSON_REASONS, *_OWN_REASONS})

    @property
    def header_frame(self) -> EventFrame:
        """What reads attributes in headers."""
        from streaming_jobs.formats.event_records import EventFrame  # here: a declaration needs no Arrow

        return EventFrame()

    def bound(self, schemas: Schemas, topic: str) -> CloudEvents:
        """The format with the schemas of the data's format at hand."""
        if not isinstance(self.value, RegistryFormat):
            return self
        return CloudEvents(self.value.bound(schemas, topic), attributes=self.attributes)

    @property
    def unwritable(self) -> tuple[str, str] | None:
        """Why no topic can be written in this format, and what to do; None if one can."""
        if not hasattr(self.value, "writer"):
            kind = type(self.value).__name__
            return f"the format {kind} of its data only reads", "declare data of Json, Csv, Avro, Protobuf, Text or Raw"
        missing = [name for name in REQUIRED[1:] if name not in self.attributes]
        if not missing:
            return None
        columns = ", ".join(PREFIX + name for name in missing)
        return (
            f"an event needs {', '.join(missing)}",
            f"add them to `attributes`, as the columns {columns} of the output",
        )

    def writer(self) -> CloudEventsWriter:
        """A writer of events in structured mode."""
        from streaming_jobs.formats.event_writer import CloudEventsWriter  # here: a declaration needs no Arrow

        data = cast("WritableFormat", self.value).writer()
        return CloudEventsWriter(data, self.value.schema.fieldNames(), self.attributes, isinstance(self.value, Json))

    def reader(self, fields: Sequence[str] | None = None) -> CloudEventsReader:
        """A reader; raises UsageError for a name that is not a field."""
        from streaming_jobs.formats.event_records import CloudEventsReader

        wanted = checked_fields(self.schema, fields)
        inner = [name for name in self.value.schema.fieldNames() if name in wanted]
        return CloudEventsReader(
            self.value.reader(inner), self.attributes, [name for name in self.schema.fieldNames() if name in wanted]
        )
