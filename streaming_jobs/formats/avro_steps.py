"""Reading Avro by two schemas: the writer's says which bytes come, the reader's which columns they become.

`steps` compares both, by the rules of Avro's specification ("Schema Resolution"), once per writer's schema. A step
reads one type, of many records (`lanes`) or of one (`one`). Beyond the specification:

    timestamps            are converted between units; a time with a zone is not one without
    decimals              may get more digits, with the same scale
    names of the writer   only their last part counts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from streaming_jobs.declare.format import Refused
from streaming_jobs.formats.avro_schema import (
    MICROS_PER,
    NO_DEFAULT,
    Array,
    Enum,
    Fixed,
    Map,
    Node,
    Primitive,
    Record,
    SchemaFault,
    Union,
    optional,
)
from streaming_jobs.formats.json_columns import FIRST_DAY, FIRST_MICROSECOND, LAST_DAY, LAST_MICROSECOND
from streaming_jobs.formats.wire import MALFORMED, MAX_DEPTH, Cursor, Lanes

WRONG_TYPE, OUT_OF_RANGE = "wrong_type", "out_of_range"
_WIDE = 64
"""Lanes, and elements of each, from which on arrays are read side by side."""
_MOST_EMPTY = 1_000
"""Elements of an array that have no bytes."""
_INT = (-(1 << 31), (1 << 31) - 1)


class Step(Protocol):
    """Reads one type of the writer. `type` is that of the column; None: the bytes are skipped."""

    type: pa.DataType | None

    def lanes(self, lanes: Lanes) -> pa.Array:
        """The column; what it has for a bad lane means nothing."""

    def one(self, cursor: Cursor) -> Any:
        """The value, as Arrow takes it for this type; raises Refused."""


@dataclass
class Numbers:
    """An int or a long, multiplied and divided; outside of the bounds it is refused."""

    kind: str
    type: pa.DataType | None
    first: int
    last: int
    factor: int = 1
    divisor: int = 1

    def lanes(self, lanes: Lanes) -> pa.Array:
        numbers = lanes.zigzags()
        first, last = -(-self.first * self.divisor // self.factor), self.last * self.divisor // self.factor
        if self.kind == "int":
            first, last = max(first, _INT[0]), min(last, _INT[1])
        lowest, highest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        if first > lowest or last < highest:
            outside = (numbers < max(first, lowest)) | (numbers > min(last, highest))
            if outside.any():
                lanes.bad |= outside
                numbers = np.where(outside, 0, numbers)
        if self.type is None:
            return None
        if self.factor > 1 or self.divisor > 1:
            numbers = numbers * self.factor // self.divisor
        if pa.types.is_date32(self.type):
            return pa.array(numbers.astype(np.int32)).view(self.type)
        if pa.types.is_timestamp(self.type):
            return pa.array(numbers).view(self.type)
        return pa.array(numbers.astype(self.type.to_pandas_dtype()))

    def one(self, cursor: Cursor) -> Any:
        read = cursor.zigzag()
        number = read * self.factor // self.divisor
        if (self.kind == "int" and not _INT[0] <= read <= _INT[1]) or not self.first <= number <= self.last:
            raise Refused(OUT_OF_RANGE, f"{read} is out of the range of {self._words}")
        if self.type is not None and pa.types.is_floating(self.type):
            return np.int64(number).astype(self.type.to_pandas_dtype())
        return number

    @property
    def _words(self) -> str:
        temporal = self.type is not None and pa.types.is_temporal(self.type)
        return "the years 1 to 9999" if temporal else self.kind


@dataclass
class Floats:
    """A float or a double, of `width` bytes."""

    width: int
    type: pa.DataType | None

    @property
    def kind(self) -> str:
        return f"<f{self.width}"

    def lanes(self, lanes: Lanes) -> pa.Array:
        return self.of(lanes.fixed(self.kind))

    def of(self, numbers: np.ndarray) -> pa.Array:
        if self.type is None:
            return None
        with np.errstate(invalid="ignore"):  # of a NaN
            return pa.array(numbers.astype(self.type.to_pandas_dtype()))

    def one(self, cursor: Cursor) -> float:
        return float(np.frombuffer(cursor.take(self.width), self.kind)[0])


@dataclass
class Booleans:
    type: pa.DataType | None

    def lanes(self, lanes: Lanes) -> pa.Array:
        octets = lanes.octets()
        lanes.skip(1)
        lanes.bad |= octets > 1
        return None if self.type is None else pa.array(octets == 1)

    def one(self, cursor: Cursor) -> bool:
        (octet,) = cursor.take(1)
        if octet > 1:
            raise Refused(MALFORMED, f"byte {octet} is no boolean")
        return octet == 1


@dataclass
class Strings:
    """Bytes or a text; of `size` bytes, if it is fixed."""

    type: pa.DataType | None
    size: int | None = None

    def lanes(self, lanes: Lanes) -> pa.Array:
        begin, end = lanes.span(lanes.zigzags() if self.size is None else self.size)
        if self.type is None:
            return None
        return lanes.texts(begin, end) if self.type == pa.string() else lanes.slices(begin, end, self.type)

    def one(self, cursor: Cursor) -> Any:
        length = cursor.zigzag() if self.size is None else self.size
        return cursor.text(length) if self.type == pa.string() else cursor.take(length)


@dataclass
class Decimals:
    """A decimal: a whole number, the highest byte first, in bytes or in `size` of them."""

    type: pa.DataType
    size: int | None = None

    def lanes(self, lanes: Lanes) -> pa.Array:
        begin, end = lanes.span(lanes.zigzags() if self.size is None else self.size)
        lengths = end - begin
        octets = lanes.before(end, 16)
        negative = octets[np.arange(len(lanes)), 16 - np.clip(lengths, 1, 16)] >= 0x80
        octets = np.where(np.arange(16) < 16 - lengths[:, None], np.where(negative, 255, 0)[:, None], octets)
        lanes.bad |= (lengths < 1) | (lengths > 16)
        octets[lanes.bad] = 0
        array = self._array(octets)
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:  # more digits
            whole = (int.from_bytes(row.astype(np.uint8).tobytes(), "big", signed=True) for row in octets)
            wrong = np.array([abs(number) >= 10**self.type.precision for number in whole])
            lanes.bad |= wrong
            octets[wrong] = 0
            array = self._array(octets)
        return array

    def _array(self, octets: np.ndarray) -> pa.Array:
        content = octets[:, ::-1].astype(np.uint8).tobytes()
        return pa.Array.from_buffers(self.type, len(octets), [None, pa.py_buffer(content)])

    def one(self, cursor: Cursor) -> Decimal:
        content = cursor.take(cursor.zigzag() if self.size is None else self.size)
        if not content:
            raise Refused(MALFORMED, "a decimal has no bytes")
        number = int.from_bytes(content, "big", signed=True)
        if abs(number) >= 10**self.type.precision:
            raise Refused(OUT_OF_RANGE, f"a decimal of {len(content)} bytes has more than {self.type.precision} digits")
        return Decimal(f"{number}E-{self.type.scale}")


@dataclass
class Symbols:
    """A symbol of an enum, as text; None for one that the reader's schema does not have."""

    type: pa.DataType | None
    symbols: Sequence[str | None]
    written: Sequence[str]

    def lanes(self, lanes: Lanes) -> pa.Array:
        index = lanes.zigzags()
        known = np.array([*(symbol is not None for symbol in self.symbols), False])
        index = np.where((index < 0) | (index >= len(self.symbols)), len(self.symbols), index)
        lanes.bad |= ~known[index]
        return None if self.type is None else pa.array([*self.symbols, None], pa.string()).take(pa.array(index))

    def one(self, cursor: Cursor) -> str:
        index = cursor.zigzag()
        if not 0 <= index < len(self.symbols):
            raise Refused(MALFORMED, f"symbol {index} of an enum of {len(self.symbols)}")
        symbol = self.symbols[index]
        if symbol is None:
            raise Refused(WRONG_TYPE, f"the symbol '{self.written[index]}' is not in the declared enum")
        return symbol


