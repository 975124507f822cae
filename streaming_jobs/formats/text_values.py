"""Values that JSON has no type for, checked and cast a column at a time: dates, times, decimals, single floats.

A pattern accepts exactly the texts that the cast accepts, and the years are checked on the result. So a bad value is
never looked at one by one to find it, and a cast never fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

# Exact, leap years included, so that nothing is left for the cast to refuse.
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_CLOCK = "T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_ZONE = "(?:Z|[+-](?:(?:0[0-9]|1[0-7]):[0-5][0-9]|18:00))"
_MICROSECONDS = "(?:[.][0-9]{1,6})?"
_NANOSECONDS = "(?:[.][0-9]{1,9})?"
_MAX_DIGITS = 38
_SHOWN = 40


class Fault(NamedTuple):
    """A value that is refused: its position in the column, the reason, the words, and the place below the column."""

    position: int
    reason: str
    words: str
    place: str = ""


class Built(NamedTuple):
    """A column and its faults; the column's value at a fault means nothing."""

    array: pa.Array
    faults: Sequence[Fault]


@dataclass(frozen=True)
class TimeColumn:
    """A date or time as text, of a form that the patterns describe, within the years 1 to 9999.

    `usual` is the form that Arrow casts as it is, `form` the whole of what is accepted.
    """

    name: str
    type: pa.DataType
    usual: str
    form: str
    first: int
    last: int
    zoned: bool = False

    checked = True

    def build(self, values: Sequence[str | None]) -> Built:
        """The times; a missing zone is UTC, and what is finer than a microsecond is cut off."""
        texts = pa.array(values, pa.string())
        bad: list[int] = []
        if pc.match_substring_regex(texts, self.usual).false_count:
            good = pc.match_substring_regex(texts, self.form)
            bad = _indices(pc.invert(good))
            texts = self._usual(pc.if_else(good, texts, pa.scalar(None, pa.string())))
        times = texts.cast(self.type)
        number = times.view(pa.int32() if pa.types.is_date(self.type) else pa.int64())
        bad += _indices(pc.or_(pc.less(number, self.first), pc.greater(number, self.last)))
        return Built(times, [_wrong(index, self.name, str(values[index])) for index in bad])

    def _usual(self, texts: pa.Array) -> pa.Array:
        """Texts of the accepted form in the usual form."""
        texts = pc.replace_substring_regex(texts, pattern="([.][0-9]{6})[0-9]+", replacement=r"\1")
        if not self.zoned:
            return texts
        bare = pc.match_substring_regex(texts, f"{_CLOCK}{_MICROSECONDS}\\z")
        return pc.if_else(bare, pc.binary_join_element_wise(texts, "Z", ""), texts)


@dataclass(frozen=True)
class DecimalColumn:
    """A decimal from the bytes of its JSON: digits that the type holds exactly, at most 38 of them as written."""

    precision: int
    scale: int
    required: bool

    checked = True

    @property
    def type(self) -> pa.DataType:
        """The type in Arrow."""
        return pa.decimal128(self.precision, self.scale)

    @property
    def form(self) -> str:
        """The pattern of accepted numbers: zeros may follow the declared digits, up to 38 in all."""
        whole = self.precision - self.scale
        digits = f"(?:0|[1-9][0-9]{{0,{whole - 1}}})" if whole else "0"
        zeros = f"[0-9]{{0,{self.scale}}}0{{0,{_MAX_DIGITS - self.scale}}}"
        return rf"\A-?{digits}(?:[.]{zeros})?\z"

    def build(self, values: Sequence[Any]) -> Built:
        """The decimals of msgspec's raw values; None and `null` are null."""
        written = [None if value is None else bytes(value) for value in values]
        nulls = [index for index, text in enumerate(written) if text == b"null"] if b"null" in written else []
        for index in nulls:
            written[index] = None
        texts = pa.array(written, pa.string())
        good = pc.match_substring_regex(texts, self.form)
        if pc.any(pc.greater(pc.binary_length(texts), _MAX_DIGITS)).as_py():
            good = pc.and_(good, pa.array([text is None or _digits(text) <= _MAX_DIGITS for text in written]))
        name = f"decimal({self.precision},{self.scale})"
        faults = []
        if self.required:
            faults += [Fault(index, "missing_field", f"Expected `{name}`, got `null`") for index in nulls]
        if good.false_count:
            wrong = _indices(pc.invert(good))
            faults += [_wrong(index, name, (written[index] or b"").decode()) for index in wrong]
            texts = pc.if_else(good, texts, pa.scalar(None, pa.string()))
        return Built(texts.cast(self.type), faults)


@dataclass(frozen=True)
class FloatColumn:
    """A FLOAT: a number that msgspec has read as a double, rounded; refused if it does not fit."""

    checked = True

    @property
    def type(self) -> pa.DataType:
        """The type in Arrow."""
        return pa.float32()

    def build(self, values: Sequence[float | None]) -> Built:
        """The numbers; one that overflows is a fault."""
        array = pa.array(values, pa.float32())
        return Built(array, [Fault(index, "wrong_type", "Number out of range") for index in _indices(pc.is_inf(array))])


def date_column() -> TimeColumn:
    """A DATE: `2013-01-31`."""
    epoch = date(1970, 1, 1)
    first, last = ((limit - epoch).days for limit in (date.min, date.max))
    form = rf"\A{_DAY}\z"
    return TimeColumn("date", pa.date32(), form, form, first, last)


def timestamp_column() -> TimeColumn:
    """A TIMESTAMP: `2013-01-31T05:06:07`, with 1 to 9 digits of a second, and a zone of at most 18 hours."""
    usual = rf"\A{_DAY}{_CLOCK}{_MICROSECONDS}{_ZONE}\z"
    form = rf"\A{_DAY}{_CLOCK}{_NANOSECONDS}{_ZONE}?\z"
    return TimeColumn("timestamp", pa.timestamp("us", "UTC"), usual, form, *_limits(), zoned=True)


def timestamp_ntz_column() -> TimeColumn:
    """A TIMESTAMP_NTZ: the same without a zone."""
    usual, form = (rf"\A{_DAY}{_CLOCK}{fraction}\z" for fraction in (_MICROSECONDS, _NANOSECONDS))
    return TimeColumn("timestamp_ntz", pa.timestamp("us"), usual, form, *_limits())


def _limits() -> tuple[int, int]:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    first, last = ((limit.replace(tzinfo=UTC) - epoch) for limit in (datetime.min, datetime.max))
    return first // timedelta(microseconds=1), last // timedelta(microseconds=1)


def _indices(flags: pa.Array) -> list[int]:
    indices: list[int] = pc.indices_nonzero(flags).to_pylist()
    return indices


def _digits(number: bytes) -> int:
    """Digits of a number as written, without zeros in front."""
    return len(number.replace(b"-", b"").replace(b".", b"").lstrip(b"0"))


def _wrong(index: int, name: str, text: str) -> Fault:
    shown = ascii(text[:_SHOWN]) + ("..." if len(text) > _SHOWN else "")
    return Fault(index, "wrong_type", f"Expected `{name}`, got {shown}")
