"""The pause after a batch: bounded, none where many records come, and never before a batch."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

import pytest

from streaming_jobs.runtime.batch_hooks import Pause
from streaming_jobs.settings import StreamSettings
from tests.support.runners import Clock


def life(
    rate: float, *, seconds_per_batch: float = 0.3, seconds: float = 60.0, longest: float = 2.0
) -> tuple[int, float, float]:
    """Batches, their share of the time, and the longest wait, of a steady rate: a batch takes what came meanwhile."""
    clock = Clock(1000.0)
    pause = Pause(timedelta(seconds=longest), clock.time)
    batches, waited, taken = 0, 0.0, clock.now - 1.0
    while clock.now < 1000 + seconds:
        records, taken, started = int(rate * (clock.now - taken)), clock.now, clock.now
        clock.now += seconds_per_batch
        wait = pause.after(records, started)
        waited = max(waited, wait)
        clock.now += wait
        batches += 1
    return batches, batches * seconds_per_batch / seconds, waited


def test_the_work_of_a_trickle_is_bounded_and_so_is_the_wait_and_more_records_cost_no_less_than_half() -> None:
    batches, share, waited = life(150)
    assert share < 0.2 and batches < 40 and waited <= 2.0
    quick = life(150, seconds_per_batch=0.02)
    assert quick[1] <= 0.11 and quick[2] < 0.2, "a quick batch is followed by a short wait"
    costs = [life(rate)[1] for rate in (1, 10, 100, 200, 400, 800, 1600)]
    assert all(more >= less * 0.95 for less, more in pairwise(costs)), costs
    assert costs[0] < 0.15 and costs[-1] > 0.9


@pytest.mark.parametrize("rate", [1000, 2000, 50_000])
def test_where_many_records_come_nothing_waits(rate: float) -> None:
    assert life(rate)[2] <= 2.0 * 0.1
    assert life(rate * 1.5)[2] == 0.0


def test_a_quiet_hour_and_batches_without_records_change_nothing_for_a_burst() -> None:
    """Spark makes one when a watermark moves."""
    clock = Clock(1000.0)
    pause = Pause(timedelta(seconds=2), clock.time)
    for _ in range(30):
        for records in (1200, 0):
            started = clock.now
            clock.now += 0.3
            assert pause.after(records, started) == 0.0
    clock = Clock(1000.0)
    pause = Pause(timedelta(seconds=2), clock.time)
    pause.after(1, clock.now)
    clock.now += 3600
    started = clock.now
    clock.now += 0.5
    assert pause.after(300_000, started) == 0.0


def test_nothing_waits_after_the_first_batch_which_is_slow_and_has_what_little_there_was_when_it_began() -> None:
    clock = Clock(1000.0)
    pause = Pause(timedelta(seconds=2), clock.time)
    for records in (40, 8_000):
        started = clock.now
        clock.now += 4.0
        assert pause.after(records, started) == 0.0


def test_the_longest_pause_is_a_setting_with_a_default_by_pace() -> None:
    assert StreamSettings().longest_wait == timedelta(seconds=2)
    assert StreamSettings(pace="economy").longest_wait == timedelta(seconds=5)
    assert StreamSettings(max_pause=timedelta(0)).longest_wait == timedelta(0)
    assert life(10, longest=0.0)[2] == 0.0
