"""Avro schemas: the text becomes nodes, and the nodes of a reader's schema become the types of a stream's columns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

NO_DEFAULT = object()
PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
MICROS_PER = {"millis": (1_000, 1), "micros": (1, 1), "nanos": (1, 1_000)}
"""By unit the factor and the divisor that make microseconds of a number."""
_LOGICAL = {
    **{f"{local}timestamp-{unit}": "long" for local in ("", "local-") for unit in MICROS_PER},
    "date": "int",
}
_MOST_DIGITS = 38
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SchemaFault(ValueError):
    """A text that is no Avro schema, or one that no column can have, in words."""


@dataclass(frozen=True)
class Primitive:
    """One of `PRIMITIVES`; `logical` only where it decides the column's type."""

    kind: str
    logical: str = ""
    precision: int = 0
    scale: int = 0

    def __str__(self) -> str:
        return self.logical or self.kind


@dataclass(frozen=True)
class Fixed:
    name: str
    size: int
    precision: int = 0
    """Of a decimal; 0: bytes."""
    scale: int = 0
    aliases: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Enum:
    name: str
    symbols: tuple[str, ...]
    default: str | None = None
    aliases: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Array:
    items: Node

    def __str__(self) -> str:
        return "array"


@dataclass(frozen=True)
class Map:
    values: Node

    def __str__(self) -> str:
        return "map"


@dataclass(frozen=True)
class Union:
    branches: tuple[Node, ...]

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.branches))}]"


@dataclass(frozen=True)
class RecordField:
    name: str
    node: Node
    default: Any = NO_DEFAULT
    aliases: tuple[str, ...] = ()


@dataclass(eq=False)
class Record:
    """A record; one that holds itself is in its own fields."""

    name: str
    fields: list[RecordField] = field(default_factory=list, repr=False)
    aliases: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


Node = Primitive | Fixed | Enum | Array | Map | Union | Record


def parsed(text: str, references: Mapping[str, str] | None = None) -> Node:
    """The node of a schema; `references` has texts of further schemas, whose types it uses. Raises SchemaFault."""
    parser = _Parser()
    try:
        for further in (references or {}).values():
            parser.node(_json(further), "")
        return parser.node(_json(text), "")
    except (TypeError, AttributeError) as error:
        raise SchemaFault(f"the schema has a part of another type than it should: {error}") from error
    except RecursionError as error:
        raise SchemaFault("the schema is nested too deeply") from error


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        if text in PRIMITIVES:
            return text
        raise SchemaFault(f"the schema is not JSON: {error}") from error


class _Parser:
    def __init__(self) -> None:
        self.named: dict[str, Node] = {}

    def node(self, declared: Any, space: str) -> Node:
        if isinstance(declared, list):
            branches = tuple(self.node(each, space) for each in declared)
            if not branches or any(isinstance(each, Union) for each in branches):
                raise SchemaFault("a union has no type, or another union in it")
            return Union(branches)
        if isinstance(declared, str):
            return self._by_name(declared, space)
        if not isinstance(declared, dict) or "type" not in declared:
            raise SchemaFault(f"{str(declared)[:80]} is no type")
        kind = declared["type"]
        if isinstance(kind, (dict, list)):
            return self.node(kind, space)
        if kind in ("record", "error", "enum", "fixed"):
            return self._type_with_name(kind, declared, space)
        if kind == "array":
            return Array(self.node(_part(declared, "items"), space))
        if kind == "map":
            return Map(self.node(_part(declared, "values"), space))
        node = self._by_name(kind, space)
        return _with_logical_type(node, declared) if isinstance(node, Primitive) else node

    def _by_name(self, name: str, space: str) -> Node:
        if name in PRIMITIVES:
            return Primitive(name)
        for full in (_full(name, space), name):
            if full in self.named:
                return self.named[full]
        raise SchemaFault(f"the type '{str(name)[:80]}' is unknown")

    def _type_with_name(self, kind: str, declared: dict[str, Any], space: str) -> Node:
        name = _part(declared, "name")
        full = _full(str(name), declared.get("namespace", space) if "." not in str(name) else "")
        if not all(_NAME.fullmatch(part) for part in full.split(".")):
            raise SchemaFault(f"{full!r:.80} is no name of a type")
        if full in self.named:
            raise SchemaFault(f"the type {full} is declared twice")
        aliases = tuple(map(str, declared.get("aliases") or ()))
        if kind == "enum":
            symbols = tuple(map(str, _part(declared, "symbols")))
            if not symbols or len(set(symbols)) < len(symbols):
                raise SchemaFault(f"the enum {full} has no symbol, or one twice")
            self.named[full] = Enum(full, symbols, declared.get("default"), aliases)
        elif kind == "fixed":
            size = _part(declared, "size")
            if not isinstance(size, int) or size < 0:
                raise SchemaFault(f"the size of {full} is {size!r:.80}")
            precision, scale = _decimal(declared)
            self.named[full] = Fixed(full, size, precision, scale, aliases)
        else:
            record = self.named[full] = Record(full, aliases=aliases)
            record.fields += [self._field(each, full.rpartition(".")[0]) for each in _part(declared, "fields")]
            names = [each.name for each in record.fields]
            if len(set(names)) < len(names):
                raise SchemaFault(f"the record {full} has a field twice")
        return self.named[full]

    def _field(self, declared: Any, space: str) -> RecordField:
        if not isinstance(declared, dict):
            raise SchemaFault(f"{str(declared)[:80]} is no field")
        name, node = str(_part(declared, "name")), self.node(_part(declared, "type"), space)
        aliases = tuple(map(str, declared.get("aliases") or ()))
        return RecordField(name, node, declared.get("default", NO_DEFAULT), aliases)


