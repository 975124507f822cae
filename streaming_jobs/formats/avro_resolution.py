"""The comparison of two Avro schemas: the writer's says which bytes come, the reader's which columns they become.

By the rules of Avro's specification ("Schema Resolution"), once per writer's schema. Beyond the specification:

    timestamps            are converted between units; a time with a zone is not one without
    decimals              may get more digits, with the same scale
    names of the writer   only their last part counts
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

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
    RecordField,
    Union,
    optional,
)
from streaming_jobs.formats.avro_steps import (
    Booleans,
    Choices,
    Constants,
    Decimals,
    Fields,
    Floats,
    Lists,
    Numbers,
    Step,
    Strings,
    Symbols,
    Unreadable,
)
from streaming_jobs.formats.json_columns import FIRST_DAY, FIRST_MICROSECOND, LAST_DAY, LAST_MICROSECOND


class Incompatible(Refused):
    """Records of the writer's schema cannot be read by the reader's: all of them are refused."""

    def __init__(self, words: str) -> None:
        super().__init__("incompatible_schema", words)


def steps(writer: Node, reader: Node, kind: pa.DataType) -> Fields:
    """The steps for records; `kind` is the struct of the reader's columns. Raises Incompatible."""
    made = _Comparison().step(writer, reader, kind)
    if not isinstance(made, Fields):
        raise Incompatible(f"the writer's schema is {writer}, not a record")
    return made


class _Comparison:
    """Compares two schemas; a skipped record has one step, since it may hold itself."""

    def __init__(self) -> None:
        self._skipped: dict[int, Fields] = {}

    def step(self, writer: Node, reader: Node, kind: pa.DataType) -> Step:
        if isinstance(writer, Union):
            return self._choices(writer, reader, kind)
        node, may_be_null = optional(reader)
        if writer == Primitive("null") and may_be_null:
            return Constants(kind)
        for of, compare in _COMPARED:
            if isinstance(node, of) and isinstance(writer, of):
                made: Step | None = compare(self, writer, node, kind)
                if made is not None:
                    return made
        raise Incompatible(f"the writer's schema has {writer}, the declared one {node}")

    def _choices(self, writer: Union, reader: Node, kind: pa.DataType) -> Choices:
        branches: list[Step] = []
        for each in writer.branches:
            try:
                branches.append(self.step(each, reader, kind))
            except Incompatible as error:
                branches.append(Unreadable(kind, error.verdict.detail))
        if all(isinstance(branch, Unreadable) for branch in branches):
            raise Incompatible(f"the writer's schema has {writer}, the declared one {reader}")
        return Choices(kind, branches)

    def primitive(self, writer: Primitive, reader: Primitive, kind: pa.DataType) -> Step | None:
        if writer.kind not in _READ_AS.get(reader.kind, (reader.kind,)):
            return None
        if _is_time(reader.logical) and _is_time(writer.logical):
            zoned = [not each.logical.startswith("local-") for each in (writer, reader)]
            return _times(writer, writer.logical, kind) if zoned[0] == zoned[1] else None
        if reader.logical == "decimal" or writer.logical == "decimal":
            digits = writer.logical == reader.logical and writer.scale == reader.scale
            return Decimals(kind) if digits and writer.precision <= reader.precision else None
        if _is_time(reader.logical):
            return _times(writer, reader.logical, kind)
        if reader.logical == "date":
            return Numbers(writer.kind, kind, FIRST_DAY, LAST_DAY)
        return _plain(writer.kind, kind)

    def fixed(self, writer: Fixed, reader: Fixed, kind: pa.DataType) -> Step | None:
        if writer.size != reader.size or not _same_name(writer, reader):
            return None
        if not reader.precision:
            return Strings(kind, reader.size)
        digits = 0 < writer.precision <= reader.precision and writer.scale == reader.scale
        return Decimals(kind, reader.size) if digits else None

    def enum(self, writer: Enum, reader: Enum, kind: pa.DataType) -> Step | None:
        if not _same_name(writer, reader):
            return None
        known = set(reader.symbols)
        return Symbols(kind, [each if each in known else reader.default for each in writer.symbols], writer.symbols)

    def array(self, writer: Array, reader: Array, kind: pa.DataType) -> Step:
        return Lists(kind, self._at("[]", writer.items, reader.items, kind.value_type))

    def map(self, writer: Map, reader: Map, kind: pa.DataType) -> Step:
        value = self._at("[].value", writer.values, reader.values, kind.value_type.field("value").type)
        return Lists(kind, Fields(kind.value_type, [("key", Strings(pa.string())), ("value", value)]))

    def record(self, writer: Record, reader: Record, kind: pa.DataType) -> Step | None:
        if not _same_name(writer, reader):
            return None
        wanted = {alias: each for each in reader.fields for alias in each.aliases}
        wanted |= {each.name: each for each in reader.fields}
        missing = {each.name: each for each in reader.fields}
        read: list[tuple[str, Step]] = []
        for written in writer.fields:
            field = wanted.get(written.name)
            if field is None or missing.pop(field.name, None) is None:
                read.append((f"{written.name} (skipped)", self.skipped(written.node)))
            else:
                inner = self._at(f".{field.name}", written.node, field.node, kind.field(field.name).type)
                read.append((field.name, inner))
        return Fields(kind, read, [(name, _default_of(each, kind.field(name).type)) for name, each in missing.items()])

    def _at(self, place: str, writer: Node, reader: Node, kind: pa.DataType) -> Step:
        try:
            return self.step(writer, reader, kind)
        except Incompatible as error:
            raise error.within(place) from None

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


def _default_of(field: RecordField, kind: pa.DataType) -> Constants:
    if field.default is NO_DEFAULT:
        raise Incompatible("the writer's schema lacks the field, which has no default").within(f".{field.name}")
    try:
        return Constants(kind, _default(field.node, field.default))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        words = f"the default is {field.default!r:.80}, and the type {field.node}"
        raise Incompatible(words).within(f".{field.name}") from error


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
    assert not isinstance(node, Union)
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