@dataclass
class Constants:
    """No bytes: a null, or the default of a field that the writer does not have."""

    type: pa.DataType | None
    value: Any = None

    def lanes(self, lanes: Lanes) -> pa.Array:
        if self.type is None or self.value is None:
            return None if self.type is None else pa.nulls(len(lanes), self.type)
        return pa.repeat(pa.array([self.value], self.type)[0], len(lanes))

    def one(self, cursor: Cursor) -> Any:  # noqa: ARG002 - there are none
        return self.value


@dataclass
class Unreadable:
    """A branch of the writer's union that the reader's schema does not have."""

    type: pa.DataType | None
    words: str

    def lanes(self, lanes: Lanes) -> pa.Array:
        lanes.fail(np.ones(len(lanes), np.bool_))
        return None if self.type is None else pa.nulls(len(lanes), self.type)

    def one(self, cursor: Cursor) -> Any:  # noqa: ARG002 - they are not read
        raise Refused(WRONG_TYPE, self.words)


@dataclass
class Choices:
    """A union of the writer: the number of a branch, then the branch."""

    type: pa.DataType | None
    branches: Sequence[Step]

    def lanes(self, lanes: Lanes) -> pa.Array:
        if not len(lanes):  # of a record that holds itself there is no end
            return None if self.type is None else pa.nulls(0, self.type)
        index = lanes.zigzags()
        lanes.fail((index < 0) | (index >= len(self.branches)))
        pieces, places, size = [], np.full(len(lanes), -1), 0
        for number, branch in enumerate(self.branches):
            rows = np.flatnonzero((index == number) & ~lanes.bad)
            if len(rows) == len(lanes):
                return branch.lanes(lanes)
            if not len(rows) or (isinstance(branch, Constants) and branch.value is None):
                continue
            chosen = lanes.some(rows)
            pieces.append(branch.lanes(chosen))
            lanes.moved(rows, chosen)
            places[rows] = np.arange(size, size + len(rows))
            size += len(rows)
        if self.type is None:
            return None
        if not pieces:
            return pa.nulls(len(lanes), self.type)
        return pa.concat_arrays(pieces).take(pa.array(places, mask=places < 0))

    def one(self, cursor: Cursor) -> Any:
        index = cursor.zigzag()
        if not 0 <= index < len(self.branches):
            raise Refused(MALFORMED, f"branch {index} of a union of {len(self.branches)}")
        return self.branches[index].one(cursor)


