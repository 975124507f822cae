"""Reading Protobuf messages: many side by side (`columns`), or one (`one`).

Fields are read side by side as serializers write them: in the order of their numbers, each once, the elements of a list
together. A message that is written otherwise is read by itself: there the last value counts, and parts of a message are
merged, as the encoding's specification says. A field in another encoding than its type has is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from streaming_jobs.declare.format import Refused
from streaming_jobs.formats.json_columns import FIRST_MICROSECOND, LAST_MICROSECOND
from streaming_jobs.formats.protobuf_schema import TIMESTAMP, WRAPPERS, is_repeated, is_required
from streaming_jobs.formats.wire import MALFORMED, MAX_DEPTH, Cursor, Lanes, listed, signed, signed_number, spread

VARINT, EIGHT, BYTES, BEGIN, END, FOUR = range(6)
"""The encodings of a field; `BEGIN` and `END` are around a group."""
_F = FieldDescriptor
_ROUNDS, _FEW = 64, 64
"""Elements of a list after which fewer lanes than these are read by themselves."""
_KEY_BYTES = 5
"""Of the number of a field; parsers refuse more, even if they are zeros."""
_SECOND, _NANOS = 1_000_000, 1_000_000_000


@dataclass
class Scalar:
    """A number, a text, or bytes; `wire` is the encoding, `of` and `one` make the column and the value."""

    type: pa.DataType
    wire: int
    absent: Any
    of: Callable[[Lanes], pa.Array]
    one: Callable[[Cursor], Any]


def _cut(bits: int, *, signed: bool) -> Callable[[int], int]:
    """A whole number cut to its lowest bits, as the specification has it."""

    def cut(number: int) -> int:
        low = number & ((1 << bits) - 1)
        return low - (1 << bits) if signed and low >> (bits - 1) else low

    return cut


def _numbers(convert: Callable[[np.ndarray], np.ndarray]) -> Callable[[Lanes], pa.Array]:
    return lambda lanes: pa.array(convert(lanes.varints()))


def _unsigned(numbers: np.ndarray) -> pa.Array:
    """64 bits without a sign as decimals."""
    halves = np.zeros((len(numbers), 2), np.uint64)
    halves[:, 0] = numbers
    return pa.Array.from_buffers(pa.decimal128(20, 0), len(numbers), [None, pa.py_buffer(halves.tobytes())])


def _fixed(kind: str, convert: Callable[[np.ndarray], Any] = pa.array) -> Callable[[Lanes], pa.Array]:
    return lambda lanes: convert(lanes.fixed(f"<{kind}"))


def _unpacked(code: str) -> Callable[[Cursor], Any]:
    return lambda cursor: struct.unpack(f"<{code}", cursor.take(struct.calcsize(f"<{code}")))[0]


def _varint(convert: Callable[[int], Any]) -> Callable[[Cursor], Any]:
    return lambda cursor: convert(cursor.varint())


def _texts(lanes: Lanes) -> pa.Array:
    return lanes.texts(*lanes.span(_lengths(lanes)))


def _bytes(lanes: Lanes) -> pa.Array:
    return lanes.slices(*lanes.span(_lengths(lanes)), pa.binary())


def _lengths(lanes: Lanes) -> np.ndarray:
    return lanes.varints().view(np.int64)


def _low_32(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.uint32)


_I32, _I64, _D20 = pa.int32(), pa.int64(), pa.decimal128(20, 0)
_SCALARS: dict[int, Scalar] = {
    _F.TYPE_INT32: Scalar(
        _I32, VARINT, 0, _numbers(lambda n: _low_32(n).view(np.int32)), _varint(_cut(32, signed=True))
    ),
    _F.TYPE_INT64: Scalar(_I64, VARINT, 0, _numbers(lambda n: n.view(np.int64)), _varint(_cut(64, signed=True))),
    _F.TYPE_UINT32: Scalar(
        _I64, VARINT, 0, _numbers(lambda n: _low_32(n).astype(np.int64)), _varint(_cut(32, signed=False))
    ),
    _F.TYPE_UINT64: Scalar(_D20, VARINT, 0, lambda lanes: _unsigned(lanes.varints()), _varint(Decimal)),
    _F.TYPE_SINT32: Scalar(
        _I32,
        VARINT,
        0,
        _numbers(lambda n: signed(_low_32(n).astype(np.uint64)).astype(np.int32)),
        _varint(lambda n: signed_number(n & 0xFFFFFFFF)),
    ),
    _F.TYPE_SINT64: Scalar(_I64, VARINT, 0, _numbers(signed), _varint(signed_number)),
    _F.TYPE_BOOL: Scalar(pa.bool_(), VARINT, False, _numbers(lambda n: n != 0), _varint(bool)),
    _F.TYPE_FIXED32: Scalar(_I64, FOUR, 0, _fixed("u4", lambda n: pa.array(n.astype(np.int64))), _unpacked("I")),
    _F.TYPE_FIXED64: Scalar(_D20, EIGHT, 0, _fixed("u8", _unsigned), lambda cursor: Decimal(_unpacked("Q")(cursor))),
    _F.TYPE_SFIXED32: Scalar(_I32, FOUR, 0, _fixed("i4"), _unpacked("i")),
    _F.TYPE_SFIXED64: Scalar(_I64, EIGHT, 0, _fixed("i8"), _unpacked("q")),
    _F.TYPE_FLOAT: Scalar(pa.float32(), FOUR, 0.0, _fixed("f4"), _unpacked("f")),
    _F.TYPE_DOUBLE: Scalar(pa.float64(), EIGHT, 0.0, _fixed("f8"), _unpacked("d")),
    _F.TYPE_STRING: Scalar(pa.string(), BYTES, "", _texts, lambda cursor: cursor.text(cursor.varint())),
    _F.TYPE_BYTES: Scalar(pa.binary(), BYTES, b"", _bytes, lambda cursor: cursor.take(cursor.varint())),
}


def _symbols(descriptor: FieldDescriptor) -> Scalar:
    """An enum as the names of its numbers."""
    names = {value.number: value.name for value in reversed(descriptor.enum_type.values)}
    numbers = np.array(sorted(names))
    texts = pa.array([names[number] for number in numbers.tolist()], pa.string())

    def of(lanes: Lanes) -> pa.Array:
        read = _low_32(lanes.varints()).view(np.int32).astype(np.int64)
        places = np.minimum(np.searchsorted(numbers, read), len(numbers) - 1)
        lanes.bad |= numbers[places] != read
        return texts.take(pa.array(places))

    def one(cursor: Cursor) -> str:
        number = _cut(32, signed=True)(cursor.varint())
        if number not in names:
            raise Refused("wrong_type", f"{number} is no value of the declared enum {descriptor.enum_type.full_name}")
        return str(names[number])

    default = None if is_repeated(descriptor) else descriptor.default_value
    absent = None if default is None else descriptor.enum_type.values_by_number[default].name
    return Scalar(pa.string(), VARINT, absent, of, one)


@dataclass
class Message:
    """A message within a message."""

    type: pa.DataType
    steps: MessageSteps
    wire: int = BYTES

    def of(self, lanes: Lanes) -> pa.Array:
        inner = lanes.within(*lanes.span(_lengths(lanes)))
        inner.depth += 1
        columns = self.steps.columns(inner)
        lanes.bad |= inner.bad | (inner.at != inner.end)
        return self.built(columns, lanes)

    def built(self, columns: dict[str, pa.Array], lanes: Lanes) -> pa.Array:
        """The column of the message, from those of its fields."""
        if self.steps.name == TIMESTAMP:
            seconds, nanos = np.asarray(columns["seconds"]), np.asarray(columns["nanos"]).astype(np.int64)
            outside = (seconds < FIRST_MICROSECOND // _SECOND) | (seconds > LAST_MICROSECOND // _SECOND)
            outside |= (nanos < 0) | (nanos >= _NANOS)
            lanes.bad |= outside
            return pa.array(np.where(outside, 0, seconds) * _SECOND + nanos // 1_000).view(self.type)
        if self.steps.name in WRAPPERS:
            return columns["value"]
        return pa.StructArray.from_arrays([columns[each.name] for each in self.type], fields=list(self.type))

    def one(self, cursor: Cursor) -> Any:
        return self.merged([cursor.take(cursor.varint())], cursor.depth)

    def merged(self, parts: Sequence[bytes], depth: int = 0) -> Any:
        """The value of a message that came in parts, each of which is a message; `depth` is that of what holds it."""
        cursors = [Cursor(part) for part in parts]
        for cursor in cursors:
            cursor.depth = depth
            cursor.deeper()
        values = self.steps.one(*cursors)
        if self.steps.name == TIMESTAMP:
            micros = values["seconds"] * _SECOND + values["nanos"] // 1_000
            if not (FIRST_MICROSECOND <= micros <= LAST_MICROSECOND and 0 <= values["nanos"] < _NANOS):
                raise Refused("out_of_range", f"{values['seconds']} s and {values['nanos']} ns are no time until 9999")
            return micros
        return values["value"] if self.steps.name in WRAPPERS else values

    @property
    def absent(self) -> Any:
        """The value of a map's entry without one."""
        return self.merged([b""])


