"""The comparison of the topics that the streams wrote with the records that were fed, and with arithmetic. Pure.

Copies: each fed record once, unchanged, the records of a key in the order in which they were fed. Changes of figures:
those of a key say what is known after its first c numbers, with c rising; and the last change of each key, and of each
window, is the one that the key's name demands.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from streaming_jobs.verification.topic import RawRecord
from streaming_jobs.verification.topic_chaos.numbers import BEGIN, Interval

Values = Mapping[str, Any]
Group = tuple[str, int]
"""A key, and the first number of a window (0 where there are no windows)."""


@dataclass(frozen=True)
class TopicCheck:
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
        """The keys whose numbers are not those that they name, once each."""
        return [
            f"key {key} has {len(numbers)} numbers"
            for key, numbers in self.numbers.items()
            if sorted(numbers) != [*range(Interval.of(key).low, Interval.of(key).high + 1)]
        ]


def check_copies(topic: str, fed: Fed, found: Iterable[RawRecord]) -> TopicCheck:
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
    return TopicCheck(
        topic=topic,
        records_in=len(expected),
        records_out=seen.total(),
        missing=len(expected.keys() - seen.keys()),
        doubled=seen.total() - len(seen),
        altered=altered,
        disordered=disordered,
    )


def check_figures(topic: str, fed: Fed, found: Iterable[RawRecord]) -> TopicCheck:
    """Compare the changes of minimum, maximum, total and count."""
    return _check_changes(topic, fed, found, _figures_after, lambda interval: {0: interval.figures})


def check_differences(topic: str, fed: Fed, found: Iterable[RawRecord]) -> TopicCheck:
    return _check_changes(topic, fed, found, _differences_after, lambda interval: {0: interval.differences})


def check_windows(topic: str, fed: Fed, found: Iterable[RawRecord]) -> TopicCheck:
    def last(interval: Interval) -> Mapping[int, Values]:
        return {start: {"count": count} for start, count in interval.windows.items()}

    return _check_changes(topic, fed, found, lambda _: [], last)


def _check_changes(
    topic: str,
    fed: Fed,
    found: Iterable[RawRecord],
    after: Callable[[Sequence[int]], Sequence[Values]],
    last: Callable[[Interval], Mapping[int, Values]],
) -> TopicCheck:
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
    return TopicCheck(
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
