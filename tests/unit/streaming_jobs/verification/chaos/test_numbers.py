"""Arithmetic on a key's name says the same as its numbers; each way to spoil a topic of them is seen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import pytest

from streaming_jobs.verification.chaos.numbers import (
    WINDOW,
    Fed,
    Interval,
    WrittenTopicCheck,
    check_copies,
    check_differences,
    check_figures,
    check_windows,
    event_time,
    record,
    waves,
)
from streaming_jobs.verification.topic import RawRecord


def numbers_of(seed: int) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for wave in islice(waves(seed), 3):
        for key, number in wave:
            numbers.setdefault(key, []).append(number)
    return numbers


@pytest.mark.parametrize("seed", range(20))
def test_a_key_gets_the_numbers_that_it_names_and_its_figures_are_theirs(seed: int) -> None:
    for key, numbers in numbers_of(seed).items():
        interval = Interval.of(key)
        assert interval.key == key and len(set(numbers)) == len(numbers)
        assert sorted(numbers) == [*range(interval.low, interval.high + 1)]
        low, high, total, count = min(numbers), max(numbers), sum(numbers), len(numbers)
        assert interval.figures == {"minimum": low, "maximum": high, "total": total, "count": count}
        assert interval.differences == {"difference": high - low, "average": total / count, "count": count}
        assert interval.windows == Counter(number // WINDOW * WINDOW for number in numbers)


def test_numbers_come_in_random_order_and_a_key_that_names_no_interval_is_refused() -> None:
    wave = next(waves(1))
    keys = [key for key, _ in wave]
    neighbours = sum(one == other for one, other in pairwise(keys))
    assert neighbours < len(keys) / 10
    assert any(numbers != sorted(numbers) for numbers in numbers_of(1).values())
    assert numbers_of(1) == numbers_of(1) != numbers_of(2)
    with pytest.raises(ValueError, match="names no interval"):
        Interval.of("7:1-2")


Spoil = Callable[[list[RawRecord]], list[RawRecord]]


def at(topic: str, offset: int, key: str, value: dict[str, Any], timestamp: int = 0) -> RawRecord:
    return RawRecord(topic, 0, offset, timestamp, key.encode(), json.dumps(value).encode())


def changed(original: RawRecord, **changes: Any) -> RawRecord:
    value = json.loads(original.value or b"")
    return original._replace(value=json.dumps({**value, **changes}).encode())


@pytest.fixture(scope="module")
def fed() -> Fed:
    numbers = [each for wave in islice(waves(3), 2) for each in wave]
    return Fed([RawRecord("in", 0, i, 0, *record(*each)) for i, each in enumerate(numbers)])


def copies(fed: Fed) -> list[RawRecord]:
    made = []
    for i, original in enumerate(fed.records):
        value = json.loads(original.value or b"")
        time = event_time(value["number"])
        placed = {**value, "at": time.isoformat(), "source_partition": 0, "source_offset": original.offset}
        made.append(at("copies", i, value["key"], placed, round(time.timestamp() * 1000)))
    return made


def figures(fed: Fed, step: int = 3) -> list[RawRecord]:
    """A change after every third number of a key, and after its last one."""
    made = []
    for key, numbers in fed.numbers.items():
        for count in sorted({*range(step, len(numbers), step), len(numbers)}):
            part = numbers[:count]
            value = {"minimum": min(part), "maximum": max(part), "total": sum(part), "count": count}
            made.append(at("figures", len(made), key, {"key": key, **value}))
    return made


def differences(fed: Fed) -> list[RawRecord]:
    made = []
    for original in figures(fed):
        v = json.loads(original.value or b"")
        average = v["total"] / v["count"]
        value = {"key": v["key"], "difference": v["maximum"] - v["minimum"], "average": average, "count": v["count"]}
        made.append(at("differences", len(made), v["key"], value))
    return made


def windows(fed: Fed) -> list[RawRecord]:
    made, counts = [], dict[tuple[str, int], int]()
    for key, numbers in fed.numbers.items():
        for number in numbers:
            start = number // WINDOW * WINDOW
            counts[key, start] = count = counts.get((key, start), 0) + 1
            value = {"key": key, "start": event_time(start).isoformat(), "count": count}
            made.append(at("windows", len(made), key, value))
    return made


CHECKS: dict[str, tuple[Callable[[Fed], list[RawRecord]], Callable[..., WrittenTopicCheck]]] = {
    "copies": (copies, check_copies),
    "figures": (figures, check_figures),
    "differences": (differences, check_differences),
    "windows": (windows, check_windows),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_topic_that_is_right_passes(fed: Fed, name: str) -> None:
    make, check = CHECKS[name]
    found = make(fed)
    checked = check(name, fed, found)
    assert checked.ok and checked.records_out == len(found) > 0 and checked.records_in == len(fed.records)
    assert (checked.groups == 0) == (name == "copies") and checked.closed == checked.groups


def without_last(records: list[RawRecord]) -> list[RawRecord]:
    return records[:-1]


def last_twice(records: list[RawRecord]) -> list[RawRecord]:
    return [*records, records[-1]]


def swapped(records: list[RawRecord]) -> list[RawRecord]:
    """The first two records of a key that has several change places."""
    first = next(i for i, r in enumerate(records) if any(other.key == r.key for other in records[i + 1 :]))
    second = next(i for i in range(first + 1, len(records)) if records[i].key == records[first].key)
    records[first], records[second] = records[second], records[first]
    return records


def other_count(records: list[RawRecord]) -> list[RawRecord]:
    return [changed(records[0], count=10_000), *records[1:]]


def other_key(records: list[RawRecord]) -> list[RawRecord]:
    return [records[0]._replace(key=b"else"), *records[1:]]


@pytest.mark.parametrize(
    ("name", "spoil", "seen"),
    [
        ("copies", without_last, "missing"),
        ("copies", last_twice, "doubled"),
        ("copies", swapped, "disordered"),
        ("copies", other_key, "altered"),
        ("copies", lambda found: [changed(found[0], number=1_000_000), *found[1:]], "altered"),
        ("copies", lambda found: [found[0]._replace(timestamp=7), *found[1:]], "altered"),
        ("copies", lambda found: [changed(found[0], source_offset=1_000_000), *found[1:]], "missing"),
        ("figures", without_last, "missing"),
        ("figures", last_twice, "doubled"),
        ("figures", swapped, "disordered"),
        ("figures", other_key, "altered"),
        ("figures", other_count, "altered"),
        ("figures", lambda found: [changed(found[0], total=-1_000_000), *found[1:]], "altered"),
        ("figures", lambda found: [*found[:-1], changed(found[-1], maximum=1_000_000)], "altered"),
        ("differences", lambda found: [*found[:-1], changed(found[-1], average=0.25)], "altered"),
        ("differences", without_last, "missing"),
        ("windows", without_last, "missing"),
        ("windows", last_twice, "doubled"),
        ("windows", other_count, "altered"),
        ("windows", lambda found: [changed(found[0], start=event_time(99_990).isoformat()), *found[1:]], "altered"),
    ],
)
def test_a_topic_that_is_spoilt_is_seen(fed: Fed, name: str, spoil: Spoil, seen: str) -> None:
    make, check = CHECKS[name]
    checked = check(name, fed, spoil(make(fed)))
    assert not checked.ok and getattr(checked, seen) > 0


@pytest.mark.parametrize("name", ["figures", "differences", "windows"])
def test_no_topic_ends_as_arithmetic_says_if_a_number_of_a_key_was_never_fed(fed: Fed, name: str) -> None:
    """The topic is right by what was fed, and yet not by the key's name."""
    make, check = CHECKS[name]
    less = replace(fed, records=fed.records[:-1])
    checked = check(name, less, make(less))
    assert checked.closed == checked.groups - 1 and not checked.ok
    assert len(less.faults()) == 1 and not fed.faults()


def test_the_feed_is_refused_if_a_number_was_fed_twice(fed: Fed) -> None:
    records: Sequence[RawRecord] = [*fed.records, fed.records[0]._replace(offset=10**6)]
    assert len(Fed(records).faults()) == 1