@dataclass
class FieldStep:
    """A field of a message: its number, how it is read, and what it is if it is absent."""

    name: str
    number: int
    value: Scalar | Message
    repeated: bool
    required: bool
    present: bool
    """True if a record says whether the field is there; else it has its default."""
    absent: Any
    oneof: str
    type: pa.DataType

    def mark(self, wire: int) -> bytes:
        """The bytes before a value, as serializers write them."""
        key, octets = self.number << 3 | wire, bytearray()
        while key >= 0x80:
            octets.append(key & 0x7F | 0x80)
            key >>= 7
        return bytes([*octets, key])

    @property
    def packed(self) -> bool:
        """True if elements may lie in one run of bytes."""
        return self.repeated and self.value.wire != BYTES

    def begins(self, lanes: Lanes) -> np.ndarray:
        """True for lanes in which the field is next."""
        begins = lanes.begin_with(self.mark(self.value.wire))
        return begins | lanes.begin_with(self.mark(BYTES)) if self.packed else begins

    def column(self, lanes: Lanes, begins: np.ndarray) -> tuple[pa.Array, np.ndarray]:
        """The column, and the lanes that have the field: those of `begins` without a fault; none for a list."""
        if self.repeated:
            return self._list(lanes), np.zeros(len(lanes), np.bool_)
        mark = self.mark(self.value.wire)
        there = begins & ~lanes.bad
        if there.all():
            lanes.skip(len(mark))
            return self.value.of(lanes), there
        rows = np.flatnonzero(there)
        chosen = lanes.some(rows)
        chosen.skip(len(mark))
        piece = self.value.of(chosen)
        lanes.moved(rows, chosen)
        if self.required:
            lanes.bad |= ~there
        absent = None if self.present else pa.array([self.absent], self.type)
        return spread(piece, rows, len(lanes), absent), there

    def _list(self, lanes: Lanes) -> pa.Array:
        pieces: list[pa.Array] = []
        owners: list[np.ndarray] = []
        for wire in (self.value.wire, BYTES) if self.packed else (self.value.wire,):
            mark, rounds = self.mark(wire), 0
            rows = np.arange(len(lanes))
            while len(rows := rows[(lanes.begin_with(mark) & ~lanes.bad)[rows]]):
                rounds += 1
                if rounds > _ROUNDS and len(rows) < _FEW:
                    lanes.fail(rows)
                    break
                chosen = lanes.some(rows)
                chosen.skip(len(mark))
                if wire == self.value.wire:
                    pieces.append(self.value.of(chosen))
                    owners.append(rows)
                else:
                    self._run(chosen, rows, pieces, owners)
                lanes.moved(rows, chosen)
        return listed(pieces, owners, len(lanes), self.type)

    def _run(self, lanes: Lanes, rows: np.ndarray, pieces: list[pa.Array], owners: list[np.ndarray]) -> None:
        """The elements of a packed list, one of each lane after the other."""
        inner = lanes.within(*lanes.span(_lengths(lanes)))
        rounds = 0
        while len(open_ := np.flatnonzero((inner.at < inner.end) & ~inner.bad)):
            rounds += 1
            if rounds > _ROUNDS and len(open_) < _FEW:
                inner.fail(open_)
                break
            chosen = inner.some(open_)
            pieces.append(self.value.of(chosen))
            owners.append(rows[open_])
            inner.moved(open_, chosen)
        lanes.bad |= inner.bad


