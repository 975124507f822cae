"""The planner of a topic's batches: decides where the next batch ends, and holds the records of small ones.

    live       few records wait: they have been received already, and the batch ends where they end
    backlog    many wait: the broker says where the topic ends, and `BatchSize` how many fit

In a backlog the planner receives nothing, since the workers read those ranges. A stream whose position Kafka no longer
has, and its archive does, is in a backlog until it is where Kafka begins.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from streaming_jobs.errors import ConfigurationError, OffsetsLost, UsageError
from streaming_jobs.sources.archived_ranges import Firsts, lost, parted, read_ranges
from streaming_jobs.sources.base import Archive, Span, TopicReader
from streaming_jobs.sources.range_reader import MOST_BYTES, RangeReader
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from streaming_jobs.sources.record_blocks import SourceRecords


# The number of records of a stream's next batch, so that a batch takes about as long as the settings want.
#
# The first batch is small, so that it is in the tables at once; each following one is as large as the time of those
# before says, and at most four times as large as the one before. A part of that time is the same for any number of
# records (plan, tasks, commit: seconds on a cluster that has just started, or on a store). A line through the sizes and
# times of the last batches shows it, older ones counting less. Where it is longer than half of the time that is wanted,
# smaller batches would hardly be quicker: then records get as much time as that part. Batches of one size show nothing:
# if they take too long, another size is tried now and then, twice the smallest one, or half of a larger one.

FIRST = 10_000
"""Records of the first batch; a batch is not limited to fewer, unless its bytes or the settings do so."""

_GROWTH = 4.0
_CAREFUL = 2.0
"""The same where the part that does not grow decides: what is known of it varies with each batch."""
_TRY = 2.0
_TRIES_EVERY = 25
"""Batches between two tries of another size."""
_APART = 0.25
"""How far sizes have to be apart for a line: their standard deviation, as a share of their mean."""
_MOST_FIXED = 0.8
"""The largest share of a batch's time that is taken for fixed: times vary."""
_LAST = 8
_WEIGHT = 0.85
"""The weight of a batch beside the next one."""


@dataclass
class _Line:
    """A line through records and seconds of batches, by least squares; each batch weighs less than the next one."""

    weight: float = 0.0
    records: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    """Their seconds: none was quicker than the part that does not grow."""

    def add(self, records: int, seconds: float) -> None:
        self.weight = self.weight * _WEIGHT + 1
        self.records = self.records * _WEIGHT + records
        self.seconds = self.seconds * _WEIGHT + seconds
        self.squares = self.squares * _WEIGHT + records * records
        self.products = self.products * _WEIGHT + records * seconds
        self.last.append(seconds)

    def at_zero(self) -> float | None:
        """The seconds of a batch without records, at most those of a quick one; None if sizes are too near."""
        records, seconds = self.records / self.weight, self.seconds / self.weight
        variance = self.squares / self.weight - records * records
        if variance <= (_APART * records) ** 2:
            return None
        slope = (self.products / self.weight - records * seconds) / variance
        return min(max(seconds - slope * records, 0.0), *self.last)


@dataclass
class BatchSize:
    """The bound on the next batch: `seconds` it may take, at most `most` records and `most_bytes` bytes of values."""

    seconds: float
    most: int
    most_bytes: int
    first: int = FIRST
    record_bytes: float = 0.0
    _limit: float = field(init=False)
    _seen: _Line = field(default_factory=_Line, init=False)
    _fixed: float = field(default=0.0, init=False)
    """Seconds of a batch that do not depend on its records, as far as batches of different sizes have shown."""
    _until_try: int = field(default=2, init=False)

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
        seconds = max(seconds, 1e-3)
        self._seen.add(records, seconds)
        if (found := self._seen.at_zero()) is not None:
            self._fixed = found
        fixed = min(self._fixed, _MOST_FIXED * seconds)
        growth = _GROWTH if self.seconds - fixed >= fixed else _CAREFUL
        fits = max(self.seconds - fixed, fixed) * records / (seconds - fixed)
        self._until_try -= 1
        if self._until_try <= 0 and found is None and seconds > self.seconds:
            fits = records * _TRY if self._limit <= self.first else records / _TRY
            self._until_try, self._seen = _TRIES_EVERY, _Line()
            self._seen.add(records, seconds)
        self._limit = max(self.first, min(fits, self._limit * growth))


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
        unfilled = [p for p, part in parts.items() if part < waiting[p]]
        for partition in sorted(unfilled, key=lambda p: waiting[p] * limit % total, reverse=True)[: max(left, 0)]:
            parts[partition] += 1
        waiting = {**dict.fromkeys(waiting, 0), **parts}
    return {p: start.get(p, 0) + count for p, count in waiting.items()}


SMALL = 20_000
"""Records that the planner holds for a batch, at most; a batch of more is read by workers."""

