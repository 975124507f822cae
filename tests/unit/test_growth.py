"""The verdict of `benchmarks.growth`: growth is seen under bursts and noise, and neither of these is growth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.growth import BOUNDS, BURST, Growth, Sample, Times, bad, slope
from streaming_jobs.state.status import Status

HALF_AN_HOUR = Times.of(30)


def ran(
    times: Times = HALF_AN_HOUR,
    status: Status | None = None,
    kind: str = "workers",
    **figures: Callable[[float], float],
) -> Growth:
    """A run whose figures are functions of the time."""
    growth = Growth(times, 500, statuses={"x": status or Status("x", state="running", batch=9)})
    for second in range(int(times.whole)):
        values: dict[str, Any] = {"processes": 9, "threads": 200, "descriptors": 400, "memory": 1000.0}
        values |= {name: figure(float(second)) for name, figure in figures.items()}
        values = {name: {kind: value, "driver": 0} for name, value in values.items()}
        growth.samples.append(Sample(at=float(second), **values))
    return growth


def names(growth: Growth) -> list[str]:
    return [row["what"] for row in bad(growth.verdicts())]


def burst(at: float) -> bool:
    """True in the ten seconds after each minute."""
    return at % 60 < 10


def test_a_session_whose_figures_rise_with_each_burst_and_fall_again_is_good() -> None:
    growth = ran(
        processes=lambda at: 9 + 4 * burst(at),
        threads=lambda at: 200 + 90 * burst(at) + at % 7,
        descriptors=lambda at: 400 + 50 * burst(at) + at % 5,
        memory=lambda at: 1000 + 300 * burst(at),
    )
    assert names(growth) == []


def test_bursts_that_become_greater_are_no_growth_of_what_stays() -> None:
    assert names(ran(threads=lambda at: 200 + (50 + at / 10) * burst(at))) == []


def test_what_grows_in_the_warm_up_only_is_good() -> None:
    assert names(ran(threads=lambda at: 100 + min(at, HALF_AN_HOUR.warm_up))) == []


@pytest.mark.parametrize(
    ("name", "what", "grown", "bound"),
    [
        ("processes", "processes, workers", 8.0, 1.0),
        ("threads", "threads, workers", 11.0, 12.0),
        ("threads", "threads, workers", 18.0, 12.0),
        ("descriptors", "descriptors, workers", 18.0, 12.0),
        ("memory", "memory (PSS), MB", 50.0, 60.0),
        ("memory", "memory (PSS), MB", 90.0, 60.0),
    ],
)
def test_growth_is_judged_by_the_stated_bound(name: str, what: str, grown: float, bound: float) -> None:
    judged = HALF_AN_HOUR.judged
    growth = ran(**{name: lambda at: 1000 + grown * (at - HALF_AN_HOUR.warm_up) / judged + 40 * burst(at)})
    assert names(growth) == ([what] if grown > bound else [])


def test_a_single_process_that_stays_behind_for_good_is_growth() -> None:
    half = HALF_AN_HOUR.warm_up + HALF_AN_HOUR.judged / 2
    assert names(ran(processes=lambda at: 9 + (at >= half))) == ["processes, workers"]


def test_one_part_that_differs_does_not_decide() -> None:
    assert slope([(0, 5), (1, 5), (2, 90), (3, 5), (4, 5), (5, 5)]) == 0


def test_memory_is_judged_from_ten_minutes_on() -> None:
    assert names(ran(Times.of(2), memory=lambda at: 500 + at * 10)) == []
    assert names(ran(Times.of(10), memory=lambda at: 500 + at * 10)) == ["memory (PSS), MB"]


@pytest.mark.parametrize(
    "status",
    [
        Status("x", state="failing", batch=9),
        Status("x", state="running", batch=9, restarts=1),
        Status("x", state="running", batch=9, lag_records=BURST + 5_001),
    ],
)
def test_a_stream_that_failed_or_is_behind_proves_nothing(status: Status) -> None:
    assert names(ran(status=status)) == ["stream x"]


def test_a_run_without_workers_proves_nothing() -> None:
    assert names(ran(processes=lambda _: 0)) == ["workers at the same time"]


def test_a_run_that_was_cut_short_proves_nothing() -> None:
    growth = ran()
    del growth.samples[len(growth.samples) * 3 // 4 :]
    assert len(names(growth)) == len(BOUNDS) + 1


def test_workers_that_grow_while_other_processes_end_are_growth() -> None:
    growth = ran(threads=lambda at: 20 + at / 60)
    for sample in growth.samples:
        sample.threads["other Python"] = 100 - int(sample.at / 30)
    assert names(growth) == ["threads, workers"]


def test_every_part_has_a_burst_and_a_run_that_is_all_warm_up_is_refused() -> None:
    for minutes in (1.5, 2, 10, 30, 120):
        times = Times.of(minutes)
        assert times.burst_every <= times.judged / 6
    with pytest.raises(ValueError, match="too few"):
        Times.of(0.9)
