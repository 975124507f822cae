"""Random Protobuf messages for `binary_fuzz.py`: the other library is Google's (upb)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import Any

from google.protobuf import descriptor_pool, message_factory, timestamp_pb2, wrappers_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from streaming_jobs.formats.lane_reader import LaneReader
from streaming_jobs.formats.protobuf import Protobuf
from streaming_jobs.formats.protobuf_schema import TIMESTAMP, WRAPPERS, is_repeated
from tests.support.binary_fuzz import EPOCH, Entries, broken, compared, written_back
from tests.support.json_fuzz import Findings

_F = FieldDescriptorProto
_KINDS = (*(kind for kind in range(1, 19) if kind not in (_F.TYPE_GROUP, _F.TYPE_MESSAGE, _F.TYPE_ENUM)),)
_TEXTS = ("", "a", "größer 😀", "x" * 200)
_BITS = {
    **dict.fromkeys((_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32), (-(1 << 31), (1 << 31) - 1)),
    **dict.fromkeys((_F.TYPE_UINT32, _F.TYPE_FIXED32), (0, (1 << 32) - 1)),
    **dict.fromkeys((_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64), (-(1 << 63), (1 << 63) - 1)),
    **dict.fromkeys((_F.TYPE_UINT64, _F.TYPE_FIXED64), (0, (1 << 64) - 1)),
}


class Messages:
    """A file of messages from a seed; `Row` is read, `Written` has more and fewer fields."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.file = FileDescriptorProto(name="fuzzed.proto", package="f", syntax="proto3")
        self.file.dependency.extend(["google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"])
        enum = self.file.enum_type.add(name="State")
        for number, name in ((0, "NONE"), (1, "ONE"), (-5, "BELOW"), (1000, "FAR")):
            enum.value.add(name=name, number=number)
        self._count = 0
        row = self._message("Row", 2)
        written = DescriptorProto()
        written.CopyFrom(row)
        written.name = "Written"
        for field in list(written.field):
            if chance.random() < 0.15 and not field.HasField("oneof_index") and len(written.field) > 1:
                written.field.remove(field)
        taken = {field.number for field in row.field}
        for number in chance.sample([n for n in (1, 4, 9, 15, 16, 77, 3000) if n not in taken], 2):
            written.field.add(name=f"more{number}", number=number, type=chance.choice(_KINDS), label=1)
        for nested in written.nested_type:
            for field in written.field:
                if field.type_name == f".f.Row.{nested.name}":
                    field.type_name = f".f.Written.{nested.name}"
        self.file.message_type.add().CopyFrom(written)
        self.set = FileDescriptorSet()
        pool = descriptor_pool.DescriptorPool()
        for each in (timestamp_pb2, wrappers_pb2):
            each.DESCRIPTOR.CopyToProto(self.set.file.add())
        self.set.file.add().CopyFrom(self.file)
        for proto in self.set.file:
            pool.Add(proto)
        self.row, self.written = (
            message_factory.GetMessageClass(pool.FindMessageTypeByName(f"f.{name}")) for name in ("Row", "Written")
        )

    def _message(self, name: str, depth: int) -> DescriptorProto:
        chance, message = self.chance, DescriptorProto(name=name)
        numbers = sorted(chance.sample((1, 2, 3, 5, 6, 8, 14, 17, 100, 2047, 2048, 500_000), chance.randint(1, 6)))
        for number in numbers if chance.random() < 0.5 else reversed(numbers):
            self._field(message, number, depth, f".f.{name}")
        if chance.random() < 0.3:
            message.oneof_decl.add(name="either")
            for number, kind in ((21, _F.TYPE_INT32), (22, _F.TYPE_STRING)):
                message.field.add(name=f"o{number}", number=number, type=kind, label=1, oneof_index=0)
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
        self.file.message_type.add().CopyFrom(message)
        return self.file.message_type[-1]

    def _field(self, message: DescriptorProto, number: int, depth: int, path: str) -> None:
        chance, kind = self.chance, self.chance.random()
        field = message.field.add(name=f"f{number}", number=number, label=3 if chance.random() < 0.25 else 1)
        if depth and kind < 0.15:
            self._count += 1
            inner = f"Inner{self._count}"
            self._message(inner, depth - 1)
            field.type, field.type_name = _F.TYPE_MESSAGE, f".f.{inner}"
        elif kind < 0.25:
            well_known = chance.choice((TIMESTAMP, *sorted(WRAPPERS)))
            field.type, field.type_name = _F.TYPE_MESSAGE, f".{well_known}"
        elif kind < 0.32:
            field.type, field.type_name = _F.TYPE_ENUM, ".f.State"
        elif kind < 0.4:
            entry = message.nested_type.add(name=f"F{number}Entry")
            entry.options.map_entry = True
            entry.field.add(name="key", number=1, type=chance.choice((_F.TYPE_STRING, _F.TYPE_INT32)), label=1)
            entry.field.add(name="value", number=2, type=chance.choice(_KINDS), label=1)
            field.type, field.type_name, field.label = _F.TYPE_MESSAGE, f"{path}.{entry.name}", 3
        else:
            field.type = chance.choice(_KINDS)
            field.proto3_optional = field.label == 1 and chance.random() < 0.4

    def fill(self, message: Message) -> None:
        """Random values in a message."""
        done = set()
        for field in message.DESCRIPTOR.fields:
            oneof = field.containing_oneof
            if self.chance.random() < 0.2 or (oneof is not None and oneof.name in done):
                continue
            done.add(oneof.name if oneof is not None else "")
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                key, value = field.message_type.fields
                for _ in range(self.chance.choice((0, 1, 3))):
                    getattr(message, field.name)[self._scalar(key)] = self._scalar(value)
            elif is_repeated(field):
                values = getattr(message, field.name)
                for _ in range(90 if self.chance.random() < 0.01 else self.chance.choice((0, 1, 2, 4))):
                    self._inner(values.add()) if field.message_type is not None else values.append(self._scalar(field))
            elif field.message_type is not None:
                self._inner(getattr(message, field.name))
            else:
                setattr(message, field.name, self._scalar(field))

    def _inner(self, message: Message) -> None:
        message.SetInParent()
        if message.DESCRIPTOR.full_name == TIMESTAMP:
            seconds = self.chance.choice((0, 1_700_000_000, self.chance.randint(-62_000_000_000, 253_000_000_000)))
            message.seconds, message.nanos = seconds, self.chance.randint(0, 999_999) * 1_000  # type: ignore[attr-defined]
        else:
            self.fill(message)

    def _scalar(self, field: Any) -> Any:
        chance = self.chance
        if field.type == _F.TYPE_ENUM:
            return chance.choice((0, 1, -5, 1000))
        if field.type in _BITS:
            first, last = _BITS[field.type]
            return chance.choice((0, 1, first, last, chance.randint(first, last), chance.randint(0, 300)))
        if field.type == _F.TYPE_BOOL:
            return chance.random() < 0.5
        if field.type == _F.TYPE_STRING:
            return chance.choice(_TEXTS)
        if field.type == _F.TYPE_BYTES:
            return chance.randbytes(chance.choice((0, 1, 20)))
        return chance.choice((0.0, -0.0, 1.5, math.inf, math.nan))