@dataclass
class Lists:
    """An array or a map: blocks of elements, each with their number, until an empty one."""

    type: pa.DataType | None
    element: Step

    def lanes(self, lanes: Lanes) -> pa.Array:
        pieces, owners = [], []
        rest = np.zeros(len(lanes), np.int64)
        active, rounds = np.arange(len(lanes)), 0
        while len(active := active[~lanes.bad[active]]):
            if len(fresh := active[rest[active] == 0]):
                rest[fresh] = self._counts(lanes, fresh)
                active = active[rest[active] > 0]
            if rounds >= _WIDE > len(active):  # a cursor is quicker
                lanes.fail(active)
            elif len(active):
                chosen = lanes.some(active)
                if isinstance(self.element, Floats):
                    count, width = rest[active], self.element.width
                    begin, end = chosen.span(count * width)
                    count = (end - begin) // width
                    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
                    pieces.append(self.element.of(chosen.numbers_at(np.repeat(begin, count) + within * width, f"<f{width}")))
                    owners.append(np.repeat(active, count))
                    rest[active] = 0
                else:
                    pieces.append(self.element.lanes(chosen))
                    owners.append(active)
                    rest[active] -= 1
                lanes.moved(active, chosen)
                rounds += 1
        if self.type is None:
            return None
        owner = np.concatenate([*owners, np.zeros(0, np.int64)])
        values = pa.concat_arrays(pieces) if pieces else pa.array([], self.type.value_type)
        if len(pieces) > 1:
            values = values.take(pa.array(np.argsort(owner, kind="stable")))
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(lanes)))])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=self.type)

    @staticmethod
    def _counts(lanes: Lanes, rows: np.ndarray) -> np.ndarray:
        """The number of elements in the next block of these lanes; 0: there is none."""
        chosen = lanes.some(rows)
        counts = chosen.zigzags()
        # A negative count is followed by the size of the block, which writers rarely give: a cursor checks both.
        chosen.fail((counts < 0) | (counts > chosen.end - chosen.at))
        counts[chosen.bad] = 0
        lanes.moved(rows, chosen)
        return counts

    def one(self, cursor: Cursor) -> list[Any]:
        values: list[Any] = []
        while count := cursor.zigzag():
            sized = count < 0
            end = cursor.zigzag() + cursor.at if sized else 0
            count = abs(count)
            if count > max(cursor.left, _MOST_EMPTY - len(values)):
                raise Refused(MALFORMED, f"expected {count} elements at byte {cursor.at}, found {cursor.left} bytes")
            for _ in range(count):
                try:
                    values.append(self.element.one(cursor))
                except Refused as refused:
                    raise refused.within(f"[{len(values)}]") from None
            if sized and cursor.at != end:
                raise Refused(MALFORMED, f"a block of elements ends at byte {cursor.at}, not {end}, as its size says")
        return values


