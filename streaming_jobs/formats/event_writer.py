"""The writing of CloudEvents, in structured mode: attributes and data in one JSON object."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql.types import StringType, TimestampType

from streaming_jobs.declare.format import BlockWriter, Refusal, Written
from streaming_jobs.formats.cloud_events import PREFIX, REQUIRED
from streaming_jobs.formats.event_records import is_json_type
from streaming_jobs.formats.json_writer import column_values, missing_values

if TYPE_CHECKING:
    import pyarrow as pa

_VERSION = "1.0"


@dataclass(frozen=True)
class CloudEventsWriter:
    """Writes rows whose `columns` are the data and whose further ones are `attributes`.

    Data in JSON are the value of `data` unless `datacontenttype` is another type; all others are `data_base64`.
    """

    data: BlockWriter
    columns: Sequence[str]
    attributes: Sequence[str]
    is_json: bool

    headers = (("content-type", b"application/cloudevents+json; charset=UTF-8"),)

    def write(self, rows: pa.RecordBatch) -> Written:
        data = self.data.write(rows.select(list(self.columns)))
        refused = dict(data.refused)
        texts: dict[str, Sequence[str | None]] = {}
        for name in self.attributes:
            column = rows.column(PREFIX + name)
            written = column_values(TimestampType() if name == "time" else StringType(), column, PREFIX + name)
            missing = missing_values(column, PREFIX + name) if name in REQUIRED else {}
            refused = {**written.refused, **missing, **refused}
            texts[name] = written.values
        values: list[bytes | None] = []
        for row, value in enumerate(data.values):
            attributes = {name: text for name, each in texts.items() if (text := each[row]) is not None}
            if row not in refused and (fault := _fault(attributes)) is not None:
                refused[row] = fault
            values.append(None if row in refused or value is None else self._event(attributes, value))
        return Written(values, refused)

    def _event(self, attributes: dict[str, str], data: bytes) -> bytes:
        plain = self.is_json and is_json_type(attributes.get("datacontenttype"))
        content = {"data": msgspec.Raw(data)} if plain else {"data_base64": base64.b64encode(data).decode()}
        return msgspec.json.encode({"specversion": _VERSION, **attributes, **content})


def _fault(attributes: dict[str, str]) -> Refusal | None:
    """Why no reader takes an event with these attributes; None if one does."""
    if empty := next((name for name in REQUIRED if attributes.get(name) == ""), None):
        return Refusal("missing_field", f"{PREFIX}{empty} is empty")
    if (version := attributes.get("specversion", _VERSION)) != _VERSION:
        return Refusal("unknown_version", f"Expected specversion {_VERSION}, got {version[:20]!a}")
    return None
