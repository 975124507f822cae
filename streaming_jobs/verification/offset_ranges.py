"""Arithmetic of offset ranges and of single places in a topic: covered once, twice, or not at all. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, order=True)
class Span:
    """Offsets `start` to `end` (exclusive) of one partition of a topic."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def offsets(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} {self.start}..{self.end - 1}"


@dataclass
class Sweep:
    """The outcome of comparing a set of ranges with the offsets that one partition holds, `low` to `high`.

    `missing` are covered by no range, `doubled` by more than one, `beyond` lie at or after `high`. Offsets before
    `low` are no longer in the topic: they count as doubled if they are covered twice, never as missing.
    """

    missing: list[Span] = field(default_factory=list)
    doubled: list[Span] = field(default_factory=list)
    beyond: list[Span] = field(default_factory=list)


def without(whole: Span, holes: Iterable[Span]) -> list[Span]:
    """The parts of a range that remain when other ranges of its partition are taken out."""
    left, at = [], whole.start
    for hole in sorted(holes, key=lambda span: span.start):
        if at < min(hole.start, whole.end):
            left.append(replace(whole, start=at, end=min(hole.start, whole.end)))
        at = max(at, hole.end)
    return [*left, replace(whole, start=at)] if at < whole.end else left


def cut(spans: Iterable[Span], others: Iterable[Span]) -> tuple[list[Span], list[Span]]:
    """The parts of ranges that other ranges have too, and the parts that they lack; many of both cost little."""
    holes = list(merged(others))
    both: list[Span] = []
    left: list[Span] = []
    for span in spans:
        first = bisect_right(
            holes, (span.topic, span.partition, span.start), key=lambda s: (s.topic, s.partition, s.end)
        )
        last = bisect_left(holes, (span.topic, span.partition, span.end), key=lambda s: (s.topic, s.partition, s.start))
        near = holes[first:last]
        both += [replace(span, start=max(span.start, s.start), end=min(span.end, s.end)) for s in near]
        left += without(span, near)
    return both, left


def sweep(spans: Iterable[Span], whole: Span) -> Sweep:
    """Compare the ranges of one partition with `whole`, the partition's offsets in the topic."""
    taken = [span for span in spans if span.offsets > 0]
    steps: dict[int, int] = {whole.start: 0, whole.end: 0}
    for span in taken:
        steps[span.start] = steps.get(span.start, 0) + 1
        steps[span.end] = steps.get(span.end, 0) - 1
    outcome, depth, before = Sweep(), 0, 0
    for place in sorted(steps):
        if before < place:
            part = replace(whole, start=before, end=place)
            if depth == 0 and whole.start <= before < whole.end:
                outcome.missing.append(part)
            if depth > 1:
                outcome.doubled.append(part)
            if depth > 0 and before >= whole.end:
                outcome.beyond.append(part)
        depth, before = depth + steps[place], place
    for kind in (outcome.missing, outcome.doubled, outcome.beyond):
        kind[:] = merged(kind)
    return outcome


def merged(spans: Iterable[Span]) -> Iterator[Span]:
    """The same offsets in the smallest number of ranges, in order; overlapping ranges become one."""
    last: Span | None = None
    for span in sorted(spans):
        if last is not None and (last.topic, last.partition) == (span.topic, span.partition) and span.start <= last.end:
            last = replace(last, end=max(last.end, span.end))
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


@dataclass(frozen=True)
class Ranges:
    """A set of ranges that can look up single offsets."""

    starts: Mapping[tuple[str, int], list[int]]
    ends: Mapping[tuple[str, int], list[int]]

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Ranges:
        """These ranges, in any order."""
        starts: dict[tuple[str, int], list[int]] = {}
        ends: dict[tuple[str, int], list[int]] = {}
        for span in merged(spans):
            starts.setdefault((span.topic, span.partition), []).append(span.start)
            ends.setdefault((span.topic, span.partition), []).append(span.end)
        return cls(starts, ends)

    def has(self, topic: str, partition: int, offset: int) -> bool:
        """True if the offset lies in one of them."""
        at = bisect_right(self.starts.get((topic, partition), []), offset) - 1
        return at >= 0 and offset < self.ends[topic, partition][at]


def of_partition(spans: Iterable[Span], place: Span) -> list[Span]:
    """Those of the ranges that are of the same partition as another one."""
    return [span for span in spans if (span.topic, span.partition) == (place.topic, place.partition)]


def total(spans: Iterable[Span]) -> int:
    """Offsets in all of them together."""
    return sum(span.offsets for span in spans)


def runs(topic: str, partition: int, offsets: Iterable[int]) -> list[Span]:
    """Single offsets as ranges."""
    return list(merged(Span(topic, partition, offset, offset + 1) for offset in offsets))


_SHIFT = 48
Packed = NDArray[np.int64]
"""Places in a topic, each partition and offset in one number."""


def packed(partitions: Any, offsets: Any) -> Packed:
    """Partitions and offsets, two columns or arrays of one length, as one number each."""
    return np.asarray(partitions, dtype=np.int64) << _SHIFT | np.asarray(offsets, dtype=np.int64)


def place_of(partition: int, offset: int) -> int:
    return partition << _SHIFT | offset


def unpacked(topic: str, places: Iterable[int]) -> list[Span]:
    by_partition: dict[int, list[int]] = {}
    for place in places:
        by_partition.setdefault(place >> _SHIFT, []).append(place & ((1 << _SHIFT) - 1))
    return [span for partition, offsets in sorted(by_partition.items()) for span in runs(topic, partition, offsets)]


def of_spans(spans: Iterable[Span]) -> Packed:
    """Every offset of some ranges, packed and in order."""
    parts = [packed(np.full(s.offsets, s.partition), np.arange(s.start, s.end)) for s in spans if s.offsets > 0]
    return np.sort(np.concatenate(parts)) if parts else np.array([], dtype=np.int64)


def within(places: Packed, spans: Iterable[Span]) -> NDArray[np.bool_]:
    """True for each of the places that lies in one of the ranges of one topic; long ranges cost no more than short."""
    whole = list(merged(span for span in spans if span.offsets > 0))
    if not whole:
        return np.zeros(len(places), dtype=np.bool_)
    starts = np.array([place_of(span.partition, span.start) for span in whole], dtype=np.int64)
    ends = np.array([place_of(span.partition, span.end) for span in whole], dtype=np.int64)
    at = np.searchsorted(starts, places, side="right") - 1
    return np.asarray((at >= 0) & (places < ends[at]))


def shown(spans: Sequence[Span], most: int = 5) -> str:
    rest = f" and {len(spans) - most} more ranges" if len(spans) > most else ""
    return ", ".join(str(span) for span in spans[:most]) + rest
