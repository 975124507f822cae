"""The number of records of a stream's next batch, so that a batch takes about as long as the settings want.

The first batch is small, so that it is in the tables at once; each following one is as large as the time of those
before says, and at most four times as large as the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FIRST = 10_000
"""Records of the first batch; a batch is not limited to fewer, unless its bytes or the settings do so."""

_GROWTH = 4.0


@dataclass
class BatchSize:
    """The bound on the next batch: `seconds` it may take, at most `most` records and `most_bytes` bytes of values."""

    seconds: float
    most: int
    most_bytes: int
    first: int = FIRST
    record_bytes: float = 0.0
    _limit: float = field(init=False)

    def __post_init__(self) -> None:
        self._limit = self.first

    @property
    def limit(self) -> int:
        """Records of the next batch."""
        limit = min(self._limit, self.most)
        if self.record_bytes > 0:
            limit = min(limit, self.most_bytes / self.record_bytes)
        return max(1, int(limit))

    def took(self, records: int, seconds: float) -> None:
        """Learn from a batch: a smaller one than the bound says nothing about large ones."""
        if records < self.limit:
            return
        fits = records / max(seconds, 1e-3) * self.seconds
        self._limit = max(self.first, min(fits, self._limit * _GROWTH))


def lag(start: Mapping[int, int], end: Mapping[int, int]) -> int:
    """Offsets between two positions, all partitions together; a partition without a start begins at 0."""
    return sum(max(last - start.get(p, 0), 0) for p, last in end.items())


def share(start: Mapping[int, int], ends: Mapping[int, int], limit: int) -> dict[int, int]:
    """The end of a batch of at most `limit` offsets, divided among the partitions in proportion to what waits there.

    A partition in which something waits gets at least one offset, so that none of many is left behind.
    """
    waiting = {p: max(end - start.get(p, 0), 0) for p, end in ends.items()}
    total = sum(waiting.values())
    if total > limit:
        parts = {p: max(1, count * limit // total) for p, count in waiting.items() if count}
        left = limit - sum(parts.values())
        for partition in sorted(parts, key=lambda p: waiting[p] * limit % total, reverse=True)[: max(left, 0)]:
            parts[partition] += 1
        waiting = {**dict.fromkeys(waiting, 0), **parts}
    return {p: start.get(p, 0) + count for p, count in waiting.items()}
