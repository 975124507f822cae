"""The history that a checkpoint of Spark still has: its batches with their offsets and times. Reads only.

Spark keeps the entries of the last 100 batches (`spark.sql.streaming.minBatchesToRetain`). The start of the oldest one
is gone with the entry before it, unless it is batch 0.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from streaming_jobs.ledger.positions import TopicOffsets, decode
from streaming_jobs.state.checkpoint import Checkpoint, CheckpointDamaged
from streaming_jobs.storage.locations import Location
from streaming_jobs.verification.offset_ranges import Span

SourceKind = Literal["kafka", "delta", "other"]
_SKEW = 1.0
"""Seconds by which a file system's clock and the driver's may differ."""


@dataclass(frozen=True)
class PlannedBatch:
    """A batch of a checkpoint: its offsets by topic and partition, and its times in seconds since 1970.

    `start` is None if the entry before it is gone. `ended` is the time of `commits/N`, None where that is not known:
    the files of a copied checkpoint have the time of the copy.
    """

    number: int
    start: TopicOffsets | None
    end: TopicOffsets
    planned: float
    committed: bool
    ended: float | None = None

    @property
    def spans(self) -> list[Span]:
        """The offsets that it read; a partition that is new in it begins at 0, as Spark's Kafka source reads it."""
        return [] if self.start is None else list(_between(self.start, self.end))

    @property
    def records(self) -> int:
        return sum(span.offsets for span in self.spans)

    @property
    def set_back(self) -> list[tuple[str, int, int, int]]:
        """Partitions whose end lies before their start: topic, partition, start, end."""
        if self.start is None:
            return []
        starts = {(topic, p): offset for topic, each in self.start.items() for p, offset in each.items()}
        ends = ((topic, p, offset) for topic, each in self.end.items() for p, offset in each.items())
        return [(t, p, starts[t, p], end) for t, p, end in ends if end < starts.get((t, p), 0)]


def _between(start: TopicOffsets, end: TopicOffsets) -> Iterator[Span]:
    for topic, each in end.items():
        for partition, offset in each.items():
            begin = start.get(topic, {}).get(partition, 0)
            if begin < offset:
                yield Span(topic, partition, begin, offset)


@dataclass(frozen=True)
class CheckpointHistory:
    """A checkpoint as it is now; `batches` by number. `trouble` names the files that cannot be read, and why."""

    folder: str
    query_id: str | None
    batches: Mapping[int, PlannedBatch]
    sources: tuple[SourceKind, ...] = ()
    stateful: bool = False
    trouble: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.rstrip("/").rpartition("/")[2]

    @property
    def topics(self) -> list[str]:
        """The topics of its newest batch."""
        return sorted(self.in_order[-1].end) if self.batches else []

    @property
    def first(self) -> int | None:
        return min(self.batches, default=None)

    @property
    def last_planned(self) -> int | None:
        return max(self.batches, default=None)

    @property
    def last_committed(self) -> int | None:
        return max((number for number, batch in self.batches.items() if batch.committed), default=None)

    @property
    def begun(self) -> float:
        """The time of its oldest known batch; 0 without one."""
        return min((batch.planned for batch in self.batches.values()), default=0.0)

    @cached_property
    def in_order(self) -> list[PlannedBatch]:
        return [self.batches[number] for number in sorted(self.batches)]

    def until(self, number: int) -> float:
        """The time after which a batch no longer wrote: the end of it, or the plan of the next one."""
        batch, following = self.batches[number], self.batches.get(number + 1)
        if batch.ended is not None:
            return batch.ended + _SKEW
        return following.planned if following is not None else float("inf")

    def batch_at(self, at: float) -> PlannedBatch | None:
        """The batch that ran at a time, as far as its times say."""
        after = bisect_right(self.in_order, at, key=lambda batch: batch.planned)
        running = self.in_order[after - 1] if after else None
        return running if running is not None and at <= self.until(running.number) else None


