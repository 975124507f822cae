"""Protobuf messages as columns, and which message of a registered schema a record has."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

TIMESTAMP = "google.protobuf.Timestamp"
WRAPPERS = frozenset(
    f"google.protobuf.{kind}Value"
    for kind in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
"""Messages around one value, which become a column that may be null."""

_F = FieldDescriptor
_SCALARS: dict[int, DataType] = {
    **dict.fromkeys((_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32), IntegerType()),
    **dict.fromkeys((_F.TYPE_UINT32, _F.TYPE_FIXED32), LongType()),
    **dict.fromkeys((_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64), LongType()),
    **dict.fromkeys((_F.TYPE_UINT64, _F.TYPE_FIXED64), DecimalType(20, 0)),
    _F.TYPE_BOOL: BooleanType(),
    _F.TYPE_FLOAT: FloatType(),
    _F.TYPE_DOUBLE: DoubleType(),
    _F.TYPE_STRING: StringType(),
    _F.TYPE_ENUM: StringType(),
    _F.TYPE_BYTES: BinaryType(),
}


class MessageFault(ValueError):
    """A message that no columns can have, or that is not there, in words."""


def descriptor(files: bytes, name: str) -> Descriptor:
    """The message of this name in a FileDescriptorSet; raises MessageFault."""
    pool = DescriptorPool()
    try:
        for file in FileDescriptorSet.FromString(files).file:
            pool.Add(file)
        return pool.FindMessageTypeByName(name)
    except (DecodeError, TypeError, KeyError) as error:
        raise MessageFault(f"no message '{name}' can be found among the descriptors: {error}") from error


def files_of(file: Any) -> bytes:
    """A FileDescriptorSet of the file of a generated class, after those that it imports."""
    found: dict[str, FileDescriptorProto] = {}

    def add(each: Any) -> None:
        for further in each.dependencies:
            add(further)
        proto = FileDescriptorProto()
        each.CopyToProto(proto)
        found.setdefault(each.name, proto)

    add(file)
    return FileDescriptorSet(file=list(found.values())).SerializeToString(deterministic=True)  # type: ignore[no-any-return]


def is_repeated(field: FieldDescriptor) -> bool:
    return field.label == _F.LABEL_REPEATED if not hasattr(field, "is_repeated") else bool(field.is_repeated)


def is_required(field: FieldDescriptor) -> bool:
    return field.label == _F.LABEL_REQUIRED if not hasattr(field, "is_required") else bool(field.is_required)


def columns_of(message: Descriptor, within: Sequence[str] = ()) -> StructType:
    """The columns of a message; raises MessageFault for one that no columns can have."""
    if message.full_name in within:
        raise MessageFault(f"the message {message.full_name} holds itself, which no column can")
    if not message.fields:
        raise MessageFault(f"the message {message.full_name} has no field")
    names = [field.name.lower() for field in message.fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MessageFault(f"the message {message.full_name} has several fields named {twice}, if case is ignored")
    return StructType([_column(field, (*within, message.full_name)) for field in message.fields])


def _column(field: FieldDescriptor, within: Sequence[str]) -> StructField:
    if is_repeated(field):
        return StructField(field.name, ArrayType(_type(field, within), containsNull=False), nullable=False)
    return StructField(field.name, _type(field, within), field.has_presence and not is_required(field))


def _type(field: FieldDescriptor, within: Sequence[str]) -> DataType:
    if field.type == _F.TYPE_GROUP:
        raise MessageFault(f"field '{field.name}' is a group, which no column can be")
    if field.type != _F.TYPE_MESSAGE:
        return _SCALARS[field.type]
    inner = field.message_type
    if inner.full_name == TIMESTAMP:
        return TimestampType()
    if inner.full_name in WRAPPERS:
        return _SCALARS[inner.fields[0].type]
    return columns_of(inner, within)


# A record has the message's place in its file, not its name: the registered text has the names.

_WORDS = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[A-Za-z_][\w.]*|[{}]", re.DOTALL)


def message_name(text: str, path: Sequence[int]) -> str | None:
    """The name of the message at this place, `Outer.Inner`, without its package; None if there is none."""
    names: Iterable[tuple[tuple[int, ...], str]]
    try:
        names = _of_descriptor(FileDescriptorProto.FromString(base64.b64decode(text, validate=True)).message_type)
    except (ValueError, DecodeError):
        names = _of_source(text)
    return dict(names).get(tuple(path))


def _of_descriptor(messages: Any, above: tuple[int, ...] = (), name: str = "") -> list[tuple[tuple[int, ...], str]]:
    found = []
    for place, message in enumerate(messages):
        here = (*above, place), f"{name}{message.name}"
        found += [here, *_of_descriptor(message.nested_type, here[0], f"{here[1]}.")]
    return found


def _of_source(text: str) -> Iterator[tuple[tuple[int, ...], str]]:
    """Place and name of each message in a file's source."""
    words = [word for word in _WORDS.findall(text) if word[0] not in "/\"'"]
    blocks: list[tuple[tuple[int, ...], str] | None] = []
    counts: dict[tuple[int, ...], int] = {}
    for place, word in enumerate(words):
        if word == "}":
            if blocks:
                blocks.pop()
        elif word == "{":
            begins = words[place - 2 : place]
            if len(begins) == 2 and begins[0] == "message" and None not in blocks:
                above, name = blocks[-1] if blocks and blocks[-1] else ((), "")
                number = counts.get(above, 0)
                counts[above] = number + 1
                block = (*above, number), f"{name}.{begins[1]}" if name else begins[1]
                yield block
                blocks.append(block)
            else:
                blocks.append(None)