FETCH_AHEAD = 10_000
"""Records that the reader of a planner fetches ahead."""
_SURE_AFTER = 1.0
_LOOK_EVERY = 5.0
"""Seconds between two checks of the topic for new partitions, and for a recreated topic."""


@dataclass(frozen=True)
class BatchLimits:
    """The bounds on a batch of one source: seconds, records, bytes of values; seconds to wait for a first record.

    `first`: records of the first batch. `seconds` is at least the time from one batch's start to the next one's.
    `until`: partition -> offset; with the trigger available-now, batches end there instead of at the topic's end.
    `steps` are offsets by partition at which a batch has to end, in order, if it begins before.
    `tasks` read a large batch; 0: one per core, of the executors that a file of `platform/cluster.py` counts.
    `driver_share` of a core decodes small batches; None: any share, as without executors beside the driver.
    `times` is the file of the batch's `ReadTimes`.
    """

    seconds: float
    records: int
    bytes: int
    wait: float
    first: int = FIRST
    until: Mapping[int, int] | None = None
    steps: Sequence[Mapping[int, int]] = ()
    tasks: int = 0
    cores: Path | None = None
    driver_share: float | None = None
    times: Path | None = None

    def tasks_now(self) -> int:
        """The number of tasks for a batch that is planned now; 0 if it is that of the start."""
        with suppress(FileNotFoundError):
            return self.tasks or (int(self.cores.read_text(encoding="ascii")) if self.cores is not None else 0)
        return 0


def up_to_step(
    start: Mapping[int, int], ends: Mapping[int, int], steps: Sequence[Mapping[int, int]]
) -> Mapping[int, int]:
    """The ends, but none after the first of the steps, in order, that a batch from `start` can move towards.

    A partition that a step does not name was read after it only.
    """

    def moves(step: Mapping[int, int]) -> bool:
        return any(min(end, step.get(p, 0)) > start.get(p, 0) for p, end in ends.items())

    first = bisect_left(steps, True, key=moves)
    if first == len(steps):
        return ends
    return {p: max(min(end, steps[first].get(p, 0)), start.get(p, 0)) for p, end in ends.items()}


DRIVER_SHARE = 0.25
"""The share of a core of the driver that decodes small batches of one source, if executors could decode them."""
_CHEAP = 1_000
"""Records that the driver decodes in any case: a task on an executor costs more."""


@dataclass
class DecodeCost:
    """The driver's CPU time for a record, learned from the batches that it decodes; `share` of a core is its budget."""

    share: float | None
    _per_record: float = field(default=0.0, init=False)

    def decoded(self, records: int, seconds: float) -> None:
        """Learn from a batch; those of few records are mostly fixed cost."""
        if records >= _CHEAP // 10:
            now = seconds / records
            self._per_record = (self._per_record + now) / 2 if self._per_record else now

    def affordable(self, records: int, interval: float) -> bool:
        """True if the driver may decode so many records in each interval between two batches."""
        return self.share is None or records <= _CHEAP or records * self._per_record <= self.share * interval


