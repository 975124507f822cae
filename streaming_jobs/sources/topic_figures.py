"""Figures of topics as they are now: partitions, offsets, records per second between two looks, retention, bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from streaming_jobs.sources.base import TopicReader


class Sleep(Protocol):
    """Waits; `time.sleep` is one."""

    def __call__(self, seconds: float, /) -> None:
        """Wait so many seconds."""


@dataclass(frozen=True)
class TopicFigures:
    """One topic at `at` (seconds since 1970): first and next offset by partition.

    `rates` are records per second by partition; None if there was no second look. `record_bytes` is the mean size of
    key and value of some records; None if they were not measured.
    """

    at: float
    name: str
    id: str
    retention_ms: int
    cleanup_policy: str
    earliest: Mapping[int, int]
    latest: Mapping[int, int]
    rates: Mapping[int, float] | None = None
    record_bytes: float | None = None

    @property
    def partitions(self) -> int:
        """The number of partitions."""
        return len(self.latest)

    @property
    def records(self) -> int:
        """Offsets held; transaction markers and compacted records count too."""
        return sum(end - self.earliest.get(p, 0) for p, end in self.latest.items())

    @property
    def end(self) -> int:
        """The sum of the next offsets: it grows by one with each record."""
        return sum(self.latest.values())

    @property
    def rate(self) -> float | None:
        """Records per second in all partitions; None if there was no second look."""
        return None if self.rates is None else sum(self.rates.values())

    @property
    def bytes(self) -> float | None:
        """Bytes of keys and values, estimated from the mean size; the client does not give those on disk."""
        return None if self.record_bytes is None else self.record_bytes * self.records

    def as_json(self) -> dict[str, Any]:
        """The figures for programs."""
        return {
            "at": self.at,
            "topic": self.name,
            "id": self.id,
            "partitions": self.partitions,
            "records": self.records,
            "end": self.end,
            "records_per_s": None if self.rate is None else round(self.rate, 1),
            "retention_ms": self.retention_ms,
            "cleanup_policy": self.cleanup_policy,
            "record_bytes": None if self.record_bytes is None else round(self.record_bytes, 1),
            "bytes": None if self.bytes is None else round(self.bytes),
            "offsets": [
                {
                    "partition": p,
                    "first": self.earliest.get(p, 0),
                    "end": end,
                    "records_per_s": None if self.rates is None else round(self.rates.get(p, 0.0), 1),
                }
                for p, end in sorted(self.latest.items())
            ],
        }


def look(topics: TopicReader, names: Iterable[str]) -> dict[str, TopicFigures]:
    """The figures of those topics that exist, by name; raises BrokerUnreachable."""
    figures = {}
    for name in names:
        info = topics.describe(name)
        if info is None:
            continue
        at, offsets = time.time(), topics.offsets(name)
        policy = info.cleanup_policy
        figures[name] = TopicFigures(at, name, info.id, info.retention_ms, policy, offsets.earliest, offsets.latest)
    return figures


def with_rates(
    topics: TopicReader, figures: Mapping[str, TopicFigures], seconds: float, sleep: Sleep = time.sleep
) -> dict[str, TopicFigures]:
    """The same figures some seconds later, with the records per second in between; raises BrokerUnreachable."""
    sleep(seconds)
    return {name: since(figures[name], now) for name, now in look(topics, figures).items()}


def since(before: TopicFigures, now: TopicFigures) -> TopicFigures:
    """The newer figures with the rates since the older ones; without, if the topic was made anew."""
    span = now.at - before.at
    if now.id != before.id or span <= 0:
        return now
    rates = {p: max(end - before.latest.get(p, 0), 0) / span for p, end in now.latest.items()}
    return replace(now, rates=rates)


def with_size(topics: TopicReader, figures: TopicFigures) -> TopicFigures:
    """The same with the mean size of the newest records, at most some hundred of each partition."""
    starts = {p: max(end - 200, figures.earliest.get(p, 0)) for p, end in figures.latest.items()}
    held = {p: at for p, at in starts.items() if at < figures.latest[p]}
    return replace(figures, record_bytes=topics.mean_size(figures.name, held) if held else None)
