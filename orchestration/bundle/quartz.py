"""Quartz cron expressions, which job YAML uses: their times, and the cron with which Dagster ticks at these times.

Quartz: seconds minutes hours day-of-month month day-of-week [year]; one of the two days is `?`, and day-of-week
counts 1 = Sunday, where cron counts 0 = Sunday. (Quartz Scheduler, CronExpression.) Cron has neither L, W, # nor years:
there `cron` ticks on more days, and `runs_on` says on which of them the job runs.
"""

from __future__ import annotations

import calendar
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache

_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_NAMED = {12: _MONTHS, 7: _DAYS}
"""Names of the values of the two fields that have names, by the field's highest value."""
_YEARS = 1970, 2099
_LOOKED_AT = 366 * 9
"""Days within which a schedule has to run once: the 29th of February is skipped in 2100 only."""

DayRule = Callable[[date], bool]


@dataclass(frozen=True)
class Quartz:
    """A parsed expression. `exact`: cron says all of it."""

    second: int
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    cron: str
    exact: bool
    rules: tuple[DayRule, ...] = field(compare=False)

    @classmethod
    @lru_cache(maxsize=100)
    def of(cls, text: str) -> Quartz:
        """Raises ValueError for an expression that Quartz does not know, that never runs, or runs more than once a
        minute."""
        fields = text.upper().split()
        if len(fields) not in (6, 7):
            raise ValueError(f"has {len(fields)} fields; Quartz has seconds minutes hours day month weekday [year]")
        second, minute, hour, day, month, weekday = fields[:6]
        year = fields[6] if fields[6:] else "*"
        seconds = _values(second, 0, 59)
        if len(seconds) != 1:
            raise ValueError("runs more than once a minute; a schedule here runs once a minute at most")
        if (day == "?") == (weekday == "?"):
            raise ValueError("exactly one of day-of-month and day-of-week has to be '?'")
        minutes, hours, months = _values(minute, 0, 59), _values(hour, 0, 23), _values(month, 1, 12)
        days, by_day = _day_of_month(day)
        weekdays, by_weekday = _day_of_week(weekday)
        years = set(_values(year, *_YEARS))
        cron = " ".join(
            (
                _cron(minutes, 0, 59),
                _cron(hours, 0, 23),
                "*" if days is None else _cron(days, 1, 31),
                _cron(months, 1, 12),
                "*" if weekdays is None else _cron([value - 1 for value in weekdays], 0, 6),
            )
        )
        exact = (days is not None or day == "?") and (weekdays is not None or weekday == "?") and year == "*"
        rules = (lambda on: on.year in years and on.month in months, by_day, by_weekday)
        quartz = cls(seconds[0], tuple(minutes), tuple(hours), cron, exact, rules)
        sample = range(2020, 2029) if year == "*" else sorted(years)[:9]
        if not any(quartz.runs_on(date(y, 1, 1) + timedelta(n)) for y in sample for n in range(366)):
            raise ValueError(f"no month of '{month}' has a day '{day}', so it would never run")
        return quartz

    def runs_on(self, day: date) -> bool:
        return all(rule(day) for rule in self.rules)

    def after(self, moment: datetime, zone: tzinfo) -> datetime | None:
        """The first time later than `moment`; None if there is none within nine years."""
        local = moment.astimezone(zone)
        for offset in range(_LOOKED_AT):
            for at in self._on(local.date() + timedelta(offset), zone):
                if at > moment:
                    return at
        return None

    def latest(self, moment: datetime, zone: tzinfo) -> datetime | None:
        """The last time not later than `moment`; None if there is none within nine years."""
        local = moment.astimezone(zone)
        for offset in range(_LOOKED_AT):
            for at in reversed(list(self._on(local.date() - timedelta(offset), zone))):
                if at <= moment:
                    return at
        return None

    def _on(self, day: date, zone: tzinfo) -> Iterator[datetime]:
        """The times of one day; a time that the clock skips in spring is not one of them."""
        if not self.runs_on(day):
            return
        for hour in self.hours:
            for minute in self.minutes:
                at = datetime.combine(day, time(hour, minute, self.second), zone)
                if at.astimezone(UTC).astimezone(zone).hour == hour:
                    yield at


def _day_of_month(text: str) -> tuple[list[int] | None, DayRule]:
    """The days if cron can name them, and the rule of one day."""
    if text in ("?", "*"):
        return list(range(1, 32)), lambda _: True
    if "L" not in text and "W" not in text:
        days = _values(text, 1, 31)
        return days, lambda on: on.day in days
    if text.endswith("W"):  # the weekday nearest to a day of the month, within that month
        number = text.removesuffix("W")
        wanted = 0 if number == "L" else _number(number, 1, 31)
        return None, lambda on: on.day == _nearest_weekday(on, wanted or _length(on))
    before = 0 if text == "L" else _number(text.removeprefix("L-"), 0, 30)
    return None, lambda on: on.day == _length(on) - before


def _day_of_week(text: str) -> tuple[list[int] | None, DayRule]:
    if text in ("?", "*"):
        return list(range(1, 8)), lambda _: True
    if text == "L":  # Saturday, the last day of the week
        text = "7"
    if "#" in text:
        name, _, count = text.partition("#")
        wanted, nth = _number(name, 1, 7), _number(count, 1, 5)
        return None, lambda on: _weekday(on) == wanted and (on.day - 1) // 7 + 1 == nth
    if text.endswith("L"):
        wanted = _number(text.removesuffix("L"), 1, 7)
        return None, lambda on: _weekday(on) == wanted and on.day + 7 > _length(on)
    days = _values(text, 1, 7)
    return days, lambda on: _weekday(on) in days


def _weekday(day: date) -> int:
    """1 = Sunday, as Quartz counts."""
    return day.isoweekday() % 7 + 1


def _length(day: date) -> int:
    return calendar.monthrange(day.year, day.month)[1]


def _nearest_weekday(day: date, number: int) -> int:
    if number > _length(day):
        return 0
    weekday = day.replace(day=number).isoweekday()
    if weekday == 6:
        return number - 1 if number > 1 else number + 2
    if weekday == 7:
        return number + 1 if number < _length(day) else number - 2
    return number


def _cron(values: list[int], low: int, high: int) -> str:
    return "*" if len(values) == high - low + 1 else ",".join(_runs(values))


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
        raise ValueError(f"'{text}' is not a number from {low} to {high}")
    return value
