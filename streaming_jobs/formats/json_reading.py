"""The strict reading of one JSON record in plain Python: its fields, or the exact reason of its refusal.

It gives the verdict that `json_columns` gives in Spark (a test compares both on thousands of records), so where
Spark's parser has a rule of its own (length of a number, depth, precision of a time), this module has it too.
"""

from __future__ import annotations

import json
import math
import re
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, NoReturn

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

END_MARK = "\x01"
"""Name of the field that is appended to a record, to detect where it ends; a record may have it only as null."""

MAX_DEPTH = 200
"""Objects and arrays within each other; a deeper record is refused."""

MAX_NUMBER = 1000
"""Digits of a number; a longer one is refused."""

MAX_NAME = 50_000
"""Characters of a field's name; a longer one is refused."""

MAX_DETAIL = 400
"""Characters of a refusal's detail."""

_DAY = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_CLOCK = "T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.][0-9]{1,9})?"
_TIMES: dict[type[DataType], str] = {
    DateType: _DAY,
    TimestampNTZType: _DAY + _CLOCK,
    TimestampType: _DAY + _CLOCK + "(?:Z|[+-][0-9]{2}:[0-9]{2})?",
}
PLAIN_NUMBER = "-?[0-9]+(?:[.][0-9]+)?"

_INTEGERS: dict[type[DataType], int] = {ByteType: 7, ShortType: 15, IntegerType: 31, LongType: 63}
_SPACE = re.compile(r"[ \t\n\r]*")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_OFFSET = timedelta(hours=18)


REASONS = frozenset(
    {
        "empty_value",
        "invalid_utf8",
        "malformed_json",
        "missing_field",
        "not_an_object",
        "trailing_data",
        "unreadable",
        "wrong_type",
    }
)
"""Every reason of a refusal."""