@dataclass
class Planner:
    """Plans the batches of one query from one topic."""

    topics: TopicReader
    reader: RangeReader
    limits: BatchLimits
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    archive: Archive | None = None
    void: VoidRanges = NO_VOID
    first: Firsts = field(default_factory=dict, init=False)
    """The first offsets that Kafka had at the last look, if there is an archive."""
    _size: BatchSize = field(init=False)
    _stop_at: dict[int, int] | None = field(default=None, init=False)
    _planned: tuple[int, float] | None = field(default=None, init=False)
    _backlog: bool = field(default=False, init=False)
    _new: dict[int, int] = field(default_factory=dict, init=False)
    _looked: float | None = field(default=None, init=False)
    _interval: float = field(default=float("inf"), init=False)
    """Seconds between the plans of the last two batches, and the time of the last one."""
    _last: float | None = field(default=None, init=False)
    cost: DecodeCost = field(init=False)

    def __post_init__(self) -> None:
        self.cost = DecodeCost(self.limits.driver_share)
        self._size = BatchSize(self.limits.seconds, self.limits.records, self.limits.bytes, self.limits.first)

    @property
    def topic(self) -> str:
        return self.reader.topic

    def next_end(self, start: Mapping[int, int]) -> dict[int, int]:
        """The end of the batch that begins at `start`; equal to it if nothing new is there.

        A position in a void range moves to its end at once.
        """
        if self._planned is not None:
            records, at = self._planned
            self._size.took(records, self.monotonic() - at)
        start = self._after_void(start)
        ends = up_to_step(start, self._ends(dict(start)), self.limits.steps)
        if lag(start, ends) > SMALL:
            self._learn_size(start)
        end = share(start, ends, self._size.limit)
        records = lag(start, end)
        self._backlog = lag(end, ends) > SMALL
        if records > SMALL:
            self.reader.release()
        now, before = self.monotonic(), self._last
        self._planned = (records, now) if records else None
        if records:
            self._interval, self._last = (float("inf") if before is None else now - before), now
        return end

    def _after_void(self, start: Mapping[int, int]) -> dict[int, int]:
        moved = self.void.after(start)
        if self._stop_at is None:
            return moved
        return {p: max(min(offset, self._stop_at.get(p, offset)), start[p]) for p, offset in moved.items()}

    def take(self, spans: Mapping[int, Span], most: int) -> list[SourceRecords] | None:
        """The records of a small batch; None for a large one, or one that is above the driver's share."""
        count = sum(end - start for start, end in spans.values())
        if count > SMALL:
            return None
        self._learn_size({partition: start for partition, (start, _) in spans.items()})
        if count * self._size.record_bytes > 2 * MOST_BYTES or not self.cost.affordable(count, self._interval):
            return None
        return list(read_ranges(self.reader, spans, most, self.archive, self.first, self._look_at_first))

    def stop_at_present_end(self) -> None:
        """Plan no batch beyond the present end of the topic, or beyond the bound that the limits give.

        Raises OffsetsLost if the topic ends before that bound.
        """
        latest, until = self.topics.latest(self.topic), self.limits.until
        if until is not None:
            self._check(until, latest)
        self._stop_at = latest if until is None else dict(until)

    def close(self) -> None:
        self.reader.close()

    def _ends(self, start: dict[int, int]) -> Mapping[int, int]:
        """The end of what can be read now: of the topic in a backlog, else of the records that were received."""
        if self._stop_at is not None:
            # A partition that is newer than the bound has no records before it.
            stop_at = self._stop_at if self.limits.until is None else {**start, **self._stop_at}
            self._check(start, stop_at)
            if self._looked is None and self.archive is not None:
                self._look(start)  # once: for the part from the archive
            return stop_at
        if self._backlog or self._archived(start):
            return self._look(start)
        if self._looked is None or self.monotonic() - self._looked >= _LOOK_EVERY:
            ends = self._look(start)
            self._new = {p: 0 for p in ends if p not in start}
            if self._archived(start):
                return ends
        try:
            received = self.reader.follow({**self._new, **start}, self.limits.wait, SMALL)
        except OffsetsLost:
            if self.archive is None:
                raise
            self.reader.close()
            return self._look(start)
        if self.reader.buffered:
            self._size.record_bytes = self.reader.buffered_bytes / self.reader.buffered
        return self._look(start) if self.reader.buffered >= SMALL else received

    def _learn_size(self, start: Mapping[int, int]) -> None:
        """Measure the records from `start` on, if none was seen yet."""
        if not self._size.record_bytes:
            archived = self._archived(start)
            if archived and self.archive is not None:
                size = self.archive.mean_size(archived)
            else:
                size = self.topics.mean_size(self.topic, start)
            self._size.record_bytes = size or 1.0

    def _archived(self, start: Mapping[int, int]) -> dict[int, int]:
        """The positions that Kafka no longer had at the last look."""
        return {p: offset for p, offset in start.items() if offset < self.first.get(p, 0)}

    def _look_at_first(self) -> Firsts:
        self.first = self.topics.offsets(self.topic).earliest
        return self.first

    def _look(self, start: Mapping[int, int]) -> Mapping[int, int]:
        """The ends of the topic's partitions; raises OffsetsLost if one of them is before the stream's position.

        With an archive, also if there is a hole between what it covers and what Kafka has.
        """
        try:
            ends: Mapping[int, int] = self.topics.latest(self.topic)
            self._check(start, ends)
        except (OffsetsLost, UsageError):
            # A broker that has just become the leader, or has just started, may know less than is there.
            self.sleep(_SURE_AFTER)
            ends = self._ends_of_topic(start)
            self._check(start, ends)
        if self.archive is not None:
            before, _ = parted({p: (offset, ends[p]) for p, offset in start.items()}, self._look_at_first())
            if before and (error := lost(self.topic, self.archive, before)) is not None:
                raise error
        self._looked = self.monotonic()
        return ends

    def _ends_of_topic(self, start: Mapping[int, int]) -> Mapping[int, int]:
        try:
            return self.topics.latest(self.topic)
        except ConfigurationError:
            raise
        except UsageError as error:
            if not any(start.values()):
                raise
            raise OffsetsLost(
                f"topic {self.topic} is gone, and the stream has read a part of it", f"see `{commands.status()}`"
            ) from error

    def _check(self, start: Mapping[int, int], ends: Mapping[int, int]) -> None:
        for partition, at in start.items():
            if (end := ends.get(partition)) is None or end < at:
                there = "is gone" if end is None else f"ends at offset {end}"
                raise OffsetsLost(
                    f"{self.topic} partition {partition} {there}, and the stream is at {at}: records that were there "
                    "are gone",
                    f"see `{commands.status()}`",
                )
