"""Batches of a stream whose position Kafka no longer has: planned by offsets as ever, and read from both places."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import pytest

from streaming_jobs.errors import OffsetsLost
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.sources.planner import SMALL, BatchLimits, Planner
from streaming_jobs.sources.range_reader import RangeReader
from tests.support.memory_archive import MemoryArchive
from tests.support.memory_consumer import TOPIC, MemoryConsumer, record

LIMITS = BatchLimits(seconds=2.0, records=300_000, bytes=10**9, wait=0.0)


@dataclass
class Topic:
    """A topic of one partition that keeps its records from `first` on; all of them were archived."""

    end: int
    first: int = 0
    covered: int | None = None
    now: float = 0.0
    consumer: MemoryConsumer = field(init=False)
    archive: MemoryArchive = field(init=False)

    def __post_init__(self) -> None:
        covered = self.end if self.covered is None else self.covered
        self.archive = MemoryArchive({0: range(self.end)}, {0: (0, covered)})
        self.consumer = MemoryConsumer({0: {}}, {0: self.end}, most=10**6)
        self.forget(self.first)

    def forget(self, first: int) -> None:
        self.first = first
        self.consumer.log = {0: {o: record(0, o) for o in range(first, self.end)}}
        self.consumer.first = {0: first}

    def latest(self, _: str) -> dict[int, int]:
        return {0: self.end}

    def offsets(self, _: str) -> OffsetBounds:
        return OffsetBounds({0: self.first}, {0: self.end})

    def mean_size(self, _: str, starts: dict[int, int]) -> float:
        assert starts[0] >= self.first, "Kafka is not asked for what it does not have"
        return 100.0

    def planner(self, *, archive: bool = True) -> Planner:
        reader = RangeReader(TOPIC, {"bootstrap.servers": "x:1"}, timedelta(0), connect=lambda _: self.consumer)
        topics = cast("TopicReader", self)
        kept = self.archive if archive else None
        return Planner(topics, reader, LIMITS, monotonic=lambda: self.now, sleep=lambda _: None, archive=kept)


def offsets(planner: Planner, start: int, end: int) -> list[int] | None:
    parts = planner.take({0: (start, end)}, 10**6)
    return None if parts is None else [o for part in parts for o in part.column("offset").to_pylist()]


def test_a_small_batch_is_read_from_both() -> None:
    topic = Topic(100, first=60)
    planner = topic.planner()
    assert planner.next_end({0: 10}) == {0: 100}
    assert offsets(planner, 10, 100) == list(range(10, 100))
    assert topic.archive.asked == [(0, (10, 60))]
    assert offsets(planner, 10, 100) == list(range(10, 100)), "a repeated batch has the same records"


def test_a_backlog_is_read_by_workers_who_learn_where_kafka_begins() -> None:
    topic = Topic(100_000, first=90_000)
    planner = topic.planner()
    at, ends = 0, []
    while at < 100_000:
        end = planner.next_end({0: at})[0]
        assert (offsets(planner, at, end) is None) == (end - at > SMALL)
        ends.append(at := end)
        topic.now += 1
        assert planner.first == {0: 90_000}
    assert ends[0] == 10_000 and len(ends) < 8, "the first batch is small, the next ones grow as ever"


def test_a_live_stream_that_fell_behind_retention_goes_on() -> None:
    topic = Topic(100)
    planner = topic.planner()
    assert planner.next_end({0: 0}) == {0: 100} and offsets(planner, 0, 50) == list(range(50))
    topic.end = 300
    topic.archive = planner.archive = MemoryArchive({0: range(300)}, {0: (0, 300)})
    topic.forget(200)
    topic.consumer.ends = {0: 300}
    planner.reader.close()  # what it had received is gone with the connection
    topic.consumer.positions.clear()
    assert planner.next_end({0: 50}) == {0: 300}
    assert offsets(planner, 50, 300) == list(range(50, 300))


def test_a_hole_is_refused_before_a_batch_is_planned() -> None:
    planner = Topic(100, first=60, covered=55).planner()
    with pytest.raises(OffsetsLost, match="offsets 55 to 59 of topic things, partition 0, are gone: archive"):
        planner.next_end({0: 10})


def test_without_an_archive_nothing_is_different() -> None:
    with pytest.raises(OffsetsLost, match="no longer in the topic"):
        Topic(100, first=60).planner(archive=False).next_end({0: 10})


def test_until_the_present_end_both_are_read() -> None:
    topic = Topic(100, first=60)
    planner = topic.planner()
    planner.stop_at_present_end()
    assert planner.next_end({0: 10}) == {0: 100} and planner.first == {0: 60}
    assert offsets(planner, 10, 100) == list(range(10, 100))
