"""Random and broken JSON records against an independent judge, in a process of its own, so that a crash is seen too.

    python -m tests.support.json_fuzz --minutes 10 [--seed 1]

Schemas, records, and what breaks them are made from the seed. Ends with 1 and prints the input if the reader and
`tests/support/strict_json.py` differ on a record, if the reader raises, or if the interpreter ends.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import random
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from streaming_jobs.declare.format import Block
from streaming_jobs.formats import Json
from tests.support.json_corpus import BYTES, FLAT, ODD, RICH, WITHOUT_TEXT, broken
from tests.support.strict_json import differences

Values = Sequence[bytes | None]
Read = Callable[[StructType, Values], Block]

_BITS: dict[type[DataType], int] = {ByteType: 7, ShortType: 15, IntegerType: 31, LongType: 63}
_LEAVES: tuple[type[DataType], ...] = (
    *_BITS,
    BooleanType,
    FloatType,
    DoubleType,
    DecimalType,
    StringType,
    DateType,
    TimestampType,
    TimestampNTZType,
)
_NAMES = ("id", "a", "b", "Ä", "", "with blank", "a.b", "x" * 300, "😀", "`", "$")
_SIZES = (1, 2, 7, 50, 300, 1000)
_SHOWN = 3


@dataclass
class Findings:
    """The result of a run; `problems` is empty if all went well."""

    records: int = 0
    blocks: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, block: Block, records: int) -> None:
        """Count a block that was compared, and its verdicts."""
        self.blocks += 1
        self.records += records
        self.verdicts.update(refusal.reason for refusal in block.refused.values())
        self.verdicts["good"] += records - len(block.refused)

    def text(self, seconds: float) -> str:
        """The summary."""
        shares = ", ".join(f"{reason} {count:,}" for reason, count in self.verdicts.most_common())
        head = f"{self.records:,} records in {self.blocks:,} blocks, {seconds / 60:.1f} minutes: {shares}"
        return "\n".join([head, *(self.problems or ["no difference, no error, no crash"])])


def strict(schema: StructType, values: Values) -> Block:
    """The reading under test."""
    return Json(schema).reader().read(values)


def fuzz(seconds: float, seed: int, read: Read = strict) -> Findings:
    """Let a child read for so long. If it ends by itself, the record that ended it is found and named."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        note = Path(folder) / "block"
        findings = _in_child(_blocks, seconds, seed, read, note)
        if findings is not None:
            return findings
        schema, values = pickle.loads(note.read_bytes())
        value = _culprit(schema, values, read, note)
        return Findings(len(values), 1, problems=[f"the interpreter ended on {value!r}\nschema: {schema.json()}"])


