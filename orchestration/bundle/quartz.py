"""Quartz cron expressions, which job YAML uses, as the five-field cron that Dagster reads.

Quartz: seconds minutes hours day-of-month month day-of-week [year]; one of the two days is `?`, and day-of-week
counts 1 = Sunday, where cron counts 0 = Sunday. (Quartz Scheduler, CronExpression.)
"""

from __future__ import annotations

from collections.abc import Iterator

_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_LONGEST = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
"""Days of each month, at most."""
_NAMED = {12: _MONTHS, 7: _DAYS}
"""Names of the values of the two fields that have names, by the field's highest value."""


def cron_of(quartz: str) -> str:
    """The same times as cron; raises ValueError for times that cron cannot express."""
    fields = quartz.upper().split()
    if len(fields) not in (6, 7):
        raise ValueError(f"has {len(fields)} fields; Quartz has seconds minutes hours day month weekday [year]")
    second, minute, hour, day, month, weekday = fields[:6]
    if _values(second, 0, 59) != [0]:
        raise ValueError("the seconds are not 0; schedules here are in whole minutes")
    if fields[6:] not in ([], ["*"]):
        raise ValueError("a year cannot be given; leave it out")
    if (day == "?") == (weekday == "?"):
        raise ValueError("exactly one of day-of-month and day-of-week has to be '?'")
    if day != "?" and min(_values(day, 1, 31)) > max(_LONGEST[number - 1] for number in _values(month, 1, 12)):
        raise ValueError(f"no month of '{month}' has a day '{day}', so it would never run")
    return " ".join(
        (
            _field(minute, 0, 59),
            _field(hour, 0, 23),
            _field(day, 1, 31),
            _field(month, 1, 12),
            _field(weekday, 1, 7, shift=-1),
        )
    )


def _field(text: str, low: int, high: int, *, shift: int = 0) -> str:
    if text == "?":
        return "*"
    values = _values(text, low, high)
    if len(values) == high - low + 1:
        return "*"
    return ",".join(_runs([value + shift for value in values]))


def _runs(values: list[int]) -> Iterator[str]:
    while values:
        length = next((i for i, value in enumerate(values) if value != values[0] + i), len(values))
        length = length if length > 2 else 1
        yield str(values[0]) if length == 1 else f"{values[0]}-{values[length - 1]}"
        values = values[length:]


def _values(text: str, low: int, high: int) -> list[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        span, slash, step_text = part.partition("/")
        step = _number(step_text, 1, high) if slash else 1
        if span in ("*", ""):
            first, last = low, high
        elif "-" in span:
            start, _, end = span.partition("-")
            first, last = _number(start, low, high), _number(end, low, high)
        else:
            first = _number(span, low, high)
            last = high if slash else first
        size = high - low + 1
        # A range that runs backwards wraps round, as in Quartz: FRI-MON, 22-2.
        length = (last - first) % size
        numbers.update(low + (first - low + offset) % size for offset in range(0, length + 1, step))
    return sorted(numbers)


def _number(text: str, low: int, high: int) -> int:
    names = _NAMED.get(high, ())
    value = names.index(text) + 1 if text in names else int(text) if text.isdecimal() else -1
    if not low <= value <= high:
        raise ValueError(f"'{text}' is not a number from {low} to {high} (L, W and # are not supported)")
    return value