@dataclass
class Fields:
    """A record: the writer's fields in their order, with their place in the columns; then the defaults."""

    type: pa.DataType | None
    read: Sequence[tuple[str, Step]]
    added: Sequence[tuple[str, Step]] = ()

    def columns(self, lanes: Lanes) -> dict[str, pa.Array]:
        """By name the columns of the fields that are not skipped."""
        built = {name: step.lanes(lanes) for name, step in (*self.read, *self.added)}
        return {name: array for name, array in built.items() if array is not None}

    def lanes(self, lanes: Lanes) -> pa.Array:
        lanes.depth += 1
        if lanes.depth > MAX_DEPTH:
            lanes.fail(np.ones(len(lanes), np.bool_))
            return None if self.type is None else pa.nulls(len(lanes), self.type)
        columns = self.columns(lanes)
        lanes.depth -= 1
        if self.type is None:
            return None
        return pa.StructArray.from_arrays([columns[each.name] for each in self.type], fields=list(self.type))

    def one(self, cursor: Cursor) -> dict[str, Any]:
        cursor.deeper()
        values = {}
        for name, step in (*self.read, *self.added):
            try:
                values[name] = step.one(cursor)
            except Refused as refused:
                raise refused.within(f".{name}") from None
        cursor.depth -= 1
        return values


# The comparison of two schemas.


class Incompatible(Exception):
    """Records of the writer's schema cannot be read by the reader's, with the reason in words."""


def steps(writer: Node, reader: Node, kind: pa.DataType) -> Fields:
    """The steps for records; `kind` is the struct of the reader's columns. Raises Incompatible."""
    made = _Comparison().step(writer, reader, kind, "the record")
    if not isinstance(made, Fields):
        raise Incompatible(f"the writer's schema is {writer}, not a record")
    return made


