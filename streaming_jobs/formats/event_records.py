"""The reading of CloudEvents: each value into attributes and data, then all data of a block by the inner format.

A record in binary mode is read as one value: the byte `BINARY`, the length of its attributes in four bytes, these as a
map of MessagePack, the data. No JSON object begins with that byte.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from streaming_jobs.declare.format import (
    Block,
    BlockReader,
    Headers,
    Refusal,
    Refused,
    record_batch,
    with_null_rows,
)
from streaming_jobs.formats.cloud_events import PREFIX, REQUIRED
from streaming_jobs.formats.json_columns import timestamp_column
from streaming_jobs.formats.json_reader import refusal_of, unseen_faults
from streaming_jobs.formats.json_records import attribute
from streaming_jobs.formats.utf8 import utf8_refusal

if TYPE_CHECKING:
    import pyarrow as pa

BINARY = b"\1"
_LENGTH = 4
_NO_DATA = b"null"
_VERSION = f"{PREFIX}specversion"
_JSON = re.compile(r"[^;]+[/+]json\s*(?:;.*)?", re.IGNORECASE | re.DOTALL)
"""A `datacontenttype` of which `data` is the value itself; of others a text in `data` has the bytes."""


class EventFrame:
    """Puts the attributes of a record in binary mode before its value; other values stay as they are."""

    def one(self, value: bytes, headers: Headers) -> bytes:
        attributes = {
            name.removeprefix(PREFIX): content
            for name, content in headers
            if name.startswith(PREFIX) and content is not None
        }
        if "specversion" not in attributes:
            return b" " + value if value.startswith(BINARY) else value  # as malformed as it is, and no frame
        packed = msgspec.msgpack.encode(attributes)
        return BINARY + len(packed).to_bytes(_LENGTH, "big") + packed + value

    def block(self, values: Sequence[bytes | None], headers: pa.Array) -> list[bytes | None]:
        import pyarrow.compute as pc

        binary = pc.any(pc.equal(pc.list_flatten(headers).field("key"), _VERSION)).as_py()
        pairs = [[(each["key"], each["value"]) for each in of or ()] for of in headers.to_pylist()] if binary else ()
        if not binary:
            return [None if value is None else self.one(value, ()) for value in values]
        return [None if value is None else self.one(value, of) for value, of in zip(values, pairs, strict=True)]


class _Event(NamedTuple):
    """The attributes of an event, and its data as the inner format reads them."""

    attributes: Mapping[str, str | None]
    data: bytes | None


@dataclass(frozen=True)
class CloudEventsReader:
    """Reads events; builds the columns in `names`, of which `attributes` are those of the envelope."""

    data: BlockReader
    attributes: Sequence[str]
    names: Sequence[str]

    def read(self, values: Sequence[bytes | None]) -> Block:
        """Decode the values; a fault of the envelope comes before one of the data."""
        refused = unseen_faults([None if value is None or value.startswith(BINARY) else value for value in values])
        events: list[_Event | None] = []
        for row, value in enumerate(values):
            event: _Event | None = None
            try:
                event = None if row in refused else self._event(value)
            except Refused as fault:
                refused[row] = fault.verdict
            events.append(event)
        block = self.data.read([None if event is None else event.data for event in events])
        for row, refusal in block.refused.items():
            refused.setdefault(row, refusal)
        columns = dict(zip(block.columns.schema.names, block.columns.columns, strict=True))
        columns |= self._columns([{} if event is None else event.attributes for event in events], refused)
        rows = record_batch(len(values), {name: columns[name] for name in self.names})
        return Block(with_null_rows(rows, refused), refused)

    def _event(self, value: bytes | None) -> _Event:
        event = self._binary(value) if value and value.startswith(BINARY) else self._structured(value)
        for name in REQUIRED:
            if not event.attributes.get(name):
                raise Refused("missing_field", f"the event has no attribute `{name}`")
        if (version := event.attributes["specversion"] or "") != "1.0":
            raise Refused("unknown_version", f"Expected specversion 1.0, got {version[:20]!a}")
        return event

    @staticmethod
    def _binary(value: bytes) -> _Event:
        begin = 1 + _LENGTH
        end = begin + int.from_bytes(value[1:begin], "big")
        try:
            packed = _PACKED(value[begin:end])
        except (msgspec.DecodeError, RecursionError) as error:
            raise Refused("malformed_json", "the value is no JSON object") from error
        attributes = {}
        for name, content in packed.items():
            if (fault := utf8_refusal(content)) is not None:
                raise Refused(fault.reason, f"attribute `{name[:40]}`: {fault.detail}")
            attributes[name] = content.decode()
        return _Event(attributes, value[end:])

    def _structured(self, value: bytes | None) -> _Event:
        """An event in JSON; at once if its attributes are texts, else attribute by attribute."""
        try:
            *texts, data, encoded = self._parts(self._usual(value or b""))
        except (ValueError, RecursionError):
            return self._judged(value)
        attributes = dict(zip(self._wanted, texts, strict=True))
        return _Event(attributes, _data(bytes(data), encoded, attributes["datacontenttype"]))

    def _judged(self, value: bytes | None) -> _Event:
        """The same for any value: this reading decides, and words the refusal."""
        try:
            event = _ANY(value or b"")
        except (ValueError, RecursionError) as error:
            fault = refusal_of(value, error)
            raise Refused(fault.reason, fault.detail) from error
        attributes = {name: self._text(name, event[name]) for name in self._wanted if name in event}
        encoded = _decoded(event["data_base64"]) if "data_base64" in event else None
        data = bytes(event["data"]) if "data" in event else _NO_DATA
        return _Event(attributes, _data(data, encoded, attributes.get("datacontenttype")))

    @staticmethod
    def _text(name: str, raw: msgspec.Raw) -> str | None:
        """The text of an attribute; None for null."""
        found = _decoded(raw)
        if isinstance(found, bool):
            return "true" if found else "false"
        if not isinstance(found, str | int | None):
            raise Refused("wrong_type", f"Expected `str`, got `{type(found).__name__}`").within(f".{name}")
        return found if isinstance(found, str | None) else str(found)

    @cached_property
    def _wanted(self) -> Sequence[str]:
        """The attributes that matter."""
        return [*dict.fromkeys((*REQUIRED, *self.attributes, "datacontenttype"))]

    @cached_property
    def _usual(self) -> Callable[[bytes], Any]:
        """Decodes an event whose attributes are texts."""
        names = {attribute(index): name for index, name in enumerate(self._wanted)}
        fields: list[Any] = [(name, str | None, None) for name in names]
        fields += [("data", msgspec.Raw, msgspec.Raw(_NO_DATA)), ("data_base64", str | None, None)]
        return msgspec.json.Decoder(msgspec.defstruct("Event", fields, rename=names, gc=False)).decode

    @cached_property
    def _parts(self) -> Callable[[Any], Sequence[Any]]:
        return attrgetter(*map(attribute, range(len(self._wanted))), "data", "data_base64")

    def _columns(self, events: Sequence[Mapping[str, str | None]], refused: dict[int, Refusal]) -> dict[str, pa.Array]:
        """The columns of attributes; a time that is none refuses its record, whether the column is built or not."""
        import pyarrow as pa

        columns: dict[str, pa.Array] = {}
        for name in self.attributes:
            texts = [attributes.get(name) for attributes in events]
            if name != "time":
                columns[PREFIX + name] = pa.array(texts, pa.string())
                continue
            columns[PREFIX + name], faults = timestamp_column().build(texts)
            for fault in faults:
                refused.setdefault(fault.position, Refusal(fault.reason, f"{fault.words} - at `$.time`"))
        return columns


_PACKED = msgspec.msgpack.Decoder(dict[str, bytes]).decode
_ANY = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_UNPACK = msgspec.json.Decoder().decode


def is_json_type(content_type: str | None) -> bool:
    """True if `data` of an event of this `datacontenttype` is the value itself."""
    return content_type is None or _JSON.fullmatch(content_type) is not None


def _decoded(raw: msgspec.Raw | bytes) -> Any:
    try:
        return _UNPACK(raw)
    except (ValueError, RecursionError) as error:
        fault = refusal_of(bytes(raw), error)
        raise Refused(fault.reason, fault.detail) from error


def _data(data: bytes, encoded: object, content_type: str | None) -> bytes | None:
    """The bytes of an event's data, of its fields `data` and `data_base64`; None without any."""
    if encoded is None and data == _NO_DATA:
        return None
    if encoded is None:
        text = None if is_json_type(content_type) else _decoded(data)
        return text.encode() if isinstance(text, str) else data
    if data != _NO_DATA:
        raise Refused("ambiguous_data", "the event has both `data` and `data_base64`")
    if not isinstance(encoded, str):
        raise Refused("wrong_type", f"Expected `str`, got `{type(encoded).__name__}`").within(".data_base64")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused("malformed_base64", "the text is not base64").within(".data_base64") from error
