"""An independent judge of JSON records: Python's `json` module, and plain code for every declared type.

It shares no rule with the formats that it judges. Of a record with several faults it names every reason, because
which one a reader meets first is a matter of its order.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
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
    StructType,
    TimestampNTZType,
    TimestampType,
)

from streaming_jobs.declare.format import MAX_DETAIL, Block, Refusal

MAX_DEPTH = 200
_DAY = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_CLOCK = "T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.][0-9]{1,9})?"
_TIMES: dict[type[DataType], str] = {
    DateType: _DAY,
    TimestampNTZType: _DAY + _CLOCK,
    TimestampType: _DAY + _CLOCK + "(?:Z|[+-][0-9]{2}:[0-9]{2})?",
}
_INTEGERS: dict[type[DataType], int] = {ByteType: 7, ShortType: 15, IntegerType: 31, LongType: 63}
_SPACE = " \t\n\r"
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Number(str):
    """A number as it was written."""

    __slots__ = ()


class _Object(list[tuple[str, Any]]):
    """The fields of an object as they were written, duplicates included."""


class _Wrong(Exception):
    """A value does not fit."""


@dataclass
class Verdict:
    """The judge's verdict: the record if it is good, else every reason against it.

    `parsed`: it is JSON at all. A reader that stops at the first fault may have met a wrong field before the place
    where the rest is no JSON any more.
    """

    reasons: set[str] = field(default_factory=set)
    record: dict[str, Any] | None = None
    parsed: bool = True

    @property
    def good(self) -> bool:
        """Nothing speaks against it."""
        return not self.reasons

    def allows(self, reason: str) -> bool:
        """True if a reader may refuse with this reason."""
        others = set() if self.parsed else {"not_an_object", "wrong_type", "missing_field"}
        return not self.good and reason in self.reasons | others


def judge(schema: StructType, value: bytes | None) -> Verdict:
    """The verdict on one value."""
    if not value or not value.strip(_SPACE.encode()):
        return Verdict({"empty_value"})
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return Verdict({"invalid_utf8"})
    verdict = Verdict()
    if _depth(text) > MAX_DEPTH:
        return Verdict({"malformed_json"}, parsed=False)
    begin = len(text) - len(text.lstrip(_SPACE))
    try:
        record, end = _DECODER.raw_decode(text, begin)
    except ValueError:
        return Verdict({"malformed_json"}, parsed=False)
    if text[end:].strip(_SPACE):
        verdict.reasons.add("trailing_data")
        if not isinstance(record, _Object):
            verdict.reasons.add("malformed_json")  # `1e` is a number and something after it, or no number
    if _has_surrogates(record):
        verdict.reasons.add("malformed_json")
    if not isinstance(record, _Object):
        verdict.reasons.add("not_an_object")
        return verdict
    read = _fields(schema, record, verdict)
    verdict.record = read if verdict.good else None
    return verdict


def _depth(text: str) -> int:
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return 0
    depth = deepest = 0
    for token in _BRACKETS.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        deepest = max(deepest, depth)
    return deepest


def _has_surrogates(item: Any) -> bool:
    if isinstance(item, _Object):
        return any(_has_surrogates(name) or _has_surrogates(value) for name, value in item)
    if isinstance(item, list):
        return any(map(_has_surrogates, item))
    return isinstance(item, str) and _SURROGATE.search(item) is not None


def _fields(kind: StructType, written: _Object, verdict: Verdict) -> dict[str, Any]:
    """The fields by name. Of several of one name the last one counts; JSON's own type is checked of all of them."""
    values: dict[str, Any] = dict.fromkeys(kind.fieldNames())
    for declared in kind.fields:
        occurrences = [value for name, value in written if name == declared.name]
        for earlier in occurrences[:-1]:
            _value(declared.dataType, declared.nullable, earlier, verdict, last=False)
        if occurrences:
            values[declared.name] = _value(declared.dataType, declared.nullable, occurrences[-1], verdict)
        elif not declared.nullable:
            verdict.reasons.add("missing_field")
    return values


def _value(kind: DataType, nullable: bool, written: Any, verdict: Verdict, *, last: bool = True) -> Any:
    if written is None:
        # A decimal is read from its text, and of an earlier occurrence no text is read.
        if not nullable and (last or not isinstance(kind, DecimalType)):
            verdict.reasons.add("missing_field")
        return None
    if isinstance(kind, StructType) and isinstance(written, _Object):
        if last:
            return _fields(kind, written, verdict)
        return _earlier_fields(kind, written, verdict)
    if isinstance(kind, ArrayType) and isinstance(written, list) and not isinstance(written, _Object):
        return [_value(kind.elementType, kind.containsNull, item, verdict, last=last) for item in written]
    try:
        return _leaf(kind, written) if last else _earlier_leaf(kind, written)
    except _Wrong:
        verdict.reasons.add("wrong_type")
        return None


