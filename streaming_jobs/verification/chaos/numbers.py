"""Numbers whose figures are known without adding them up, after the idea of Kafka Streams' SmokeTestDriver. Pure.

A key such as `17:-20..39` names an interval: the key gets every whole number from -20 to 39 once, in random order and
among the numbers of other keys. So minimum, maximum, difference, total, count, average and the counts of windows are
arithmetic on the key's name alone, and need none of the records.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from streaming_jobs.verification.topic import RawRecord

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
    value = {"key": key, "number": number, "at": event_time(number).strftime("%Y-%m-%dT%H:%M:%SZ")}
    return key.encode(), json.dumps(value, separators=(",", ":")).encode()


# The comparison of the topics that the streams wrote with the records that were fed, and with arithmetic. Pure.
#
# Copies: each fed record once, unchanged, the records of a key in the order in which they were fed. Changes of
# figures: those of a key say what is known after its first c numbers, with c rising; and the last change of each
# key, and of each window, is the one that the key's name demands.

Values = Mapping[str, Any]
Group = tuple[str, int]
"""A key, and the first number of a window (0 where there are no windows)."""


@dataclass(frozen=True)
class WrittenTopicCheck:
    """The comparison of one topic with what was fed; all numbers from `missing` to `disordered` are 0 if it is right.

    Of copies, all are records. Of changes, `missing` are groups (keys, or windows of keys) without their last change;
    `altered` are changes that no number of records could have made. `closed` of `groups` end as arithmetic says.
    """

    topic: str
    records_in: int
    records_out: int
    missing: int
    doubled: int
    altered: int
    disordered: int
    closed: int = 0
    groups: int = 0

    @property
    def ok(self) -> bool:
        """True if the topic has what it should have, once and in order."""
        return not (self.missing or self.doubled or self.altered or self.disordered) and self.closed == self.groups


@dataclass(frozen=True)
class Fed:
    """The records that were fed, by partition in the order of their offsets."""

    records: Sequence[RawRecord]

    @property
    def numbers(self) -> dict[str, list[int]]:
        """The numbers of each key, in order."""
        numbers: dict[str, list[int]] = defaultdict(list)
        for record in self.records:
            value = _value(record)
            numbers[value["key"]].append(value["number"])
        return numbers

    def faults(self) -> list[str]:
        """The keys whose numbers are not exactly the ones in their names, once each."""
        return [
            f"key {key} has {len(numbers)} numbers"
            for key, numbers in self.numbers.items()
            if sorted(numbers) != [*range(Interval.of(key).low, Interval.of(key).high + 1)]
        ]


def check_copies(topic: str, fed: Fed, found: Iterable[RawRecord]) -> WrittenTopicCheck:
    """Compare the copies with the records that were fed."""
    expected = {(r.partition, r.offset): (r.key, _with_time(_value(r))) for r in fed.records}
    seen: Counter[tuple[int, int]] = Counter()
    last: dict[bytes | None, int] = {}
    altered = disordered = 0
    for record in found:
        value = _with_time(_value(record))
        place = (value.pop("source_partition"), value.pop("source_offset"))
        seen[place] += 1
        altered += expected.get(place) != (record.key, value) or record.timestamp != value["at"]
        disordered += place[1] < last.get(record.key, -1)
        last[record.key] = max(place[1], last.get(record.key, -1))
    return WrittenTopicCheck(
        topic=topic,
        records_in=len(expected),
        records_out=seen.total(),
        missing=len(expected.keys() - seen.keys()),
        doubled=seen.total() - len(seen),
        altered=altered,
        disordered=disordered,
    )


def check_figures(topic: str, fed: Fed, found: Iterable[RawRecord]) -> WrittenTopicCheck:
    """Compare the changes of minimum, maximum, total and count."""
    return _check_changes(topic, fed, found, _figures_after, lambda interval: {0: interval.figures})


def check_differences(topic: str, fed: Fed, found: Iterable[RawRecord]) -> WrittenTopicCheck:
    return _check_changes(topic, fed, found, _differences_after, lambda interval: {0: interval.differences})


def check_windows(topic: str, fed: Fed, found: Iterable[RawRecord]) -> WrittenTopicCheck:
    def last(interval: Interval) -> Mapping[int, Values]:
        return {start: {"count": count} for start, count in interval.windows.items()}

    return _check_changes(topic, fed, found, lambda _: [], last)


def _check_changes(
    topic: str,
    fed: Fed,
    found: Iterable[RawRecord],
    after: Callable[[Sequence[int]], Sequence[Values]],
    last: Callable[[Interval], Mapping[int, Values]],
) -> WrittenTopicCheck:
    """`after` gives the figures after each number of a key, `last` the last ones of each window of an interval."""
    numbers = fed.numbers
    steps = {key: after(values) for key, values in numbers.items()}
    expected = {(key, start): values for key in numbers for start, values in last(Interval.of(key)).items()}
    newest: dict[Group, Values] = {}
    changes = doubled = altered = disordered = 0
    for record in found:
        value = _value(record)
        start = _number_of(value.pop("start")) if "start" in value else 0
        group: Group = (value.pop("key"), start)
        before = newest.get(group, {"count": 0})["count"]
        changes += 1
        doubled += value["count"] == before
        disordered += value["count"] < before
        altered += record.key != group[0].encode() or not _possible(value, group, expected, steps)
        if value["count"] > before:
            newest[group] = value
    return WrittenTopicCheck(
        topic=topic,
        records_in=sum(map(len, numbers.values())),
        records_out=changes,
        missing=sum(newest.get(group, {"count": 0})["count"] < values["count"] for group, values in expected.items()),
        doubled=doubled,
        altered=altered,
        disordered=disordered,
        closed=sum(newest.get(group) == values for group, values in expected.items()),
        groups=len(expected),
    )


def _possible(
    value: Values, group: Group, expected: Mapping[Group, Values], steps: Mapping[str, Sequence[Values]]
) -> bool:
    if group not in expected or not 1 <= value["count"] <= expected[group]["count"]:
        return False
    known = steps[group[0]]
    return not known or known[value["count"] - 1] == value


def _figures_after(numbers: Sequence[int]) -> list[Values]:
    figures: list[Values] = []
    low, high, total = numbers[0], numbers[0], 0
    for count, number in enumerate(numbers, 1):
        low, high, total = min(low, number), max(high, number), total + number
        figures.append({"minimum": low, "maximum": high, "total": total, "count": count})
    return figures


def _differences_after(numbers: Sequence[int]) -> list[Values]:
    return [
        {"difference": f["maximum"] - f["minimum"], "average": f["total"] / f["count"], "count": f["count"]}
        for f in _figures_after(numbers)
    ]


def _value(record: RawRecord) -> dict[str, Any]:
    """The fields of a record; raises ValueError for anything but a JSON object."""
    value = json.loads(record.value or b"")
    if not isinstance(value, dict):
        raise ValueError(f"{record.topic}-{record.partition} {record.offset} is no JSON object")
    return value


def _with_time(value: dict[str, Any]) -> dict[str, Any]:
    """The value with its time in ms since 1970: one moment can be written in several ways."""
    return {**value, "at": round(datetime.fromisoformat(value["at"]).timestamp() * 1000)}


def _number_of(time: str) -> int:
    return round((datetime.fromisoformat(time) - BEGIN).total_seconds())