def _in_child(function: Callable[..., Findings], *arguments: Any) -> Findings | None:
    """The result of a function in a new process; None if the process ended without one."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, function, arguments), daemon=True)
    child.start()
    sender.close()
    try:
        findings: Findings | None = receiver.recv()
    except EOFError:
        findings = None
    child.join()
    return findings


def _send(sender: Any, function: Callable[..., Findings], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))


def _blocks(seconds: float, seed: int, read: Read, note: Path) -> Findings:
    """Blocks until the time is over, or until something is wrong; each is noted before it is read."""
    chance = random.Random(seed)
    findings = Findings()
    end = time.monotonic() + seconds
    while time.monotonic() < end and not findings.problems:
        schema = chance.choice((RICH, FLAT, WITHOUT_TEXT, _schema(chance, 3), _schema(chance, 3)))
        values = [_value(schema, chance) for _ in range(chance.choice(_SIZES))]
        note.write_bytes(pickle.dumps((schema, values)))
        _compare(schema, values, read, findings)
    return findings


def _compare(schema: StructType, values: Values, read: Read, findings: Findings) -> None:
    try:
        block = read(schema, values)
        differing = differences(schema, values, block)
    except Exception:  # noqa: BLE001 - whatever it is, it is what this program looks for
        findings.problems.append(f"{traceback.format_exc()}values: {values!r}\nschema: {schema.json()}")
        return
    findings.add(block, len(values))
    findings.problems += [f"{difference}\nschema: {schema.json()}" for difference in differing[:_SHOWN]]


def _culprit(schema: StructType, values: Values, read: Read, note: Path) -> bytes | Values | None:
    """The value that ends the interpreter; all of them if it takes several."""
    if _in_child(_one_by_one, schema, values, read, note) is not None:
        return values
    value: bytes | None = pickle.loads(note.read_bytes())
    return value


def _one_by_one(schema: StructType, values: Values, read: Read, note: Path) -> Findings:
    for value in values:
        note.write_bytes(pickle.dumps(value))
        read(schema, [value])
    return Findings()


def _schema(chance: random.Random, depth: int) -> StructType:
    names = chance.sample(_NAMES, chance.randint(1, 6))
    return StructType([StructField(name, _type(chance, depth), chance.random() < 0.6) for name in names])


def _type(chance: random.Random, depth: int) -> DataType:
    kind = chance.random()
    if depth and kind < 0.15:
        return _schema(chance, depth - 1)
    if depth and kind < 0.35:
        return ArrayType(_type(chance, depth - 1), containsNull=chance.random() < 0.5)
    leaf = chance.choice(_LEAVES)
    if leaf is DecimalType:
        precision = chance.randint(1, 38)
        return DecimalType(precision, chance.randint(0, precision))
    return leaf()


def _value(schema: StructType, chance: random.Random) -> bytes | None:
    """A record: good, or broken as text or as bytes; rarely something else."""
    kind = chance.random()
    if kind < 0.01:
        return chance.choice((None, b"", b" \n", chance.randbytes(chance.randint(1, 40)), _deep(chance)))
    text = _text(schema, chance, wild=kind > 0.9)
    if kind < 0.35:
        return text.encode("utf-8", "surrogatepass")
    value = broken(text, chance) if kind < 0.75 else text.encode("utf-8", "surrogatepass")
    for _ in range(chance.choice((0, 1, 1, 2, 4)) if kind > 0.6 else 0):
        value = _bytes_changed(value, chance)
    return value


def _bytes_changed(value: bytes, chance: random.Random) -> bytes:
    """The value with one accident of its bytes."""
    begin = chance.randint(0, len(value))
    end = min(len(value), begin + chance.choice((0, 1, 1, 2, 8)))
    other = chance.choice(
        (
            b"",
            chance.randbytes(1),
            chance.choice(BYTES),
            bytes([chance.choice(b'{}[]",:\\0123456789.eE+-tfnu \n\x00\x7f')]),
            value[end : end + chance.randint(1, 20)],
            b"\\u%04x" % chance.choice((0, 34, 0x41, 0xD800, 0xDBFF, 0xDC00, 0xDFFF, 0xFFFF)),
        )
    )
    return value[:begin] + other + value[end:]


def _deep(chance: random.Random) -> bytes:
    opening, closing = chance.choice(((b"[", b"]"), (b'{"id":', b"}"), (b'[{"a":', b"}]")))
    levels = chance.choice((99, 100, 199, 200, 201, 400, 1000, 50_000))
    inside = chance.choice((b"", b"1", b'"]"', b"null"))
    return b'{"other":' + opening * levels + inside + closing * chance.choice((levels, levels, levels - 1)) + b"}"


def _text(kind: DataType, chance: random.Random, wild: bool) -> str:
    """A value of a type as JSON, often near its limits, and if `wild` often beyond them."""
    if wild and chance.random() < 0.03:
        return chance.choice(ODD)
    if isinstance(kind, StructType):
        return _object(kind, chance, wild)
    if isinstance(kind, ArrayType):
        element, null = kind.elementType, kind.containsNull
        items = (
            "null" if null and chance.random() < 0.2 else _text(element, chance, wild)
            for _ in range(chance.randint(0, 3))
        )
        return f"[{','.join(items)}]"
    if isinstance(kind, BooleanType):
        return chance.choice(("true", "false"))
    if isinstance(kind, StringType):
        return _string(chance, wild)
    if isinstance(kind, DoubleType | FloatType):
        return _float(chance, kind, wild)
    if isinstance(kind, DecimalType):
        return _decimal(chance, kind, wild)
    bits = _BITS.get(type(kind))
    return _integer(chance, bits, wild) if bits is not None else f'"{_time(chance, kind, wild)}"'


def _object(kind: StructType, chance: random.Random, wild: bool) -> str:
    space = chance.choice(("", "", " ", "\n", "\t\r\n"))
    parts = []
    for declared in kind.fields:
        if declared.nullable and chance.random() < 0.3:
            continue
        value = "null" if declared.nullable and chance.random() < 0.1 else _text(declared.dataType, chance, wild)
        parts.append(f"{json.dumps(declared.name, ensure_ascii=chance.random() < 0.3)}{space}:{value}")
    for _ in range(chance.choice((0, 0, 0, 1, 2))):
        name = chance.choice((*_NAMES, *kind.fieldNames()) if wild else ("other", "Other"))
        value = chance.choice((chance.choice(ODD) if wild else "0.5e-3", _string(chance, wild), "{}", "[[1,2],{}]"))
        parts.append(f"{json.dumps(name)}:{value}")
    if chance.random() < 0.3:
        chance.shuffle(parts)
    return f"{space}{{{space}{f'{space},'.join(parts)}}}{space}"


def _string(chance: random.Random, wild: bool) -> str:
    alphabets = ("abc 0", 'a"\\/\b\n\x01', "aé€😀\u2028\ufeff\x7f")
    halves = "\ud83d\ude00a\\"
    alphabet = halves if wild and chance.random() < 0.2 else chance.choice(alphabets)
    text = "".join(chance.choices(alphabet, k=chance.choice((0, 1, 3, 10, 60))))
    return json.dumps(text, ensure_ascii=alphabet is halves or chance.random() < 0.5)


def _integer(chance: random.Random, bits: int, wild: bool) -> str:
    limit = 1 << bits
    if wild and chance.random() < 0.3:
        return str(chance.choice((0, limit, -limit, limit * 2, 1 << 63, 1 << 64, -(1 << 63))) + chance.randint(-2, 2))
    return str(chance.choice((0, limit - 1, -limit, chance.randint(-limit, limit - 1), chance.randint(-9, 9))))


def _float(chance: random.Random, kind: DataType, wild: bool) -> str:
    limits: tuple[str, ...]
    beyond: tuple[str, ...]
    if isinstance(kind, FloatType):
        limits = ("3.4028234e38", "3.4028235e38", "3.4028235677973366e38", "1e-45", "-1e-46", "16777217")
        beyond = ("3.4028235677973367e38", "3.4028236e38", "-1e39", "1e400")
        number = struct.unpack("<f", chance.randbytes(4))[0]
    else:
        limits = ("1.7976931348623157e308", "-1.7976931348623158e308", "5e-324", "1e-400", "9007199254740993", "-0")
        beyond = ("1.7976931348623159e308", "-1e309", "9" * 400)
        number = struct.unpack("<d", chance.randbytes(8))[0]
    way = chance.random()
    if way < 0.2:
        return chance.choice(limits)
    if wild and way < 0.4:
        return chance.choice(beyond)
    if way < 0.6:
        return repr(number) if number - number == 0 else "0.0"
    whole = "".join(chance.choices("0123456789", k=chance.choice((1, 2, 17, 20, 30)))).lstrip("0") or "0"
    fraction = "".join(chance.choices("0123456789", k=chance.choice((0, 1, 18, 60, 900))))
    exponent = chance.choice(("", "", f"e{chance.randint(-400, 6)}", "E+3", "e-0"))
    return f"{chance.choice(('', '-'))}{whole}{'.' + fraction if fraction else ''}{exponent}"


def _decimal(chance: random.Random, kind: DecimalType, wild: bool) -> str:
    more = chance.choice((0, 0, 1)) if wild else 0
    whole = "".join(
        chance.choices("0123456789", k=max(0, kind.precision - kind.scale - chance.choice((0, 0, 1)) + more))
    )
    fraction = "".join(chance.choices("0123456789", k=max(0, kind.scale - chance.choice((0, 0, 1)) + more)))
    fraction += "0" * chance.choice((0, 0, 0, 2, 38) if wild else (0, 0, 38 - kind.precision))
    return f"{chance.choice(('', '-'))}{whole.lstrip('0') or '0'}{'.' + fraction if fraction else ''}"


def _time(chance: random.Random, kind: DataType, wild: bool) -> str:
    """A date or time, often near the limits of years, months, days and zones."""
    year = chance.choice((chance.randint(1, 9999), 2, 9998, 1900, 2000, 2012, 2013, *((0, 1, 9999) if wild else ())))
    month = chance.choice((chance.randint(1, 12), 2, 12, *((0, 13) if wild else ())))
    day = chance.choice((chance.randint(1, 28), 1, 28, *((0, 29, 30, 31, 32) if wild else ())))
    date = f"{year:04}-{month:02}-{day:02}"
    if isinstance(kind, DateType):
        return date
    hour = chance.choice((0, 5, 23, *((24,) if wild else ())))
    minute = chance.choice((0, 30, 59, *((60,) if wild else ())))
    second = chance.choice((0, 7, 59, *((60,) if wild else ())))
    digits = "".join(chance.choices("0123456789", k=chance.choice((0, 0, 1, 3, 6, 7, 9, 10 if wild else 9))))
    zone = f"{chance.choice('+-')}{chance.choice((0, 1, 5, 14, 17)):02}:{chance.choice((0, 0, 30, 59)):02}"
    far = ("+18:00", "-18:00", *(("+18:01", "-19:00", "+05:60", "+0530", "z", " Z") if wild else ()))
    zone = chance.choice(("", "Z", "Z", zone, zone, chance.choice(far))) if isinstance(kind, TimestampType) else ""
    return f"{date}T{hour:02}:{minute:02}:{second:02}{'.' + digits if digits else ''}{zone}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz for so many minutes; 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument(
        "--seed", type=int, default=None, help="another input for each seed; the time of day by default"
    )
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else time.time_ns() % 1_000_000
    began = time.monotonic()
    findings = fuzz(options.minutes * 60, seed)
    print(f"seed {seed}: {findings.text(time.monotonic() - began)}")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
