"""Protobuf records: read by the declared message, whichever version of it has written them.

    Protobuf(order_pb2.Order)
    Protobuf(Path(__file__).with_name("order.desc"), message="shop.Order")

`protobuf_schema.py` has the columns, `protobuf_steps.py` reads, `protobuf_writer.py` writes; docs/registry.md has the
rules and the verdicts.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from streaming_jobs.declare.format import Block, Refusal, Refused, RegisteredSchema, Written
from streaming_jobs.declare.schemas import arrow_struct
from streaming_jobs.errors import UsageError
from streaming_jobs.formats.framing import Ids, WithId, checked_ids
from streaming_jobs.platform.extras import require

if TYPE_CHECKING:
    import pyarrow as pa
    from google.protobuf.descriptor import Descriptor

    from streaming_jobs.declare.format import BlockWriter
    from streaming_jobs.formats.framing import PayloadReader
    from streaming_jobs.formats.lane_reader import LaneReader

REASONS = frozenset({"invalid_utf8", "malformed", "missing_field", "out_of_range", "wrong_type"})
"""Every reason of a refusal, beside those of the id."""


@dataclass(frozen=True, init=False)
class Protobuf(WithId):
    """Records of a Protobuf message: a generated class, or a file with a FileDescriptorSet and the message's full name.

    (`protoc --include_imports --descriptor_set_out=order.desc order.proto` writes such a file, which is read at the
    declaration.) `ids` and `subject` are those of `Avro`; with ids="none", a record is the message alone.

    Raises UsageError for a message that no columns can have, and MissingExtra without `recourse-streams[protobuf]`.
    """

    files: bytes
    message: str
    ids: Ids = "prefix"
    subject: str | None = None

    def __init__(
        self, schema: type | Path | bytes, message: str = "", *, ids: Ids = "prefix", subject: str | None = None
    ) -> None:
        require("protobuf", "the format Protobuf")
        files, name = _declared(schema, message)
        for option, value in {"files": files, "message": name, "ids": checked_ids("Protobuf", ids)}.items():
            object.__setattr__(self, option, value)
        object.__setattr__(self, "subject", subject)
        _ = self.schema

    @cached_property
    def descriptor(self) -> Descriptor:
        from streaming_jobs.formats.protobuf_schema import MessageFault, descriptor

        try:
            return descriptor(self.files, self.message)
        except MessageFault as fault:
            raise UsageError(str(fault), "name a message of the file, with its package") from fault

    @cached_property
    def schema(self) -> StructType:
        """The columns: optional fields and messages may be null, other fields have their default."""
        from streaming_jobs.formats.protobuf_schema import MessageFault, columns_of

        try:
            return columns_of(self.descriptor)
        except MessageFault as fault:
            raise UsageError(
                f"the message is not one of columns: {fault}",
                "declare a message with the fields that the stream needs: other fields of a record are skipped",
            ) from fault

    @property
    def registered(self) -> RegisteredSchema:
        """The message's file in base64, which registries take for its source."""
        from google.protobuf.descriptor_pb2 import FileDescriptorProto

        file = FileDescriptorProto()
        self.descriptor.file.CopyToProto(file)
        return RegisteredSchema("PROTOBUF", base64.b64encode(file.SerializeToString(deterministic=True)).decode())

    @property
    def payload_reasons(self) -> frozenset[str]:
        return REASONS

    def reader_of(self, written: RegisteredSchema, names: Sequence[str]) -> PayloadReader | Refusal:
        """A reader of values of a writer's schema, which builds these columns."""
        from streaming_jobs.formats.lane_reader import LaneReader
        from streaming_jobs.formats.protobuf_steps import MessageSteps

        if written.kind != "PROTOBUF":
            return Refusal("incompatible_schema", f"the record's schema is of {written.kind}, not of PROTOBUF")
        reader = LaneReader(MessageSteps(self.descriptor, arrow_struct(self.schema)), names)
        return reader if self.ids == "none" else IndexedReader(self, written, reader)

    def payload_writer(self) -> BlockWriter:
        from streaming_jobs.formats.protobuf_writer import ProtobufWriter

        written = ProtobufWriter(self.descriptor)
        return written if self.ids == "none" else IndexedWriter(written, _index(self.descriptor))

    @cached_property
    def local_name(self) -> str:
        """The message's name without its package, `Outer.Inner`."""
        package = self.descriptor.file.package
        return self.message.removeprefix(f"{package}.") if package else self.message


