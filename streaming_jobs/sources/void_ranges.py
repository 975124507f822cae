"""Void ranges of a topic: offsets that a recovery has declared wrong, and that no stream reads again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streaming_jobs.ledger.positions import PartitionOffsets
from streaming_jobs.sources.base import Span

if TYPE_CHECKING:
    from streaming_jobs.sources.record_blocks import SourceRecords


@dataclass(frozen=True)
class VoidRanges:
    """The void ranges of one topic, by partition: in order, apart from each other, none of them empty."""

    spans: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int, int]]) -> VoidRanges:
        """The ranges (partition, first offset, offset after the last) in any order; they may overlap."""
        joined: dict[int, list[Span]] = {}
        for partition, begin, end in sorted(ranges):
            spans = joined.setdefault(partition, [])
            if begin >= end:
                continue
            if spans and begin <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(spans[-1][1], end))
            else:
                spans.append((begin, end))
        return cls({partition: tuple(spans) for partition, spans in joined.items() if spans})

    def joined(self, other: VoidRanges) -> VoidRanges:
        return VoidRanges.of((p, *span) for each in (self, other) for p, spans in each.spans.items() for span in spans)

    def first_difference(self, other: VoidRanges) -> dict[int, int]:
        """By partition, the first offset that is void in only one of the two; partitions without one are left out."""
        found = {}
        for partition in {*self.spans, *other.spans}:
            mine, others = (
                {border for span in each.spans.get(partition, ()) for border in span} for each in (self, other)
            )
            if mine != others:  # at a border that only one has, void begins or ends there alone
                found[partition] = min(mine ^ others)
        return found

    def after(self, offsets: PartitionOffsets) -> dict[int, int]:
        """The offsets, those in a void range moved to its end."""
        return {partition: self._end(partition, offset) for partition, offset in offsets.items()}

    def count(self, spans: Mapping[int, Span]) -> int:
        return sum(
            max(min(end, last) - max(begin, first), 0)
            for partition, (first, last) in spans.items()
            for begin, end in self.spans.get(partition, ())
        )

    def clipped(self, spans: Mapping[int, Span]) -> dict[int, Span]:
        """The ranges without void offsets at their beginnings and ends; those with nothing else are left out."""
        kept = {}
        for partition, (first, last) in spans.items():
            begin, end = self._end(partition, first), last
            for void_begin, void_end in self.spans.get(partition, ()):
                if void_begin < end <= void_end:
                    end = void_begin
            if begin < end:
                kept[partition] = (begin, end)
        return kept

    def kept(self, records: SourceRecords) -> SourceRecords:
        """The records that are not void; the same object if all are."""
        if not self.spans or not len(records):
            return records
        import numpy as np

        partitions = np.asarray(records.column("partition"))
        offsets = np.asarray(records.column("offset"))
        void = np.zeros(len(records), dtype=bool)
        for partition, spans in self.spans.items():
            of_it = partitions == partition
            for begin, end in spans:
                void |= of_it & (offsets >= begin) & (offsets < end)
        return records.take([int(row) for row in np.flatnonzero(~void)]) if void.any() else records

    def _end(self, partition: int, offset: int) -> int:
        for begin, end in self.spans.get(partition, ()):
            if begin <= offset < end:
                return end
        return offset


NO_VOID = VoidRanges()
