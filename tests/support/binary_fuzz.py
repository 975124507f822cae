"""Random and broken binary records: the quick reading against the exact one, and both against another library.

    python -m tests.support.binary_fuzz --records 1000000 [--seed 1] [--format protobuf]

Schemas, their evolution, records, and what breaks them are made from the seed. Ends with 1 and prints the input where
a block's reading and that of its records differ, where a good record differs from what the other library reads (of
Avro: fastavro; of Protobuf: Google's), where a written row is not read back, or where something raises.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa

from streaming_jobs.declare.format import RegisteredSchema
from streaming_jobs.formats.avro import Avro
from streaming_jobs.formats.framing import WithId
from streaming_jobs.formats.lane_reader import LaneReader
from tests.support.json_fuzz import Findings

_SIZES = (1, 2, 7, 50, 300, 1000)
_TEXTS = ("", "a", "größer 😀", "x" * 200, "customer-17", "\x00")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def broken(value: bytes, chance: random.Random) -> bytes:
    """The value with some accidents of its bytes."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randint(0, len(value))
        end = min(len(value), at + chance.choice((0, 1, 1, 2, 9)))
        put = chance.choice((b"", b"\0", b"\xff", b"\x80", b"\x02", chance.randbytes(chance.choice((1, 1, 2, 10)))))
        kind = chance.random()
        if kind < 0.25:
            value = value[:at]
        elif kind < 0.35:
            value = value + put
        elif kind < 0.45:
            value = value[:at] + value[at:end] + value[at:]
        else:
            value = value[:at] + put + value[end:]
    return value


def compared(
    reader: LaneReader, values: Sequence[bytes], other: Callable[[bytes], Any], findings: Findings, about: str
) -> None:
    """Read the values in both ways, and the good ones by another library, which returns NotImplemented if it cannot."""
    try:
        block, judged = reader.read(values, 0), reader.judged(values, 0)
        block.columns.validate(full=True)
        rows, exact = block.columns.to_pylist(), judged.columns.to_pylist()
        refused = set(dict(block.refused).items()) ^ set(dict(judged.refused).items())
        if (found := difference(rows, exact)) or refused:
            findings.problems.append(f"block and record differ: {found} {list(refused)[:2]}\n{about}")
        for row, value in enumerate(values):
            if row in judged.refused:
                continue
            by_other = _or_error(other, value)
            if by_other is not NotImplemented and (found := difference(exact[row], by_other)):
                findings.problems.append(f"{found}, by the other library\n{value.hex()}\n{about}")
                break
    except Exception:  # noqa: BLE001 - whatever it is, it is what this program looks for
        findings.problems.append(f"{traceback.format_exc()}{about}\n{[value.hex() for value in values][:50]}")
        return
    findings.add(judged, len(values))


def _or_error(other: Callable[[bytes], Any], value: bytes) -> Any:
    """What the other library reads, or in words that it refuses the value."""
    try:
        return other(value)
    except Exception as error:  # noqa: BLE001 - it differs, whatever it is
        return f"{type(error).__name__}: {error}"


def difference(one: Any, other: Any, place: str = "$") -> str:
    """Where two values differ, in words; empty if they are equal. NaN is equal to itself, a map to its last entries."""
    if isinstance(other, Entries):
        one = {each["key"]: each["value"] for each in one}
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return ""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(filter(None, (difference(one[name], other[name], f"{place}.{name}") for name in one)), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (difference(*pair, f"{place}[{number}]") for number, pair in pairs)), "")
    return "" if one == other else f"{place}: {one!r:.200} and {other!r:.200}"


class Entries(dict[str, Any]):
    """A map, which has one value a key, while a column has every entry."""


def written_back(declared: WithId, reader: LaneReader, values: list[bytes], findings: Findings, about: str) -> None:
    """What was read is written, and read back as it was."""
    rows = reader.read(values, 0)
    good = rows.columns.take(pa.array([row for row in range(len(values)) if row not in rows.refused], pa.int64()))
    made = declared.writer().write(good)
    back = declared.reader().read(made.values)
    found = ""
    if made.refused or back.refused or (found := difference(back.columns.to_pylist(), good.to_pylist())):
        findings.problems.append(
            f"written and read back: {found} {list(made.refused.items())[:2]} {list(back.refused.items())[:2]}\n{about}"
        )


# Avro: a reader's schema, a writer's schema that differs from it as versions do, records by fastavro.

