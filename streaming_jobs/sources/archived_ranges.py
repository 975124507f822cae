"""Ranges of offsets of which Kafka may no longer have the beginning: an archive supplies that part.

    archive   [begin ............... end)
    Kafka                [first ................ latest)
    range           [........|.........)            the part before `first` from the archive, the rest from Kafka

A range gives the same records whichever part is archived, so retention may move at any moment, also while a range
is read: what Kafka no longer has is then read from the archive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from streaming_jobs.errors import OffsetsLost
from streaming_jobs.ledger.positions import Archived
from streaming_jobs.sources.base import Archive, Span
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from streaming_jobs.sources.range_reader import RangeReader
    from streaming_jobs.sources.record_blocks import SourceRecords

Firsts = Mapping[int, int]
"""By partition the first offset that Kafka has."""


def readable_from(first: Firsts, bounds: Mapping[int, Span]) -> dict[int, int]:
    """By partition the first offset that can be read: the archive's, unless a hole parts it from Kafka's first."""
    return {
        partition: min(offset, bounds[partition][0])
        if partition in bounds and bounds[partition][1] >= offset
        else offset
        for partition, offset in first.items()
    }


def hole(begin: int, first: int, covered: Span | None) -> Span | None:
    """The first offsets from `begin` to Kafka's `first` that the archive does not cover either; None if it has all."""
    if begin >= first:
        return None
    if covered is None or not covered[0] <= begin < covered[1]:
        until = first if covered is None or covered[0] <= begin else min(covered[0], first)
        return begin, until
    return None if covered[1] >= first else (covered[1], first)


def parted(spans: Mapping[int, Span], first: Firsts) -> tuple[dict[int, Span], dict[int, Span]]:
    """The parts of ranges before Kafka's first offsets, and the rest; without empty ones."""
    before = {p: (start, min(end, first.get(p, 0))) for p, (start, end) in spans.items() if start < first.get(p, 0)}
    rest = {p: (max(start, first.get(p, 0)), end) for p, (start, end) in spans.items()}
    return before, {p: (start, end) for p, (start, end) in rest.items() if start < end}


def lost(topic: str, archive: Archive, spans: Mapping[int, Span]) -> OffsetsLost | None:
    """The error for ranges, none of which Kafka has, that the archive does not cover as a whole; None if it does."""
    bounds = archive.bounds()
    for partition, (start, end) in spans.items():
        if hole(start, end, bounds.get(partition)) is not None:
            added = Archived(archive.name, bounds, {})
            return OffsetsLost(gone(added, topic, partition, start, end), f"see `{commands.status()}`")
    return None


def gone(added: Archived | None, topic: str, partition: int, begin: int, first: int) -> str:
    """The offsets from `begin` to Kafka's `first` that can be read nowhere, in words."""
    covered = added.bounds.get(partition) if added is not None else None
    start, end = hole(begin, first, covered) or (begin, first)
    lines = f"offsets {start} to {end - 1} of topic {topic}, partition {partition}, are gone"
    return lines if added is None else f"{lines}: archive {added.name} {words(covered)}, and Kafka begins at {first}"


def words(covered: Span | None) -> str:
    """The offsets that an archive covers, in words."""
    return "covers none" if covered is None else f"covers {covered[0]} to {covered[1] - 1}"


def read_ranges(
    reader: RangeReader,
    spans: Mapping[int, Span],
    most: int,
    archive: Archive | None = None,
    first: Firsts | None = None,
    look: Callable[[], Firsts] | None = None,
) -> Iterator[SourceRecords]:
    """Yields the records of the ranges, about `most` at a time, in order within each partition.

    `first` has Kafka's first offsets at the last look-up, and `look` repeats it, if offsets prove to be gone. Raises
    OffsetsLost for offsets that are in neither place.
    """
    from streaming_jobs.sources.record_blocks import KafkaMessages  # Arrow and NumPy, which preflight does without

    if archive is None or look is None:
        for messages in reader.read(spans, most):
            yield KafkaMessages(messages)
        return
    left, known = dict(spans), dict(first or {})
    while True:
        before, rest = parted(left, known)
        if before and (error := lost(reader.topic, archive, before)) is not None:
            raise error
        for partition, span in before.items():
            yield from archive.read(partition, span, most)
        left = rest
        try:
            for messages in reader.read(left, most) if left else ():
                yield KafkaMessages(messages)
                # The consumer gives no record twice, so the last one of a partition says how far it was read.
                ends = {message.partition(): message.offset() for message in messages}
                left.update({p: (o + 1, left[p][1]) for p, o in ends.items() if p is not None and o is not None})
            return
        except OffsetsLost:
            reader.close()  # it is in the middle of a range
            known = {**known, **look()}
            left = {p: (start, end) for p, (start, end) in left.items() if start < end}
            if not any(start < known.get(p, 0) for p, (start, _) in left.items()):
                raise
