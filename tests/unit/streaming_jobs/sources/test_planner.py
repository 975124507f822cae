"""Where a batch ends: with the records that were received while few wait, else by the broker's word and a bound."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streaming_jobs.errors import OffsetsLost, UsageError
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.sources.planner import FIRST, SMALL, BatchLimits, BatchSize, Planner, lag, share
from streaming_jobs.sources.range_reader import RangeReader
from streaming_jobs.sources.void_ranges import VoidRanges
from streaming_jobs.testing.consumer import TOPIC, MemoryConsumer, record
from tests.support.memory_archive import MemoryArchive

LIMITS = BatchLimits(seconds=2.0, records=300_000, bytes=10**9, wait=0.1)


@dataclass
class Topic:
    """A topic that grows, its ends, and a clock."""

    partitions: int = 1
    looks: int = 0
    now: float = 0.0
    size: float | None = None
    slept: list[float] = field(default_factory=list)
    consumer: MemoryConsumer = field(default_factory=lambda: MemoryConsumer({}))

    def __post_init__(self) -> None:
        self.consumer.most = 10**6
        self.log: dict[int, dict[int, object]] = {p: {} for p in range(self.partitions)}
        self.consumer.log = self.log  # type: ignore[assignment]

    def grow(self, **counts: int) -> None:
        for name, count in counts.items():
            log = self.log.setdefault(partition := int(name[1:]), {})
            first = max(log, default=-1) + 1
            log.update({offset: record(partition, offset) for offset in range(first, first + count)})

    def latest(self, name: str) -> dict[int, int]:
        assert name == TOPIC
        self.looks += 1
        return {p: self.consumer.end(p) for p in self.log}

    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:
        return self.size

    def planner(self, limits: BatchLimits = LIMITS) -> Planner:
        reader = RangeReader(TOPIC, {"bootstrap.servers": "x:1"}, timedelta(0), connect=lambda _: self.consumer)
        topics = cast("TopicReader", self)
        return Planner(topics, reader, limits, monotonic=lambda: self.now, sleep=self.slept.append)


def grown(limits: BatchLimits = LIMITS, size: float | None = None, **counts: int) -> tuple[Topic, Planner]:
    """A topic with so many records in its partitions, and a planner of its batches."""
    topic = Topic(size=size)
    topic.grow(**counts)
    return topic, topic.planner(limits)


def batches(planner: Planner, start: Mapping[int, int]) -> Iterator[tuple[Mapping[int, int], Mapping[int, int]]]:
    """Start and end of each batch until nothing new is there."""
    while (end := planner.next_end(start)) != start:
        yield start, end
        start = end


def taken(planner: Planner, start: Mapping[int, int], end: Mapping[int, int]) -> list[int] | None:
    """How many records the planner itself has for the batch; None if workers read it."""
    spans = {p: (start.get(p, 0), last) for p, last in end.items() if last > start.get(p, 0)}
    parts = planner.take(spans, 10**6)
    return None if parts is None else [len(part) for part in parts]


def test_a_live_batch_is_what_was_received_and_the_broker_is_not_asked() -> None:
    topic = Topic()
    planner = topic.planner()
    assert planner.next_end({0: 0}) == {0: 0}
    looks = topic.looks
    start = {0: 0}
    for _ in range(5):
        topic.grow(p0=50)
        end = planner.next_end(start)
        assert (end, taken(planner, start, end)) == ({0: start[0] + 50}, [50])
        start = end
    assert topic.looks == looks
    assert planner.next_end(start) == start


def test_a_backlog_begins_small_and_grows_and_the_end_of_it_is_live_again() -> None:
    topic, planner = grown(p0=400_000)
    sizes, by_planner = [], []
    for start, end in batches(planner, {0: 0}):
        sizes.append(end[0] - start[0])
        by_planner.append(taken(planner, start, end) is not None)
        topic.now += 0.5
    assert sizes == [FIRST, 40_000, 160_000, 190_000]
    assert by_planner == [True, False, False, False]
    topic.grow(p0=10)
    (live,) = batches(planner, {0: 400_000})
    assert (live[1], taken(planner, *live)) == ({0: 400_010}, [10])


@pytest.mark.parametrize("share", [None, 0.25])
def test_executors_decode_live_batches_once_those_take_more_than_a_share_of_the_driver(share: float | None) -> None:
    topic = Topic()
    planner = topic.planner(replace(LIMITS, driver_share=share))
    planner.cost.decoded(10_000, 0.2)  # 20 microseconds for a record
    by_driver, start = [], {0: 0}
    for records, seconds in ((10_000, 9.0), (10_000, 1.0), (10_000, 0.25), (900, 0.01), (10_000, 60.0)):
        topic.now += seconds
        topic.grow(p0=records)
        end = planner.next_end(start)
        by_driver.append(taken(planner, start, end) == [records])
        start = end
    assert by_driver == [True, True, share is None, True, True]


def test_the_bound_of_the_settings_holds_for_live_batches_too() -> None:
    _, planner = grown(BatchLimits(2.0, 30, 10**9, 0.1), p0=1000, p1=500)
    start: dict[int, int] = {0: 0, 1: 0}
    for _ in range(3):
        end = planner.next_end(start)
        assert sum(end.values()) - sum(start.values()) == 30
        assert sum(taken(planner, start, end) or []) == 30
        start = end


def test_a_partition_that_is_new_is_read_from_its_beginning() -> None:
    topic, planner = grown(p0=5)
    end = planner.next_end({0: 0})
    assert end == {0: 5}
    topic.grow(p1=3)
    topic.now += 6
    assert planner.next_end(end) == {0: 5, 1: 3}


@pytest.mark.parametrize("partitions", [{0: {}}, {}])
def test_a_topic_that_was_made_anew_is_not_read_on(partitions: dict[int, dict[int, object]]) -> None:
    topic, planner = grown(p0=50)
    end = planner.next_end({0: 0})
    topic.log.clear()
    topic.log.update(partitions)
    topic.now += 6
    with pytest.raises(OffsetsLost, match="partition 0 (ends at offset 0|is gone), and the stream is at 50"):
        planner.next_end(end)
    assert topic.slept == [1.0], "it looks twice"


def test_a_topic_that_is_gone_is_lost_and_one_that_was_never_there_a_wrong_name() -> None:
    class Deleted(Topic):
        def latest(self, name: str) -> dict[int, int]:
            raise UsageError(f"there is no topic {name}")

    with pytest.raises(OffsetsLost, match=f"topic {TOPIC} is gone"):
        Deleted().planner().next_end({0: 5})
    with pytest.raises(UsageError, match="there is no topic"):
        Deleted().planner().next_end({0: 0})


def test_a_broker_that_knows_less_for_a_moment_is_asked_again() -> None:
    topic, planner = grown(p0=50)
    end = planner.next_end({0: 0})
    whole = topic.log[0]
    topic.log[0] = {}
    planner.sleep = lambda _: topic.log.update({0: whole})
    topic.now += 6
    assert planner.next_end(end) == end


def test_a_stream_with_batches_far_apart_reads_all_that_it_may_in_each() -> None:
    topic, planner = grown(BatchLimits(600.0, 25_000, 10**9, 0.1, first=25_000), p0=60_000)
    start, sizes = {0: 0}, []
    for _ in range(2):
        end = planner.next_end(start)
        sizes.append(end[0] - start[0])
        topic.now += 600
        start = end
    assert sizes == [25_000, 25_000]


def test_available_now_ends_where_the_topic_ended_and_notices_one_that_shrank() -> None:
    topic, planner = grown(p0=25_000)
    planner.stop_at_present_end()
    topic.grow(p0=100)
    ends = []
    for start, end in batches(planner, {0: 0}):
        taken(planner, start, end)
        ends.append(end[0])
    assert ends[-1] == 25_000 and len(ends) > 1
    _, planner = grown(p0=5)
    planner.stop_at_present_end()
    with pytest.raises(OffsetsLost, match="ends at offset 5, and the stream is at 50"):
        planner.next_end({0: 50})


def bounded(topic: Topic, **until: int) -> Planner:
    return topic.planner(replace(LIMITS, until={int(name[1:]): end for name, end in until.items()}))


def test_with_a_bound_it_ends_there_also_within_a_void_range() -> None:
    topic = Topic()
    topic.grow(p0=25_000, p1=500)
    planner = bounded(topic, p0=21_003)
    planner.stop_at_present_end()
    ends = [end for _, end in batches(planner, {0: 0, 1: 0})]
    assert ends[-1] == {0: 21_003, 1: 0} and len(ends) > 1
    topic = Topic()
    topic.grow(p0=3_000)
    planner = bounded(topic, p0=1_500)
    planner.void = VoidRanges.of([(0, 1_000, 2_000)])
    planner.stop_at_present_end()
    assert planner.next_end({0: 1_000}) == {0: 1_500}
    assert planner.next_end({0: 1_500}) == {0: 1_500}


def test_a_bound_that_the_topic_does_not_reach_is_an_error_and_no_endless_wait() -> None:
    topic = Topic()
    topic.grow(p0=20)
    with pytest.raises(OffsetsLost, match="ends at offset 20, and the stream is at 21"):
        bounded(topic, p0=21).stop_at_present_end()


def test_a_large_batch_or_few_records_of_many_bytes_are_not_for_the_planner() -> None:
    topic, planner = grown(p0=SMALL + 1)
    assert planner.take({0: (0, SMALL + 1)}, 1000) is None
    assert planner.take({0: (0, SMALL)}, 10**6) is not None
    planner.close()
    assert topic.consumer.calls[-1] == ("close",)
    _, planner = grown(p0=10_000, size=1e6)
    assert planner.take({0: (0, 10_000)}, 1000) is None
    assert taken(planner, {0: 0}, {0: 10}) == [10]


def test_large_records_make_batches_of_fewer_and_their_size_is_known_before_a_large_one() -> None:
    topic = Topic()
    topic.log[0] = {offset: record(0, offset, b"x" * 1000) for offset in range(20_000)}
    planner = topic.planner(BatchLimits(2.0, 10**6, 10**6, 0.1))
    end = planner.next_end({0: 0})
    assert taken(planner, {0: 0}, end) is not None
    assert planner.next_end(end) == {0: end[0] + 1000}
    _, planner = grown(BatchLimits(2.0, 50_000, 10**6, 0.1, first=50_000), p0=100_000, size=1000.0)
    planner._backlog = True  # as after a large batch
    assert planner.next_end({0: 0}) == {0: 1000}


def test_a_position_in_a_void_range_moves_to_its_end_and_no_record_of_it_is_asked_for() -> None:
    _, planner = grown(p0=30_000)
    planner.void = VoidRanges.of([(0, 100, 29_000)])
    planner.stop_at_present_end()
    assert planner.next_end({0: 200}) == {0: 30_000}
    assert taken(planner, {0: 29_000}, {0: 30_000}) == [1_000]


AT_ONCE = BatchLimits(seconds=2.0, records=300_000, bytes=10**9, wait=0.0)


@dataclass
class ArchivedTopic:
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
        return Planner(topics, reader, AT_ONCE, monotonic=lambda: self.now, sleep=lambda _: None, archive=kept)


def offsets(planner: Planner, start: int, end: int) -> list[int] | None:
    parts = planner.take({0: (start, end)}, 10**6)
    return None if parts is None else [o for part in parts for o in part.column("offset").to_pylist()]


def test_a_small_batch_is_read_from_both_also_until_the_present_end() -> None:
    topic = ArchivedTopic(100, first=60)
    planner = topic.planner()
    assert planner.next_end({0: 10}) == {0: 100}
    assert offsets(planner, 10, 100) == list(range(10, 100))
    assert topic.archive.asked == [(0, (10, 60))]
    assert offsets(planner, 10, 100) == list(range(10, 100)), "a repeated batch has the same records"
    topic = ArchivedTopic(100, first=60)
    planner = topic.planner()
    planner.stop_at_present_end()
    assert planner.next_end({0: 10}) == {0: 100} and planner.first == {0: 60}
    assert offsets(planner, 10, 100) == list(range(10, 100))


def test_a_backlog_is_read_by_workers_who_learn_where_kafka_begins() -> None:
    topic = ArchivedTopic(100_000, first=90_000)
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
    topic = ArchivedTopic(100)
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


def test_a_hole_or_no_archive_is_refused_before_a_batch_is_planned() -> None:
    planner = ArchivedTopic(100, first=60, covered=55).planner()
    with pytest.raises(OffsetsLost, match="offsets 55 to 59 of topic things, partition 0, are gone: archive"):
        planner.next_end({0: 10})
    with pytest.raises(OffsetsLost, match="no longer in the topic"):
        ArchivedTopic(100, first=60).planner(archive=False).next_end({0: 10})


OFFSETS = st.dictionaries(st.integers(0, 20), st.integers(0, 10**6), max_size=12)


def test_batches_of_a_backlog_grow_to_their_time_within_the_bounds_and_a_slow_first_or_a_small_one_says_nothing() -> (
    None
):
    size = BatchSize(seconds=2.0, most=10**6, most_bytes=10**9)
    limits = []
    for _ in range(6):
        limits.append(size.limit)
        size.took(size.limit, 0.2 + size.limit / 100_000)  # a fixed part, and a rate
    assert limits[:4] == [FIRST, 40_000, 160_000, 179_999]
    assert 150_000 < limits[-1] < 200_000
    size = BatchSize(seconds=2.0, most=10**6, most_bytes=10**9)
    size.took(FIRST, 60.0)
    assert size.limit == FIRST
    size = BatchSize(seconds=2.0, most=10**6, most_bytes=10**9)
    size.took(FIRST - 1, 0.001)
    assert size.limit == FIRST
    assert BatchSize(2.0, 7, 10**9).limit == 7
    size = BatchSize(2.0, 10**6, 1000)
    size.record_bytes = 300.0
    assert size.limit == 3
    size.record_bytes = 10**9
    assert size.limit == 1, "a record that is larger than the bound is read alone"


def limits_after(batches: int, fixed: float, rate: float, seconds: float = 3.0) -> list[int]:
    """The bounds on the batches of a backlog whose batches take `fixed` seconds, and one for each `rate` records."""
    size, limits = BatchSize(seconds, most=300_000, most_bytes=10**9), list[int]()
    for _ in range(batches):
        limits.append(size.limit)
        size.took(size.limit, fixed + size.limit / rate)
    return limits


def test_batches_grow_where_their_time_does_not_depend_on_their_records() -> None:
    limits = limits_after(200, fixed=4.0, rate=50_000)
    assert limits[:4] == [FIRST, FIRST, 2 * FIRST, 4 * FIRST], "twice as many are tried, and took hardly longer"
    assert min(limits[7:]) > 90_000, "records get as much time as the fixed part, not less"
    assert sum(180_000 < limit <= 200_000 for limit in limits) > 150


def test_batches_of_records_that_are_slow_themselves_stay_small() -> None:
    limits = limits_after(100, fixed=0.1, rate=1_000)
    assert set(limits) == {FIRST, 2 * FIRST} and limits.count(2 * FIRST) <= 4, "a larger size is tried now and then"


@pytest.mark.parametrize(("fixed", "rate"), [(1.0, 10_000), (0.2, 100_000), (4.0, 50_000)])
def test_batches_of_a_machine_that_pauses_now_and_then_stay_bounded(fixed: float, rate: float) -> None:
    """A pause, or a batch that was quicker than a smaller one, must not make the next one many times too long."""
    for seed in range(20):
        chance, size, seconds = random.Random(seed), BatchSize(3.0, most=10**7, most_bytes=10**12), list[float]()
        for _ in range(200):
            pause = 3 if chance.random() < 0.05 else 1
            seconds.append((fixed + size.limit / rate) * chance.uniform(0.8, 1.2) * pause)
            size.took(size.limit, seconds[-1])
        aim = max(3.0, 2 * fixed)
        assert max(seconds) < 3 * (3 * 1.2 * aim), "three times what a pause alone makes"
        assert sorted(seconds)[100] < 1.3 * aim


def test_a_fixed_part_that_has_gone_is_forgotten_also_at_the_largest_batch_that_the_settings_allow() -> None:
    size = BatchSize(3.0, most=300_000, most_bytes=10**9)
    for fixed in [4.0] * 8 + [0.2] * 40:
        size.took(size.limit, fixed + size.limit / 40_000)
    assert 90_000 < size.limit < 140_000, "a batch takes about the time that is wanted"


@example(start={}, ends={0: 1, 1: 262_145, 2: 765_505}, limit=984_018)
@given(start=OFFSETS, ends=OFFSETS, limit=st.integers(1, 10**6))
def test_a_batch_is_as_large_as_the_bound_and_leaves_no_partition_behind(
    start: dict[int, int], ends: dict[int, int], limit: int
) -> None:
    end = share(start, ends, limit)
    assert end.keys() == ends.keys()
    waiting = {p for p, last in ends.items() if last > start.get(p, 0)}
    assert all(start.get(p, 0) < end[p] <= ends[p] for p in waiting)
    assert all(end[p] == start.get(p, 0) for p in ends.keys() - waiting)
    taken = lag(start, end)
    assert (
        taken == min(limit, lag(start, ends))
        or (limit < len(waiting) and taken == len(waiting))
        or (limit <= taken <= limit + len(waiting))
    )


def test_the_parts_are_in_proportion() -> None:
    assert share({0: 100}, {0: 1000, 1: 100, 2: 0}, 100) == {0: 190, 1: 10, 2: 0}
    assert share({}, {0: 3, 1: 3, 2: 3}, 5) == {0: 2, 1: 2, 2: 1}
