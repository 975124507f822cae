"""The size of a batch follows its time, within bounds, and the offsets of a batch are divided fairly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streaming_jobs.sources.planner import FIRST, BatchSize, lag, share

OFFSETS = st.dictionaries(st.integers(0, 20), st.integers(0, 10**6), max_size=12)


def test_batches_of_a_backlog_grow_to_the_time_that_they_may_take() -> None:
    size = BatchSize(seconds=2.0, most=10**6, most_bytes=10**9)
    limits = []
    for _ in range(6):
        limits.append(size.limit)
        size.took(size.limit, 0.2 + size.limit / 100_000)  # a fixed part, and a rate
    assert limits[:4] == [FIRST, 40_000, 133_333, 173_912]
    assert 150_000 < limits[-1] < 200_000


def test_a_slow_first_batch_does_not_make_the_next_one_smaller() -> None:
    size = BatchSize(seconds=2.0, most=10**6, most_bytes=10**9)
    size.took(FIRST, 60.0)
    assert size.limit == FIRST


def test_a_small_batch_says_nothing() -> None:
    size = BatchSize(seconds=2.0, most=10**6, most_bytes=10**9)
    size.took(FIRST - 1, 0.001)
    assert size.limit == FIRST


def test_the_bounds_of_the_settings_hold() -> None:
    assert BatchSize(2.0, 7, 10**9).limit == 7
    size = BatchSize(2.0, 10**6, 1000)
    size.record_bytes = 300.0
    assert size.limit == 3
    size.record_bytes = 10**9
    assert size.limit == 1, "a record that is larger than the bound is read alone"


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
