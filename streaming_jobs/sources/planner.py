"""The planner of a topic's batches: decides where the next batch ends, and holds the records of small ones.

    live       few records wait: they have been received already, and the batch ends where they end
    backlog    many wait: the broker says where the topic ends, and `BatchSize` how many fit

In a backlog the planner receives nothing, since the workers read those ranges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from streaming_jobs.errors import OffsetsLost
from streaming_jobs.sources.base import TopicEnds
from streaming_jobs.sources.batch_size import BatchSize, lag, share
from streaming_jobs.sources.range_reader import RangeReader, Span

if TYPE_CHECKING:
    from confluent_kafka import Message

SMALL = 20_000
"""Records that the planner holds for a batch, at most; a batch of more is read by workers."""

_LOOK_EVERY = 5.0
"""Seconds between two looks at the topic, for new partitions, and for a topic that was made anew."""


@dataclass(frozen=True)
class Limits:
    """The bounds on a batch of one source: seconds, records, bytes of values; seconds to wait for a first record."""

    seconds: float
    records: int
    bytes: int
    wait: float


@dataclass
class Planner:
    """Plans the batches of one query from one topic."""

    ends: TopicEnds
    reader: RangeReader
    limits: Limits
    monotonic: Callable[[], float] = time.monotonic
    _size: BatchSize = field(init=False)
    _stop_at: dict[int, int] | None = field(default=None, init=False)
    _planned: tuple[int, float] | None = field(default=None, init=False)
    _backlog: bool = field(default=False, init=False)
    _new: dict[int, int] = field(default_factory=dict, init=False)
    _looked: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._size = BatchSize(self.limits.seconds, self.limits.records, self.limits.bytes)

    @classmethod
    def connected(cls, topic: str, config: Mapping[str, Any], timeout: timedelta, limits: Limits) -> Planner:
        """A planner with clients of its own."""
        from streaming_jobs.sources.topics import Topics

        return cls(Topics(config, timeout), RangeReader(topic, config, timeout), limits)

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self.reader.topic

    def next_end(self, start: Mapping[int, int]) -> dict[int, int]:
        """The end of the batch that begins at `start`; equal to it if nothing new is there."""
        if self._planned is not None:
            records, at = self._planned
            self._size.took(records, self.monotonic() - at)
        ends = self._ends(dict(start))
        end = share(start, ends, self._size.limit)
        records = lag(start, end)
        self._backlog = lag(end, ends) > SMALL
        if records > SMALL:
            self.reader.release()
        self._planned = (records, self.monotonic()) if records else None
        return end

    def take(self, spans: Mapping[int, Span], most: int) -> list[list[Message]] | None:
        """The records of a small batch; None for a large one, and while the workers read."""
        if sum(end - start for start, end in spans.values()) > SMALL:
            return None
        records = list(self.reader.read(spans, most))
        sizes = [len(m.value() or b"") + len(m.key() or b"") for messages in records for m in messages]
        if sizes:
            self._size.record_bytes = sum(sizes) / len(sizes)
        return records

    def stop_at_present_end(self) -> None:
        """Plan no batch beyond the present end of the topic."""
        self._stop_at = self.ends.latest(self.topic)

    def close(self) -> None:
        """Close the clients."""
        self.reader.close()

    def _ends(self, start: dict[int, int]) -> dict[int, int]:
        """The end of what can be read now: of the topic in a backlog, else of the records that were received."""
        if self._stop_at is not None:
            return {**start, **self._stop_at}
        if self._backlog:
            return self._look(start)
        if self._looked is None or self.monotonic() - self._looked >= _LOOK_EVERY:
            self._new = {p: 0 for p in self._look(start) if p not in start}
        ends = self.reader.follow({**self._new, **start}, self.limits.wait, SMALL)
        return self._look(start) if self.reader.buffered >= SMALL else ends

    def _look(self, start: Mapping[int, int]) -> dict[int, int]:
        """The ends of the topic's partitions; raises OffsetsLost if one of them is before the stream's position."""
        ends = self.ends.latest(self.topic)
        self._looked = self.monotonic()
        for partition, at in start.items():
            if (end := ends.get(partition)) is None or end < at:
                there = "is gone" if end is None else f"ends at offset {end}"
                raise OffsetsLost(
                    f"{self.topic} partition {partition} {there}, and the stream is at {at}: records that were there "
                    "are gone",
                    "see `recourse streams status`",
                )
        return ends