def _earlier_fields(kind: StructType, written: _Object, verdict: Verdict) -> None:
    for declared in kind.fields:
        occurrences = [value for name, value in written if name == declared.name]
        for value in occurrences:
            _value(declared.dataType, declared.nullable, value, verdict, last=False)
        if not occurrences and not declared.nullable:
            verdict.reasons.add("missing_field")


def _earlier_leaf(kind: DataType, written: Any) -> None:
    """JSON's own type of a value that a later one replaces; its text is not read."""
    if isinstance(kind, DecimalType):
        return
    if type(kind) in _TIMES:
        kind = StringType()
    _leaf(DoubleType() if isinstance(kind, FloatType) else kind, written)


def _leaf(kind: DataType, written: Any) -> Any:
    if isinstance(kind, BooleanType) and isinstance(written, bool):
        return written
    if isinstance(written, _Number):
        return _number(kind, written)
    if isinstance(written, str) and isinstance(kind, StringType):
        return str(written)
    if isinstance(written, str) and type(kind) in _TIMES and re.fullmatch(_TIMES[type(kind)], written):
        try:
            return date.fromisoformat(written) if isinstance(kind, DateType) else _timestamp(kind, written)
        except (ValueError, OverflowError):
            raise _Wrong from None
    raise _Wrong


def _number(kind: DataType, written: _Number) -> Any:
    bits = _INTEGERS.get(type(kind))
    if bits is not None and re.fullmatch("-?[0-9]+", written):
        # Python converts no text of thousands of digits, and none of them fits.
        if len(written) < 40 and -(1 << bits) <= int(written) < 1 << bits:
            return int(written)
    elif isinstance(kind, DoubleType | FloatType):
        number = float(written)
        try:
            number = struct.unpack("<f", struct.pack("<f", number))[0] if isinstance(kind, FloatType) else number
        except OverflowError:
            raise _Wrong from None
        if not math.isinf(number):
            return number
    elif isinstance(kind, DecimalType) and re.fullmatch("-?[0-9]+(?:[.][0-9]+)?", written):
        return _decimal(kind, written)
    raise _Wrong


def _decimal(kind: DecimalType, number: _Number) -> Decimal:
    """Digits that the type holds exactly, at most 38 as written."""
    whole, _, fraction = number.lstrip("-").partition(".")
    too_long = len((whole + fraction).lstrip("0")) > 38 or len(fraction) > 38
    if too_long or len(fraction.rstrip("0")) > kind.scale or len(whole.lstrip("0")) > kind.precision - kind.scale:
        raise _Wrong
    return Decimal(number)


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
    if minutes > 59 or distance > timedelta(hours=18):
        raise _Wrong
    return (local + distance if sign == "-" else local - distance).replace(tzinfo=UTC)


def _refuse_constant(text: str) -> None:
    raise ValueError(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_Object, parse_int=_Number, parse_float=_Number, parse_constant=_refuse_constant
)


@dataclass(frozen=True)
class Difference:
    """A value on which a reader and the judge differ."""

    value: bytes | None
    read: Any
    verdict: Verdict


def differences(
    schema: StructType, values: Sequence[bytes | None], block: Block, verdicts: Sequence[Verdict] | None = None
) -> list[Difference]:
    """The values on which a block differs from the judge: in verdict, reason or content, or in the block's contract."""
    rows = block.columns.to_pylist()
    block.columns.validate(full=True)
    if len(rows) != len(values) or block.columns.schema.names != schema.fieldNames():
        raise AssertionError(f"{len(values)} values made {len(rows)} rows of {block.columns.schema}")
    differing = []
    for index, (value, row) in enumerate(zip(values, rows, strict=True)):
        verdict = verdicts[index] if verdicts is not None else judge(schema, value)
        refusal = block.refused.get(index)
        if not (_agrees(verdict, row) if refusal is None else _allows(verdict, row, refusal)):
            differing.append(Difference(value, refusal or row, verdict))
    return differing


def _agrees(verdict: Verdict, row: dict[str, Any]) -> bool:
    return verdict.good and row == verdict.record


def _allows(verdict: Verdict, row: dict[str, Any], refusal: Refusal) -> bool:
    """Refused by both, for a reason that the judge has too, in few words, and null in every column."""
    refusal.detail.encode("utf-8")
    words = 0 < len(refusal.detail) <= MAX_DETAIL
    return words and verdict.allows(refusal.reason) and all(item is None for item in row.values())