_LEAVES: tuple[Any, ...] = (
    *("boolean", "int", "long", "float", "double", "bytes", "string"),
    *(
        {"type": "long", "logicalType": f"{local}timestamp-{unit}"}
        for local in ("", "local-")
        for unit in ("millis", "micros")
    ),
    {"type": "int", "logicalType": "date"},
    {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 3},
    {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 0},
)
_DEFAULTS = {"boolean": True, "int": 5, "long": -7, "float": 1.5, "double": 2.5, "bytes": "\u00ff", "string": "d"}
_PROMOTED = {"long": ("int",), "float": ("int", "long"), "double": ("int", "long", "float"), "string": ("bytes",)}


class AvroSchemas:
    """Pairs of schemas from a seed."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self._names = 0

    def pair(self) -> tuple[Any, Any]:
        """A writer's and a reader's schema of records."""
        return self._record(3)

    def _name(self) -> str:
        self._names += 1
        return f"T{self._names}"

    def _record(self, depth: int) -> tuple[Any, Any]:
        name, chance = self._name(), self.chance
        written, read = [], []
        for number in range(chance.randint(1, 6)):
            writer, reader = self._type(depth)
            ours, theirs = {"name": f"f{number}", "type": reader}, {"name": f"f{number}", "type": writer}
            kind = chance.random()
            if kind < 0.1:
                written.append(theirs)  # no longer read
            elif kind < 0.2 and isinstance(reader, str):
                read.append({**ours, "default": _DEFAULTS[reader]})  # not written yet
            else:
                written.append(theirs)
                read.append(ours)
        if not read:
            read, written = [*read, {"name": "g", "type": "int"}], [*written, {"name": "g", "type": "int"}]
        chance.shuffle(read)
        return (
            {"type": "record", "name": name, "namespace": "w", "fields": written},
            {"type": "record", "name": name, "namespace": "r", "fields": read},
        )

    def _type(self, depth: int, *, union: bool = True) -> tuple[Any, Any]:
        chance, kind = self.chance, self.chance.random()
        if depth and kind < 0.1:
            return self._record(depth - 1)
        if depth and kind < 0.2:
            writer, reader = self._type(depth - 1)
            return {"type": "array", "items": writer}, {"type": "array", "items": reader}
        if depth and kind < 0.27:
            writer, reader = self._type(depth - 1)
            return {"type": "map", "values": writer}, {"type": "map", "values": reader}
        if union and kind < 0.5:
            writer, reader = self._type(0, union=False) if chance.random() < 0.7 else self._record(max(depth - 1, 0))
            both = [["null", reader], [reader, "null"]][chance.random() < 0.5]
            return (writer if chance.random() < 0.2 else chance.choice((["null", writer], [writer, "null"]))), both
        if kind < 0.57:
            name, symbols = self._name(), [f"S{number}" for number in range(chance.randint(1, 4))]
            reader = {"type": "enum", "name": name, "symbols": symbols, "namespace": "r", "default": symbols[0]}
            return {"type": "enum", "name": name, "symbols": [*symbols, "NEW"], "namespace": "w"}, reader
        if kind < 0.62:
            name = self._name()
            return tuple({"type": "fixed", "name": name, "size": 5, "namespace": space} for space in "wr")  # type: ignore[return-value]
        leaf = chance.choice(_LEAVES)
        if isinstance(leaf, str) and chance.random() < 0.3:
            return chance.choice((*_PROMOTED.get(leaf, ()), leaf)), leaf
        return leaf, leaf

    def value(self, schema: Any) -> Any:
        """A value of a writer's schema, as fastavro takes it."""
        chance = self.chance
        if isinstance(schema, list):
            return self.value(chance.choice(schema))
        kind = schema["type"] if isinstance(schema, dict) else schema
        if kind == "record":
            return {each["name"]: self.value(each["type"]) for each in schema["fields"]}
        if kind == "array":
            return [
                self.value(schema["items"])
                for _ in range(80 if chance.random() < 0.01 else chance.choice((0, 0, 1, 2, 4)))
            ]
        if kind == "map":
            return {f"k{number}": self.value(schema["values"]) for number in range(chance.choice((0, 1, 3)))}
        if kind == "enum":
            return chance.choice(schema["symbols"])
        if kind == "fixed":
            return chance.randbytes(schema["size"])
        logical = schema.get("logicalType", "") if isinstance(schema, dict) else ""
        if logical == "decimal":
            digits = 10 ** chance.randint(0, schema["precision"]) - 1
            return Decimal(f"{chance.choice((-1, 1)) * chance.randint(0, digits)}E-{schema['scale']}")
        if logical == "date":
            return date(1, 1, 1) + timedelta(days=chance.randint(0, 3_652_058))
        if logical:
            micros = chance.choice(
                (0, 1_700_000_000_000_000, chance.randint(-62_000_000_000_000_000, 253_000_000_000_000_000))
            )
            at = EPOCH + timedelta(microseconds=micros // 1000 * 1000)
            return at.replace(tzinfo=None) if logical.startswith("local") else at
        return _LEAF[kind](chance)


_LEAF: dict[str, Callable[[random.Random], Any]] = {
    "null": lambda _: None,
    "boolean": lambda chance: chance.random() < 0.5,
    "int": lambda chance: chance.choice((0, 1, -1, 2**31 - 1, -(2**31), chance.randint(-(2**31), 2**31 - 1))),
    "long": lambda chance: chance.choice((0, 63, -64, 2**63 - 1, -(2**63), chance.getrandbits(chance.randint(1, 63)))),
    "float": lambda chance: chance.choice((0.0, -0.0, 1.5, float("nan"), float("inf"), chance.random())),
    "double": lambda chance: chance.choice((0.0, -0.0, 1e300, float("nan"), -float("inf"), chance.random())),
    "bytes": lambda chance: chance.choice((b"", b"abc", chance.randbytes(chance.randint(0, 30)))),
    "string": lambda chance: chance.choice(_TEXTS),
}


def avro_blocks(seed: int) -> Iterator[Callable[[Findings], None]]:
    """Blocks of one seed without end, each as what compares it."""
    chance = random.Random(seed)
    while True:
        schemas = AvroSchemas(chance)
        writer, reader = schemas.pair()
        declared = Avro(reader, ids="none")
        parsed, ours = fastavro.parse_schema(writer), fastavro.parse_schema(json.loads(declared.text))
        readable = declared.reader_of(RegisteredSchema("AVRO", json.dumps(writer)), declared.schema.fieldNames())
        about = f"writer {json.dumps(writer)}\nreader {declared.text}"
        for _ in range(4):
            values = []
            for _ in range(chance.choice(_SIZES)):
                file = io.BytesIO()
                fastavro.schemaless_writer(file, parsed, schemas.value(writer))
                values.append(file.getvalue() if chance.random() < 0.3 else broken(file.getvalue(), chance))
            if not isinstance(readable, LaneReader):
                yield lambda findings, r=readable, a=about: findings.problems.append(f"{r}\n{a}")  # type: ignore[misc]
                break

            def compare(
                findings: Findings, values: list[bytes] = values, readable: LaneReader = readable, about: str = about
            ) -> None:
                other = lambda value: _by_fastavro(value, parsed, ours)  # noqa: E731, B023 - called before the next one
                compared(readable, values, other, findings, about)
                written_back(declared, readable, values, findings, about)  # noqa: B023

            yield compare


def _by_fastavro(value: bytes, writer: Any, reader: Any) -> Any:
    file = io.BytesIO(value)
    try:
        read = fastavro.schemaless_reader(file, writer, reader)
    except (OverflowError, ValueError, ArithmeticError):  # of logical types: it has fewer times, and rounds decimals
        return NotImplemented
    return _as_columns(read, reader) if file.tell() == len(value) else f"{len(value) - file.tell()} bytes follow"


def _as_columns(value: Any, schema: Any) -> Any:
    """A value of fastavro as it is in a column: maps are lists of entries."""
    if isinstance(schema, list):
        return None if value is None else _as_columns(value, next(each for each in schema if each != "null"))
    kind = schema["type"] if isinstance(schema, dict) else schema
    if isinstance(kind, (dict, list)):
        return _as_columns(value, kind)
    if kind == "record":
        return {each["name"]: _as_columns(value[each["name"]], each["type"]) for each in schema["fields"]}
    if kind == "array":
        return [_as_columns(each, schema["items"]) for each in value]
    if kind == "map":
        return (
            NotImplemented
            if value is None
            else Entries((key, _as_columns(each, schema["values"])) for key, each in value.items())
        )
    if kind == "float" and isinstance(value, (int, float)):
        return pa.scalar(value, pa.float64()).cast(pa.float32()).as_py()
    if kind == "bytes" and isinstance(value, str):  # a default, as it is in JSON
        return value.encode("latin-1")
    return float(value) if kind == "double" else value


def blocks(name: str, seed: int) -> Iterator[Callable[[Findings], None]]:
    """Blocks of a format without end."""
    if name == "avro":
        return avro_blocks(seed)
    from tests.support.protobuf_fuzz import protobuf_blocks

    return protobuf_blocks(seed)


def fuzz(name: str, records: int, seed: int) -> Findings:
    """Compare so many records of a format, or until something is wrong."""
    findings = Findings()
    for compare in blocks(name, seed):
        compare(findings)
        if findings.problems or findings.records >= records:
            return findings
    raise AssertionError  # blocks have no end


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--format", choices=("avro", "protobuf"), default="avro")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    findings = fuzz(options.format, options.records, options.seed)
    print(findings.text(time.monotonic() - begun))
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
