"""Durations as people and Spark write them: ``"6 hours"``, ``"500 ms"``, ``"2 days 4 hours"``."""

from __future__ import annotations

import re
from datetime import timedelta

from streaming_jobs.errors import ConfigurationError

_UNITS = {
    "ms": "milliseconds",
    "millisecond": "milliseconds",
    "milliseconds": "milliseconds",
    "s": "seconds",
    "sec": "seconds",
    "second": "seconds",
    "seconds": "seconds",
    "m": "minutes",
    "min": "minutes",
    "minute": "minutes",
    "minutes": "minutes",
    "h": "hours",
    "hour": "hours",
    "hours": "hours",
    "d": "days",
    "day": "days",
    "days": "days",
    "week": "weeks",
    "weeks": "weeks",
}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def parse_duration(text: str, of: str = "") -> timedelta:
    """Read ``"6 hours"`` or ``"1 day 30 minutes"``; raises ConfigurationError for anything else, that names `of`."""
    total, position = timedelta(), 0
    while match := _PART.match(text, position):
        unit = _UNITS.get(match[2].lower())
        if unit is None:
            break
        total += timedelta(**{unit: float(match[1])})
        position = match.end()
    if position == 0 or position != len(text):
        raise ConfigurationError(
            f"{of}{': ' if of else ''}'{text}' is not a duration",
            "write a number and a unit, such as '500 ms', '6 hours' or '2 days'",
        )
    return total


def milliseconds(duration: timedelta) -> int:
    return duration // timedelta(milliseconds=1)


def format_duration(duration: timedelta) -> str:
    """The shortest text that `parse_duration` reads back as the same duration."""
    rest = milliseconds(duration)
    parts = []
    for name, size in (("days", 86_400_000), ("hours", 3_600_000), ("minutes", 60_000), ("seconds", 1000), ("ms", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count} {name[:-1] if count == 1 and name != 'ms' else name}")
    return " ".join(parts) or "0 ms"