def read_checkpoint(folder: Location) -> CheckpointHistory:
    """The history of a checkpoint; what cannot be read of it is left out, and named in `trouble`."""
    checkpoint, trouble = Checkpoint(folder), list[str]()
    planned, committed = checkpoint.planned, checkpoint.committed
    ends: dict[int, TopicOffsets] = {}
    kinds: tuple[SourceKind, ...] = ()
    batches: dict[int, PlannedBatch] = {}
    for number in sorted(planned):
        try:
            kinds, ends[number] = _ends(checkpoint, number)
            start = ends.get(number - 1) if number else _initial(checkpoint, kinds)
            time = _planned(checkpoint, number, batches.get(number - 1))
        except (CheckpointDamaged, FileNotFoundError) as error:
            if (folder / "offsets" / str(number)).exists():  # else a running job has removed it since
                trouble.append(str(getattr(error, "found", error)))
            continue
        batches[number] = PlannedBatch(number, start, ends[number], time, number in committed, _ended(folder, number))
    trouble += [
        f"offsets/{number} is missing, although commits/{number} is there"
        for number in sorted(committed - planned)
        if planned and number >= min(planned)
    ]
    trouble += [
        f"commits/{number} is missing, although batch {number + 1} was planned"
        for number in sorted(planned - committed)
        if number + 1 in planned
    ]
    return CheckpointHistory(
        folder=str(folder),
        query_id=_query_id(folder, trouble),
        batches=batches if _times_fit(batches) else {n: replace(b, ended=None) for n, b in batches.items()},
        sources=kinds,
        stateful=(folder / "state").is_dir(),
        trouble=tuple(trouble),
    )


def is_checkpoint(folder: Location) -> bool:
    return (folder / "metadata").is_file() or (folder / "offsets").is_dir()


def _query_id(folder: Location, trouble: list[str]) -> str | None:
    try:
        return str(json.loads((folder / "metadata").read_text(encoding="utf-8"))["id"])
    except FileNotFoundError:
        trouble.append("metadata is missing: the next start would be another query to Delta")
    except (ValueError, KeyError, TypeError):
        trouble.append("metadata cannot be read")
    return None


def _ends(checkpoint: Checkpoint, number: int) -> tuple[tuple[SourceKind, ...], TopicOffsets]:
    """The kind of each source, and where a batch ends in the topics; other sources than Kafka have no offsets here."""
    kinds: list[SourceKind] = []
    ends: dict[str, Mapping[int, int]] = {}
    for index, line in enumerate(checkpoint.sources(number)):
        try:
            kind, offsets = _offsets(line if line != "-" else checkpoint.initial(index))
        except ValueError as error:
            raise CheckpointDamaged(f"offsets/{number}: the line of source {index} is no JSON") from error
        kinds.append(kind)
        for topic, each in offsets.items():
            ends[topic] = {**ends.get(topic, {}), **each}
    return tuple(kinds), ends


def _initial(checkpoint: Checkpoint, kinds: tuple[SourceKind, ...]) -> TopicOffsets | None:
    try:
        starts: dict[str, Mapping[int, int]] = {}
        for index, kind in enumerate(kinds):
            if kind == "kafka":
                starts.update(_offsets(checkpoint.initial(index))[1])
    except (CheckpointDamaged, ValueError):
        return None
    return starts


def _offsets(text: str) -> tuple[SourceKind, TopicOffsets]:
    """The kind of a source and its offsets; raises ValueError for text that is no JSON, which each source writes."""
    value: Any = json.loads(text)
    if isinstance(value, dict) and "reservoirVersion" in value:
        return "delta", {}
    try:
        return "kafka", decode(value)
    except (ValueError, AttributeError, TypeError):
        return "other", {}


def _planned(checkpoint: Checkpoint, number: int, before: PlannedBatch | None) -> float:
    """The time in the entry; that of the file for an entry which was made by hand from the one before."""
    at = float(checkpoint.metadata(number).get("batchTimestampMs", 0)) / 1000
    by_hand = at == 0 or (before is not None and at == before.planned)
    return float((checkpoint.folder / "offsets" / str(number)).stat().st_mtime) if by_hand else at


def _ended(folder: Location, number: int) -> float | None:
    try:
        return float((folder / "commits" / str(number)).stat().st_mtime)
    except FileNotFoundError:
        return None


def _times_fit(batches: Mapping[int, PlannedBatch]) -> bool:
    """True if each batch ended after its plan and before the next one's, by the times of the files."""
    for number, batch in batches.items():
        following = batches.get(number + 1)
        if batch.ended is None:
            continue
        if batch.ended < batch.planned - _SKEW or (following and batch.ended > following.planned + _SKEW):
            return False
    return True