class _Comparison:
    """Compares two schemas; a skipped record has one step, since it may hold itself."""

    def __init__(self) -> None:
        self._skipped: dict[int, Fields] = {}

    def step(self, writer: Node, reader: Node, kind: pa.DataType, where: str) -> Step:
        if isinstance(writer, Union):
            return Choices(kind, [self._branch(each, reader, kind, where) for each in writer.branches])
        node, may_be_null = optional(reader)
        if writer == Primitive("null"):
            if may_be_null:
                return Constants(kind)
            raise Incompatible(f"{where} is null in the writer's schema, and {node} in the declared one")
        for of, compare in _COMPARED:
            if isinstance(node, of) and isinstance(writer, of):
                made: Step | None = compare(self, writer, node, kind, where)
                if made is not None:
                    return made
        raise Incompatible(f"{where} is {writer} in the writer's schema, and {node} in the declared one")

    def _branch(self, writer: Node, reader: Node, kind: pa.DataType, where: str) -> Step:
        try:
            return self.step(writer, reader, kind, where)
        except Incompatible as error:
            return Unreadable(kind, str(error))

    def primitive(self, writer: Primitive, reader: Primitive, kind: pa.DataType, where: str) -> Step | None:
        if writer.kind not in _READ_AS.get(reader.kind, (reader.kind,)):
            return None
        if _is_time(reader.logical) and _is_time(writer.logical):
            if writer.logical.startswith("local-") != reader.logical.startswith("local-"):
                return None
            return _times(writer, writer.logical, kind)
        if reader.logical == "decimal" or writer.logical == "decimal":
            digits = writer.logical == reader.logical and writer.scale == reader.scale
            return Decimals(kind) if digits and writer.precision <= reader.precision else None
        if _is_time(reader.logical):
            return _times(writer, reader.logical, kind)
        if reader.logical == "date":
            return Numbers(writer.kind, kind, FIRST_DAY, LAST_DAY) if writer.kind == "int" else None
        return _plain(writer.kind, kind)

    def fixed(self, writer: Fixed, reader: Fixed, kind: pa.DataType, where: str) -> Step | None:
        if writer.size != reader.size or not _same_name(writer, reader):
            return None
        if not reader.precision:
            return Strings(kind, reader.size)
        digits = 0 < writer.precision <= reader.precision and writer.scale == reader.scale
        return Decimals(kind, reader.size) if digits else None

    def enum(self, writer: Enum, reader: Enum, kind: pa.DataType, where: str) -> Step | None:
        if not _same_name(writer, reader):
            return None
        known = set(reader.symbols)
        return Symbols(kind, [each if each in known else reader.default for each in writer.symbols], writer.symbols)

    def array(self, writer: Array, reader: Array, kind: pa.DataType, where: str) -> Step:
        return Lists(kind, self.step(writer.items, reader.items, kind.value_type, f"an element of {where}"))

    def map(self, writer: Map, reader: Map, kind: pa.DataType, where: str) -> Step:
        value = self.step(writer.values, reader.values, kind.value_type.field("value").type, f"a value of {where}")
        return Lists(kind, Fields(kind.value_type, [("key", Strings(pa.string())), ("value", value)]))

    def record(self, writer: Record, reader: Record, kind: pa.DataType, where: str) -> Step | None:
        if not _same_name(writer, reader):
            return None
        wanted = {name: each for each in reader.fields for name in (*each.aliases, each.name)}
        wanted |= {each.name: each for each in reader.fields}
        read, found = [], set()
        for each in writer.fields:
            field = wanted.get(each.name)
            if field is None or field.name in found:
                read.append((f"{each.name} (skipped)", self.skipped(each.node)))
                continue
            found.add(field.name)
            inner = kind.field(field.name).type
            read.append((field.name, self.step(each.node, field.node, inner, f"field '{field.name}'")))
        added = []
        for field in reader.fields:
            if field.name in found:
                continue
            if field.default is NO_DEFAULT:
                raise Incompatible(f"the writer's schema lacks the field '{field.name}', which has no default")
            inner = kind.field(field.name).type
            added.append((field.name, Constants(inner, default_value(field.node, field.default, field.name))))
        return Fields(kind, read, added)

    def skipped(self, node: Node) -> Step:
        """The step that only moves on."""
        if isinstance(node, Record):
            if id(node) not in self._skipped:
                fields: list[tuple[str, Step]] = []
                self._skipped[id(node)] = Fields(None, fields)
                fields += [(each.name, self.skipped(each.node)) for each in node.fields]
            return self._skipped[id(node)]
        if isinstance(node, Union):
            return Choices(None, [self.skipped(each) for each in node.branches])
        if isinstance(node, Array):
            return Lists(None, self.skipped(node.items))
        if isinstance(node, Map):
            return Lists(None, Fields(None, [("key", Strings(None)), ("value", self.skipped(node.values))]))
        if isinstance(node, Enum):
            return Symbols(None, node.symbols, node.symbols)
        if isinstance(node, Fixed):
            return Strings(None, node.size)
        return Constants(None) if node.kind == "null" else _plain(node.kind, None)