class Refused(Exception):
    """A record is refused: `reason` is a stable word, `detail` says what was found and where."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail if len(detail) <= MAX_DETAIL else detail[: MAX_DETAIL - 3] + "..."


class _Number(str):
    """A number as it was written."""

    __slots__ = ()


class _Object(list[tuple[str, Any]]):
    """The fields of an object as they were written, duplicates included."""


def read_record(schema: StructType, value: bytes | None) -> dict[str, Any]:
    """The record in these bytes, every declared field included; raises Refused."""
    text = _text(value)
    record = _parse(text)
    fields = _fields(StructType([*schema.fields, StructField(END_MARK, BooleanType())]), record, "")
    if fields.pop(END_MARK) is not None:
        raise Refused("wrong_type", f"field '{_cut(END_MARK)}': the name is reserved")
    return fields


def _text(value: bytes | None) -> str:
    if not value or not value.strip(b" \t\n\r"):
        raise Refused("empty_value", "the value is null, empty or blank")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = value[error.start]
        raise Refused("invalid_utf8", f"byte 0x{byte:02x} at byte {error.start} is not UTF-8") from None


def _parse(text: str) -> _Object:
    if text.startswith("\ufeff"):
        raise Refused("malformed_json", "the value starts with a byte order mark")
    if text.count("{") + text.count("[") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise Refused("malformed_json", f"objects and arrays are nested deeper than {MAX_DEPTH}")
    start = _end_of_space(text, 0)
    try:
        record, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        where = "the value ends too early" if error.pos >= len(text) else f"found {_shown(text[error.pos :])}"
        raise Refused("malformed_json", f"{error.msg} at character {error.pos}: {where}") from None
    if not isinstance(record, _Object):
        raise Refused("not_an_object", f"expected an object, found {_kind(record)}")
    rest = _end_of_space(text, end)
    if rest < len(text):
        raise Refused("trailing_data", f"the object ends at character {end}, then comes {_shown(text[rest:])}")
    _check_strings(record)
    return record


def _depth(text: str) -> int:
    depth = deepest = 0
    for token in _BRACKETS.finditer(text):
        if token[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif token[0] in "]}":
            depth -= 1
    return deepest


def _check_strings(record: Any) -> None:
    """Refuse what no UTF-8 text can hold: half of a surrogate pair, written as an escape."""
    pending = [record]
    while pending:
        item = pending.pop()
        if isinstance(item, _Object):
            for name, value in item:
                pending += [name, value]
                if len(name) > MAX_NAME:
                    raise Refused("malformed_json", f"a field's name is longer than {MAX_NAME} characters")
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, str) and _SURROGATE.search(item):
            raise Refused("malformed_json", f"{_shown(item)} holds half of a surrogate pair")


def _fields(kind: StructType, written: Any, path: str) -> dict[str, Any]:
    if not isinstance(written, _Object):
        _wrong(path, kind, written)
    values: dict[str, Any] = {}
    declared = {field.name: field for field in kind.fields}
    for name, value in written:
        if name in declared:
            field = declared[name]
            if name in values:
                # The last one wins, yet Spark's parser has looked at the shape of every one.
                _check_shape(field.dataType, values[name], f"{path}{name}")
            values[name] = value
    return {name: _field(field, values, f"{path}{name}") for name, field in declared.items()}


def _field(field: StructField, values: dict[str, Any], path: str) -> Any:
    value = values.get(field.name)
    if value is None and not field.nullable:
        instead = "null" if field.name in values else "no such field"
        raise Refused("missing_field", f"field '{_cut(path)}': required, found {instead}")
    return None if value is None else _value(field.dataType, value, path)


def _value(kind: DataType, written: Any, path: str) -> Any:
    """The value of a declared type; `written` is not null."""
    if isinstance(kind, StructType):
        return _fields(kind, written, f"{path}.")
    if isinstance(kind, ArrayType):
        return _elements(kind, written, path)
    if isinstance(kind, BooleanType) and isinstance(written, bool):
        return written
    if isinstance(written, _Number):
        return _number(kind, written, path)
    if isinstance(written, str):
        if isinstance(kind, StringType):
            return written
        if isinstance(kind, DateType | TimestampType | TimestampNTZType):
            return _time(kind, written, path)
    return _wrong(path, kind, written)


def _elements(kind: ArrayType, written: Any, path: str) -> list[Any]:
    if isinstance(written, _Object) or not isinstance(written, list):
        _wrong(path, kind, written)
    values = []
    for index, item in enumerate(written):
        if item is None and not kind.containsNull:
            raise Refused("missing_field", f"field '{_cut(path)}[{index}]': required, found null")
        values.append(None if item is None else _value(kind.elementType, item, f"{path}[{index}]"))
    return values


def _number(kind: DataType, written: _Number, path: str) -> Any:
    bits = _INTEGERS.get(type(kind))
    if bits is not None:
        if not written.lstrip("-").isdigit():
            _wrong(path, kind, written)
        whole = int(written)
        return whole if -(1 << bits) <= whole < 1 << bits else _overflow(path, kind, written)
    if isinstance(kind, DoubleType | FloatType):
        number = float(written)
        try:
            number = struct.unpack("<f", struct.pack("<f", number))[0] if isinstance(kind, FloatType) else number
        except OverflowError:
            _overflow(path, kind, written)
        return _overflow(path, kind, written) if math.isinf(number) else number
    if isinstance(kind, DecimalType):
        return _decimal(kind, written, path)
    return _wrong(path, kind, written)


def _decimal(kind: DecimalType, number: _Number, path: str) -> Decimal:
    """Digits that the type holds exactly; an exponent is refused, because Spark reads it as a double."""
    if not re.fullmatch(PLAIN_NUMBER, number):
        _wrong(path, kind, number)
    whole, _, fraction = number.lstrip("-").partition(".")
    written = len(fraction) if fraction else 0
    fraction = fraction.rstrip("0")
    digits = len((whole + fraction.ljust(written, "0")).lstrip("0"))
    too_long = digits > 38 or written > 38
    if too_long or len(fraction) > kind.scale or len(whole.lstrip("0")) > kind.precision - kind.scale:
        _overflow(path, kind, number)
    return Decimal(number)


def _time(kind: DataType, text: str, path: str) -> date | datetime:
    if not re.fullmatch(_TIMES[type(kind)], text):
        _wrong(path, kind, text)
    try:
        return date.fromisoformat(text) if isinstance(kind, DateType) else _timestamp(kind, text)
    except (ValueError, OverflowError):
        _wrong(path, kind, text)


def _timestamp(kind: DataType, text: str) -> datetime:
    """The time, in UTC for a TIMESTAMP; raises ValueError or OverflowError."""
    clock, sign, offset = text, "", ""
    if text.endswith("Z"):
        clock = text[:-1]
    elif text[-6] in "+-":
        clock, sign, offset = text[:-6], text[-6], text[-5:]
    clock, _, fraction = clock.partition(".")
    local = datetime.fromisoformat(clock).replace(microsecond=int(fraction[:6].ljust(6, "0")))
    if isinstance(kind, TimestampNTZType):
        return local
    hours, minutes = (int(part) for part in offset.split(":")) if offset else (0, 0)
    distance = timedelta(hours=hours, minutes=minutes)
    if minutes > 59 or distance > _MAX_OFFSET:
        raise ValueError
    return (local + distance if sign == "-" else local - distance).replace(tzinfo=UTC)


def _check_shape(kind: DataType, written: Any, path: str) -> None:
    """Check the shape of a field that a later one of the same name replaces, as Spark's parser does."""
    if written is None or isinstance(kind, StringType | DateType | TimestampType | TimestampNTZType | DecimalType):
        return
    if isinstance(kind, StructType) and isinstance(written, _Object):
        declared = {field.name: field.dataType for field in kind.fields}
        for name, value in written:
            if name in declared:
                _check_shape(declared[name], value, f"{path}.{name}")
    elif isinstance(kind, ArrayType) and isinstance(written, list) and not isinstance(written, _Object):
        for index, item in enumerate(written):
            _check_shape(kind.elementType, item, f"{path}[{index}]")
    elif isinstance(kind, DoubleType | FloatType) and isinstance(written, _Number):
        return
    else:
        _value(ShortType() if isinstance(kind, ByteType) else kind, written, path)