def protobuf_blocks(seed: int) -> Iterator[Callable[[Findings], None]]:
    """Blocks of one seed without end, each as what compares it."""
    chance = random.Random(seed)
    while True:
        messages = Messages(chance)
        declared = Protobuf(messages.set.SerializeToString(), "f.Row", ids="none")
        reader = declared.reader_of(declared.registered, declared.schema.fieldNames())
        assert isinstance(reader, LaneReader)
        about = str(messages.file)
        for _ in range(4):
            values = []
            for _ in range(chance.choice((1, 2, 7, 50, 300, 1000))):
                message = messages.written() if chance.random() < 0.7 else messages.row()
                messages.fill(message)
                value = message.SerializeToString()
                values.append(value if chance.random() < 0.4 else broken(value, chance))

            def compare(
                findings: Findings,
                values: list[bytes] = values,
                reader: LaneReader = reader,
                row: Any = messages.row,
                declared: Protobuf = declared,
                about: str = about,
            ) -> None:
                compared(reader, values, partial(_by_google, row), findings, about)
                written_back(declared, reader, values, findings, about)

            yield compare


class _EntryIsUnknown(Exception):
    """upb sets aside a map's entry that has a field which is not declared; by the specification only that field is."""


def _by_google(row: Any, value: bytes) -> Any:
    try:
        return _as_columns(row.FromString(value))
    except _EntryIsUnknown:
        return NotImplemented


def _as_columns(message: Message) -> Any:
    return {field.name: _of_field(message, field) for field in message.DESCRIPTOR.fields}


def _of_field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if any(unknown.field_number == field.number for unknown in UnknownFieldSet(message)):
            raise _EntryIsUnknown
        of = field.message_type.fields_by_name["value"]
        return Entries({key: _value(value[key], of) for key in value})
    if is_repeated(field):
        return [_value(each, field) for each in value]
    return None if field.has_presence and not message.HasField(field.name) else _value(value, field)


def _value(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        if field.message_type.full_name == TIMESTAMP:
            return EPOCH + timedelta(microseconds=value.seconds * 1_000_000 + value.nanos // 1_000)
        return value.value if field.message_type.full_name in WRAPPERS else _as_columns(value)
    if field.type == _F.TYPE_ENUM:
        return field.enum_type.values_by_number[value].name
    return Decimal(value) if field.type in (_F.TYPE_UINT64, _F.TYPE_FIXED64) else value