@dataclass
class MessageSteps:
    """Reads a message; `type` is the struct of its columns."""

    descriptor: Descriptor
    type: pa.DataType
    entry: bool = False
    """True for the entry of a map, whose fields are never absent."""
    fields: list[FieldStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        for each in sorted(self.descriptor.fields, key=lambda each: each.number):
            self.fields.append(self._field(each))
        self.numbers = np.array([each.number for each in self.fields])

    @property
    def name(self) -> str:
        return str(self.descriptor.full_name)

    def _field(self, each: FieldDescriptor) -> FieldStep:
        repeated = is_repeated(each)
        inner = each.message_type
        if self.type is None or not pa.types.is_struct(self.type):  # of a time or a wrapper: as its own fields are
            kind = _SCALARS[each.type].type
        else:
            kind = self.type.field(each.name).type
        value: Scalar | Message
        if inner is not None:
            element = kind.value_type if repeated else kind
            value = Message(element, MessageSteps(inner, element, inner.GetOptions().map_entry))
        else:
            value = _symbols(each) if each.type == _F.TYPE_ENUM else _SCALARS[each.type]
        if each.type == _F.TYPE_ENUM or (self.entry and inner is not None):
            absent = value.absent
        else:
            absent = None if inner is not None or repeated else each.default_value
        return FieldStep(
            name=each.name,
            number=each.number,
            value=value,
            repeated=repeated,
            required=is_required(each),
            present=each.has_presence and not is_required(each) and not self.entry,
            absent=absent,
            oneof=each.containing_oneof.name if each.containing_oneof is not None else "",
            type=kind,
        )

    def columns(self, lanes: Lanes) -> dict[str, pa.Array]:
        if lanes.depth > MAX_DEPTH:
            lanes.fail(np.ones(len(lanes), np.bool_))
        built: dict[str, pa.Array] = {}
        seen: dict[str, np.ndarray] = {}
        for each in self.fields:
            begins = each.begins(lanes)
            if not begins.all() and self._skip_unknown(lanes, each.number, begins):
                begins = each.begins(lanes)
            built[each.name], there = each.column(lanes, begins)
            if each.oneof:
                lanes.bad |= seen.get(each.oneof, False) & there
                seen[each.oneof] = seen.get(each.oneof, False) | there
        self._skip_unknown(lanes, 1 << 29, np.zeros(len(lanes), np.bool_))
        return built

    def _skip_unknown(self, lanes: Lanes, below: int, known: np.ndarray) -> bool:
        """Move on over fields that are not declared, with numbers below this one; not where `known` ones begin.

        True if a lane has moved.
        """
        moved = False
        while len(rows := np.flatnonzero((lanes.at < lanes.end) & ~lanes.bad & ~known)):
            chosen = lanes.some(rows)
            keys = chosen.varints()
            chosen.bad |= chosen.at - lanes.at[rows] > _KEY_BYTES
            numbers = (keys >> np.uint64(3)).view(np.int64)
            places = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
            unknown = (self.numbers[places] != numbers) & (numbers < below)
            if not unknown.any():
                return moved
            moved = True
            rows, wires = rows[unknown], (keys & np.uint64(7))[unknown]
            chosen = chosen.some(np.flatnonzero(unknown))
            chosen.bad |= (numbers[unknown] < 1) | (wires == BEGIN) | (wires > FOUR) | (wires == END)
            for wire, skip in _SKIPPED.items():
                if len(some := np.flatnonzero(wires == wire)):
                    inner = chosen.some(some)
                    skip(inner)
                    chosen.moved(some, inner)
            lanes.moved(rows, chosen)
        return moved

    @cached_property
    def _by_number(self) -> dict[int, FieldStep]:
        return {each.number: each for each in self.fields}

    def one(self, cursor: Cursor, *further: Cursor) -> dict[str, Any]:
        """The fields of a message, whose `further` parts follow the first one."""
        values: dict[str, Any] = {each.name: [] for each in self.fields if each.repeated}
        parts: dict[str, list[bytes]] = {}
        for part in (cursor, *further):
            self._read(part, values, parts)
        for each in self.fields:
            if each.name in parts:
                assert isinstance(each.value, Message)
                try:
                    values[each.name] = each.value.merged(parts[each.name], cursor.depth)
                except Refused as refused:
                    raise refused.within(f".{each.name}") from None
            elif each.name not in values:
                if each.required:
                    raise Refused("missing_field", "the field is required, and absent").within(f".{each.name}")
                values[each.name] = None if each.present else each.absent
        return values

    def _read(self, cursor: Cursor, values: dict[str, Any], parts: dict[str, list[bytes]]) -> None:
        """Add the fields of one part to `values`, and the bytes of its messages to `parts`."""
        while cursor.left:
            number, wire = _key(cursor)
            each = self._by_number.get(number)
            if each is None:
                _skip(cursor, number, wire, 0)
                continue
            for other in self.fields if each.oneof else ():
                if other.oneof == each.oneof and other is not each:
                    values.pop(other.name, None)
                    parts.pop(other.name, None)
            try:
                self._take(each, wire, cursor, values, parts)
            except Refused as refused:
                raise refused.within(f".{each.name}") from None

    @staticmethod
    def _take(
        each: FieldStep, wire: int, cursor: Cursor, values: dict[str, Any], parts: dict[str, list[bytes]]
    ) -> None:
        if each.packed and wire == BYTES:
            content = Cursor(cursor.take(cursor.varint()))
            while content.left:
                values[each.name].append(each.value.one(content))
        elif wire != each.value.wire:
            raise Refused("wrong_type", f"the field has encoding {wire}, its declared type {each.value.wire}")
        elif each.repeated:
            values[each.name].append(each.value.one(cursor))
        elif isinstance(each.value, Message):
            parts.setdefault(each.name, []).append(cursor.take(cursor.varint()))
        else:
            values[each.name] = each.value.one(cursor)


_SKIPPED: dict[int, Callable[[Lanes], Any]] = {
    VARINT: Lanes.varints,
    EIGHT: lambda lanes: lanes.skip(8),
    BYTES: lambda lanes: lanes.span(_lengths(lanes)),
    FOUR: lambda lanes: lanes.skip(4),
}


def _key(cursor: Cursor) -> tuple[int, int]:
    begin, key = cursor.at, cursor.varint()
    if cursor.at - begin > _KEY_BYTES:
        raise Refused(MALFORMED, f"the number of a field at byte {begin} has more than {_KEY_BYTES} bytes")
    if not 0 < key >> 3 < 1 << 29:
        raise Refused(MALFORMED, f"{key >> 3} is no number of a field, before byte {cursor.at}")
    return key >> 3, key & 7


def _skip(cursor: Cursor, number: int, wire: int, depth: int) -> None:
    """Move on over the value of a field that is not declared."""
    if wire == BEGIN and depth < MAX_DEPTH:
        while True:
            inner, encoding = _key(cursor)
            if encoding == END and inner == number:
                return
            _skip(cursor, inner, encoding, depth + 1)
    lengths: dict[int, Callable[[], int]] = {EIGHT: lambda: 8, FOUR: lambda: 4, BYTES: cursor.varint}
    if wire == VARINT:
        cursor.varint()
    elif wire in lengths:
        cursor.take(lengths[wire]())
    else:
        raise Refused(MALFORMED, f"field {number} has encoding {wire}, before byte {cursor.at}")