_COMPARED: tuple[tuple[type, Callable[..., Step | None]], ...] = (
    (Primitive, _Comparison.primitive),
    (Fixed, _Comparison.fixed),
    (Enum, _Comparison.enum),
    (Array, _Comparison.array),
    (Map, _Comparison.map),
    (Record, _Comparison.record),
)
_READ_AS = {
    "long": ("int", "long"),
    "float": ("int", "long", "float"),
    "double": ("int", "long", "float", "double"),
    "string": ("bytes", "string"),
    "bytes": ("bytes", "string"),
}
"""Types of a writer that are read as another type."""


def _is_time(logical: str) -> bool:
    return "timestamp-" in logical


def _times(writer: Primitive, logical: str, kind: pa.DataType) -> Numbers:
    factor, divisor = MICROS_PER[logical.rpartition("-")[2]]
    return Numbers(writer.kind, kind, FIRST_MICROSECOND, LAST_MICROSECOND, factor, divisor)


def _plain(written: str, kind: pa.DataType | None) -> Step:
    if written in ("int", "long"):
        return Numbers(written, kind, -(1 << 63), (1 << 63) - 1)
    if written in ("float", "double"):
        return Floats(4 if written == "float" else 8, kind)
    return Booleans(kind) if written == "boolean" else Strings(kind)


def _same_name(writer: Fixed | Enum | Record, reader: Fixed | Enum | Record) -> bool:
    last = writer.name.rpartition(".")[2]
    return last in (name.rpartition(".")[2] for name in (reader.name, *reader.aliases))


def default_value(node: Node, value: Any, where: str) -> Any:
    """The value of a default, which is JSON, as Arrow takes it; raises Incompatible."""
    try:
        return _default(node, value)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise Incompatible(f"the default of field '{where}' is {value!r:.80}, not {node}") from error


def _default(node: Node, value: Any) -> Any:
    node, may_be_null = optional(node)
    if value is None:
        if may_be_null:
            return None
        raise TypeError
    if isinstance(node, Record):
        given = {each.name: value.get(each.name, each.default) for each in node.fields}
        return {each.name: _default(each.node, given[each.name]) for each in node.fields}
    if isinstance(node, Array):
        return [_default(node.items, each) for each in value]
    if isinstance(node, Map):
        return [{"key": key, "value": _default(node.values, each)} for key, each in value.items()]
    if isinstance(node, Enum):
        return node.symbols[node.symbols.index(value)]
    if isinstance(node, Fixed) or node.kind == "bytes":
        content = value.encode("latin-1")
        if not node.precision:
            return content
        return Decimal(f"{int.from_bytes(content, 'big', signed=True)}E-{node.scale}")
    if _is_time(node.logical):
        factor, divisor = MICROS_PER[node.logical.rpartition("-")[2]]
        return value * factor // divisor
    return _PYTHON[node.kind](value)


_PYTHON: dict[str, Callable[[Any], Any]] = {
    "boolean": bool,
    "int": int,
    "long": int,
    "float": float,
    "double": float,
    "string": str,
}