def _wrong(path: str, kind: DataType, written: Any) -> NoReturn:
    wanted = "object" if isinstance(kind, StructType) else kind.simpleString()
    raise Refused("wrong_type", f"field '{_cut(path.rstrip('.'))}': expected {_cut(wanted)}, found {_kind(written)}")


def _overflow(path: str, kind: DataType, written: _Number) -> NoReturn:
    detail = f"field '{_cut(path)}': {_shown(written)} does not fit {kind.simpleString()}"
    raise Refused("wrong_type", detail)


def _kind(written: Any) -> str:
    if written is None:
        return "null"
    if isinstance(written, bool):
        return "a boolean"
    if isinstance(written, _Number):
        return f"the number {_shown(written)}"
    if isinstance(written, str):
        return f"the string {_shown(written)}"
    return "an object" if isinstance(written, _Object) else "an array"


def _shown(text: str) -> str:
    return ascii(text[:40]) + ("..." if len(text) > 40 else "")


def _cut(text: str, length: int = 120) -> str:
    return ascii(text)[1:-1] if len(text) <= length else ascii(text[:length])[1:-1] + "..."


def _end_of_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


def _written(text: str) -> _Number:
    if sum(character.isdigit() for character in text) > MAX_NUMBER:
        raise Refused("malformed_json", f"a number has more than {MAX_NUMBER} digits")
    return _Number(text)


def _refuse_constant(text: str) -> NoReturn:
    raise Refused("malformed_json", f"{text} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_Object, parse_int=_written, parse_float=_written, parse_constant=_refuse_constant
)