@dataclass
class IndexedReader:
    """Reads values that begin with the message's place in the writer's file: a count and numbers, or 0 for the first.

    A value of another message than the declared one is refused.
    """

    declared: Protobuf
    written: RegisteredSchema
    reader: LaneReader

    def read(self, values: Sequence[bytes], skip: int) -> Block:
        from streaming_jobs.formats.framing import gathered

        rows: dict[int, list[int]] = {}
        refused: dict[int, Refusal] = {}
        first = _read_index(values[0], skip) if values else None  # mostly all have the same
        begins = methodcaller("startswith", first, skip)
        if first is not None and self._verdict(first) is None and all(map(begins, values)):
            return self.reader.read(values, skip + len(first))
        for row, value in enumerate(values):
            index = _read_index(value, skip)
            refusal = _NO_INDEX if index is None else self._verdict(index)
            if refusal is not None:
                refused[row] = refusal
            else:
                rows.setdefault(skip + len(index or b""), []).append(row)
        pieces = [(chosen, self.reader.read([values[row] for row in chosen], at)) for at, chosen in rows.items()]
        return gathered(len(values), self.declared.schema, self.reader.names, pieces, refused)

    def _verdict(self, index: bytes) -> Refusal | None:
        if index not in self._verdicts:
            from streaming_jobs.formats.protobuf_schema import message_name

            name = message_name(self.written.text, _path(index))
            wrong = f"the record is a message {name or 'that its schema does not have'}, not {self.declared.local_name}"
            same = name == self.declared.local_name
            self._verdicts[index] = None if same else Refusal("incompatible_schema", wrong)
        return self._verdicts[index]

    @cached_property
    def _verdicts(self) -> dict[bytes, Refusal | None]:
        return {}


@dataclass(frozen=True)
class IndexedWriter:
    """Writes values after their message's place in its file."""

    payloads: BlockWriter
    index: bytes

    def write(self, rows: pa.RecordBatch) -> Written:
        made = self.payloads.write(rows)
        return Written([None if value is None else self.index + value for value in made.values], made.refused)


_NO_INDEX = Refusal("not_framed", "the place of the message in its file, which follows the id, is not there")
_DEEPEST = 100
"""Messages within each other."""


def _read_index(value: bytes, skip: int) -> bytes | None:
    """The bytes of a message's place; None if they are not there."""
    from streaming_jobs.formats.wire import Cursor  # here: a declaration needs no Arrow

    cursor = Cursor(value, skip)
    try:
        if not 0 <= (count := cursor.zigzag()) <= _DEEPEST:
            return None
        for _ in range(count):
            cursor.zigzag()
    except Refused:
        return None
    return value[skip : cursor.at]


def _path(index: bytes) -> tuple[int, ...]:
    from streaming_jobs.formats.wire import Cursor

    cursor = Cursor(index)
    return tuple(cursor.zigzag() for _ in range(cursor.zigzag())) or (0,)


def _index(descriptor: Descriptor) -> bytes:
    import numpy as np

    from streaming_jobs.formats.binary_columns import zigzags

    path: list[int] = []
    while descriptor is not None:
        above = descriptor.containing_type
        beside = descriptor.file.message_types_by_name if above is None else above.nested_types_by_name
        path.insert(0, list(beside).index(descriptor.name))
        descriptor = above
    return b"\0" if path == [0] else b"".join(zigzags(np.array([len(path), *path])).to_pylist())


def _declared(schema: object, message: str) -> tuple[bytes, str]:
    descriptor = getattr(schema, "DESCRIPTOR", None)
    if descriptor is not None:
        from streaming_jobs.formats.protobuf_schema import files_of

        return files_of(descriptor.file), str(descriptor.full_name)
    if isinstance(schema, Path):
        try:
            schema = schema.read_bytes()
        except OSError as error:
            raise UsageError(f"the descriptors {error.filename}: {error.strerror}", "name a file of protoc") from error
    if not isinstance(schema, bytes) or not message:
        raise UsageError(
            f"Protobuf has {type(schema).__name__} and the message '{message}'",
            "write Protobuf(order_pb2.Order), or Protobuf(Path('order.desc'), message='shop.Order')",
        )
    return schema, message