def _part(declared: dict[str, Any], name: str) -> Any:
    if name not in declared:
        raise SchemaFault(f"a type without '{name}': {str(declared)[:80]}")
    return declared[name]


def _full(name: str, space: Any) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _with_logical_type(node: Primitive, declared: dict[str, Any]) -> Primitive:
    """A logical type that is unknown, or that its type cannot have, is none: so says Avro's specification."""
    logical = str(declared.get("logicalType", ""))
    if _LOGICAL.get(logical) == node.kind:
        return Primitive(node.kind, logical)
    if node.kind == "bytes":
        precision, scale = _decimal(declared)
        return Primitive("bytes", "decimal" if precision else "", precision, scale)
    return node


def _decimal(declared: dict[str, Any]) -> tuple[int, int]:
    precision, scale = declared.get("precision", 0), declared.get("scale", 0)
    fits = isinstance(precision, int) and isinstance(scale, int) and precision >= 1 and 0 <= scale <= precision
    return (precision, scale) if declared.get("logicalType") == "decimal" and fits else (0, 0)


def optional(node: Node) -> tuple[Node, bool]:
    """The type of a reader's node without null, and True if null is allowed; raises SchemaFault for other unions."""
    if not isinstance(node, Union):
        return node, False
    others = [each for each in node.branches if each != Primitive("null")]
    if len(others) != 1:
        raise SchemaFault(f"{node} is a union of several types; a column has one, or null")
    return others[0], len(others) < len(node.branches)


def columns_of(node: Node) -> StructType:
    """The columns of a reader's schema; raises SchemaFault for a type that no column can have."""
    if not isinstance(node, Record):
        raise SchemaFault(f"the schema is {node}, not a record")
    return _struct(node, ())


def _struct(record: Record, within: tuple[Record, ...]) -> StructType:
    if record in within:
        raise SchemaFault(f"the record {record} holds itself, which no column can")
    if not record.fields:
        raise SchemaFault(f"the record {record} has no field")
    names = [each.name.lower() for each in record.fields]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SchemaFault(f"the record {record} has several fields named {sorted(twice)}, if case is ignored")
    fields = []
    for each in record.fields:
        node, may_be_null = optional(each.node)
        fields.append(StructField(each.name, _type(node, f"field '{each.name}'", (*within, record)), may_be_null))
    return StructType(fields)


def _type(node: Node, where: str, within: tuple[Record, ...]) -> DataType:
    if isinstance(node, Record):
        return _struct(node, within)
    if isinstance(node, Enum):
        return StringType()
    if isinstance(node, Array):
        items, may_be_null = optional(node.items)
        return ArrayType(_type(items, f"an element of {where}", within), may_be_null)
    if isinstance(node, Map):
        values, may_be_null = optional(node.values)
        value = StructField("value", _type(values, f"a value of {where}", within), may_be_null)
        return ArrayType(StructType([StructField("key", StringType(), False), value]), False)
    if isinstance(node, Union):
        raise SchemaFault(f"{where} is a union within a union")
    if node.precision:
        if node.precision > _MOST_DIGITS:
            raise SchemaFault(f"{where} has {node.precision} digits; a decimal has {_MOST_DIGITS} at most")
        return DecimalType(node.precision, node.scale)
    if isinstance(node, Fixed):
        return BinaryType()
    if node.kind == "null":
        raise SchemaFault(f"{where} is always null")
    if node.logical.startswith("local-"):
        return TimestampNTZType()
    return _COLUMNS.get(node.logical or node.kind, TimestampType())


_COLUMNS: dict[str, DataType] = {
    "date": DateType(),
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "bytes": BinaryType(),
    "string": StringType(),
}
