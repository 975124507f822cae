"""Values that JSON has no type for, checked and cast a column at a time: dates, times, decimals, single floats.

Texts are joined, and one pattern looks at all of them. It accepts exactly the texts that Arrow's cast accepts, so the
cast never fails; single values are looked at only where the whole does not match.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# Exact, leap years included, so that nothing is left for the cast to refuse.
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = (
    "(?!0000)(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_USUAL_DAY = f"(?=[12]){_DAY}"  # of a year that no zone moves out of 1 to 9999
_CLOCK = "T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_ZONE = "(?:Z|[+-](?:(?:0[0-9]|1[0-7]):[0-5][0-9]|18:00))"
_MICROSECONDS = "(?:[.][0-9]{1,6})?"
_NANOSECONDS = "(?:[.][0-9]{1,9})?"
FIRST_MICROSECOND, LAST_MICROSECOND = (
    (limit.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    for limit in (datetime.min, datetime.max)
)
"""The first and the last time that can be read, microseconds since 1970."""
FIRST_DAY, LAST_DAY = (micros // 86_400_000_000 for micros in (FIRST_MICROSECOND, LAST_MICROSECOND))
"""The same in days."""
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


class Form:
    """A form of text, for one value and for many; its pattern matches no newline."""

    def __init__(self, pattern: str) -> None:
        self._one = re.compile(pattern)
        self._many = re.compile(f"(?:{pattern}\n)*+")

    def holds(self, texts: Sequence[str | None]) -> bool:
        """True if every text is of this form."""
        there = texts if None not in texts else [text for text in texts if text is not None]
        lines = "\n".join([*there, ""])  # type: ignore[list-item]
        # The count: two lines in one text are not two texts.
        return self._many.fullmatch(lines) is not None and lines.count("\n") == len(there)

    def others(self, texts: Sequence[str | None]) -> list[int]:
        """The positions of the texts that are not of this form."""
        if self.holds(texts):
            return []
        matches = self._one.fullmatch
        return [position for position, text in enumerate(texts) if text is not None and not matches(text)]


@dataclass(frozen=True)
class TimeColumn:
    """A date or time as text, within the years 1 to 9999.

    `usual` is the form that Arrow casts as it is, in years that no zone moves out of these; `form` is all that is
    accepted. `zoned`: a time in UTC, from text in any zone.
    """

    name: str
    type: pa.DataType
    usual: Form
    form: Form
    zoned: bool = False

    checked = True

    def build(self, values: Sequence[str | None]) -> Built:
        """The times; a missing zone is UTC, and what is finer than a microsecond is cut off."""
        if self.usual.holds(values):
            return Built(pa.array(values, pa.string()).cast(self.type), ())
        bad = self.form.others(values)
        texts = pa.array(_without(values, bad), pa.string())
        texts = pc.replace_substring_regex(texts, pattern="([.][0-9]{6})[0-9]+", replacement=r"\1")
        if self.zoned:
            bare = pc.match_substring_regex(texts, f"{_CLOCK}{_MICROSECONDS}$")
            texts = pc.if_else(bare, pc.binary_join_element_wise(texts, "Z", ""), texts)
        times = texts.cast(self.type)
        if self.zoned:
            number = times.view(pa.int64())
            bad += pc.indices_nonzero(
                pc.or_(pc.less(number, FIRST_MICROSECOND), pc.greater(number, LAST_MICROSECOND))
            ).to_pylist()
        return Built(times, [_wrong(position, self.name, str(values[position])) for position in bad])


@dataclass(frozen=True)
class DecimalColumn:
    """A decimal from the text of its JSON: digits that the type holds exactly, at most 38 of them as written."""

    precision: int
    scale: int
    required: bool

    checked = True

    @property
    def type(self) -> pa.DataType:
        """The type in Arrow."""
        return pa.decimal128(self.precision, self.scale)

    @cached_property
    def form(self) -> Form:
        """The form of accepted numbers: zeros may follow the declared digits, up to 38 in all."""
        whole = self.precision - self.scale
        digits = f"(?:0|[1-9][0-9]{{0,{whole - 1}}})" if whole else "0"
        fraction = f"(?=[0-9])[0-9]{{0,{self.scale}}}0{{0,{_MAX_DIGITS - self.scale}}}"
        return Form(f"-?{digits}(?:[.]{fraction})?")

    def build(self, values: Sequence[Any]) -> Built:
        """The decimals of msgspec's raw values; None and `null` are null."""
        name = f"decimal({self.precision},{self.scale})"
        written = [None if value is None else str(value, "utf-8") for value in values]
        faults: list[Fault] = []
        if "null" in written:
            nulls = [position for position, text in enumerate(written) if text == "null"]
            written = _without(written, nulls)
            if self.required:
                faults += [Fault(position, "missing_field", f"Expected `{name}`, got `null`") for position in nulls]
        bad = self.form.others(written)
        bad += [position for position, text in enumerate(written) if text is not None and _is_too_long(text)]
        if bad:
            faults += [_wrong(position, name, str(written[position])) for position in bad]
            written = _without(written, bad)
        return Built(pa.array(written, pa.string()).cast(self.type), faults)


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
        infinite = np.flatnonzero(np.isinf(array.to_numpy(zero_copy_only=False)))
        return Built(array, [Fault(int(position), "wrong_type", "Number out of range") for position in infinite])


def date_column() -> TimeColumn:
    """A DATE: `2013-01-31`."""
    return TimeColumn("date", pa.date32(), Form(_DAY), Form(_DAY))


def timestamp_column() -> TimeColumn:
    """A TIMESTAMP: `2013-01-31T05:06:07`, with 1 to 9 digits of a second, and a zone of at most 18 hours."""
    usual = Form(f"{_USUAL_DAY}{_CLOCK}{_MICROSECONDS}{_ZONE}")
    form = Form(f"{_DAY}{_CLOCK}{_NANOSECONDS}{_ZONE}?")
    return TimeColumn("timestamp", pa.timestamp("us", "UTC"), usual, form, zoned=True)


def timestamp_ntz_column() -> TimeColumn:
    """A TIMESTAMP_NTZ: the same without a zone."""
    usual, form = (Form(f"{_DAY}{_CLOCK}{fraction}") for fraction in (_MICROSECONDS, _NANOSECONDS))
    return TimeColumn("timestamp_ntz", pa.timestamp("us"), usual, form)


def _without(texts: Sequence[str | None], positions: Sequence[int]) -> list[str | None]:
    """The texts with None at these positions."""
    rest = list(texts)
    for position in positions:
        rest[position] = None
    return rest


def _is_too_long(number: str) -> bool:
    """True for a number of more digits than any decimal has, without zeros in front."""
    return len(number) > _MAX_DIGITS and len(number.lstrip("-0.").replace(".", "")) > _MAX_DIGITS


def _wrong(position: int, name: str, text: str) -> Fault:
    shown = ascii(text[:_SHOWN]) + ("..." if len(text) > _SHOWN else "")
    return Fault(position, "wrong_type", f"Expected `{name}`, got {shown}")
