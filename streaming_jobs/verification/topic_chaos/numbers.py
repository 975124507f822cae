"""Numbers whose figures are known without adding them up, after the idea of Kafka Streams' SmokeTestDriver. Pure.

A key such as `17:-20..39` names an interval: the key gets every whole number from -20 to 39 once, in random order and
among the numbers of other keys. So minimum, maximum, difference, total, count, average and the counts of windows are
arithmetic on the key's name alone, and need none of the records.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
"""The event time of the number 0; a number n has this time and n seconds."""
WINDOW = 10
"""Length of a window in seconds, thus in numbers."""

_KEYS_AT_ONCE = 40
_LOWEST, _HIGHEST = -500, 500
_SPREAD = (5, 80)
_NAME = re.compile(r"(\d+):(-?\d+)\.\.(-?\d+)")


@dataclass(frozen=True)
class Interval:
    """The whole numbers from `low` to `high`, both included; `number` distinguishes it from others of the same ends."""

    number: int
    low: int
    high: int

    @classmethod
    def of(cls, key: str) -> Interval:
        """The interval that a key names; raises ValueError for other text."""
        match = _NAME.fullmatch(key)
        if match is None:
            raise ValueError(f"the key '{key}' names no interval")
        return cls(*map(int, match.groups()))

    @property
    def key(self) -> str:
        return f"{self.number}:{self.low}..{self.high}"

    @property
    def count(self) -> int:
        return self.high - self.low + 1

    @property
    def figures(self) -> dict[str, float]:
        total = (self.low + self.high) * self.count // 2
        return {"minimum": self.low, "maximum": self.high, "total": total, "count": self.count}

    @property
    def differences(self) -> dict[str, float]:
        return {"difference": self.high - self.low, "average": (self.low + self.high) / 2, "count": self.count}

    @property
    def windows(self) -> dict[int, int]:
        """By the first number of each window how many of its numbers fall into it."""
        first = self.low // WINDOW * WINDOW
        return {
            start: min(self.high, start + WINDOW - 1) - max(self.low, start) + 1
            for start in range(first, self.high + 1, WINDOW)
        }


def waves(seed: int) -> Iterator[list[tuple[str, int]]]:
    """Keys and numbers, without end: each wave has all numbers of its keys, in random order."""
    chance, made = random.Random(seed), 0  # noqa: S311 - to be repeated, not to be secret
    while True:
        wave = []
        for number in range(made, made + _KEYS_AT_ONCE):
            low = chance.randint(_LOWEST, _HIGHEST)
            interval = Interval(number, low, low + chance.randint(*_SPREAD))
            wave += [(interval.key, value) for value in range(interval.low, interval.high + 1)]
        chance.shuffle(wave)
        made += _KEYS_AT_ONCE
        yield wave


def event_time(number: int) -> datetime:
    return BEGIN + timedelta(seconds=number)


def record(key: str, number: int) -> tuple[bytes, bytes]:
    """Key and value of the number's record."""
    value = {"key": key, "number": number, "at": event_time(number).strftime("%Y-%m-%dT%H:%M:%SZ")}
    return key.encode(), json.dumps(value, separators=(",", ":")).encode()
