"""The verdict of `benchmarks.long_run`: growth is seen under bursts and noise, and neither of these is growth."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.long_run import PARTS, LongRun, Sample, Times, slope
from benchmarks.run import bad
from benchmarks.scenarios.growth import BURST, WARM_UP_SHARE, burst_every, verdicts
from streaming_jobs.state.status import Status

HALF_AN_HOUR = Times.of(30, WARM_UP_SHARE)
GOOD = Status("x", state="running", batch=9)
FLAT = {
    "processes, workers": 9,
    "threads, workers": 200,
    "threads, other Python": 100,
    "descriptors, workers": 400,
    "memory, all": 1000,
}


def burst(at: float) -> bool:
    """True in the ten seconds after each minute."""
    return at % 60 < 10


def ran(times: Times = HALF_AN_HOUR, status: Status = GOOD, **figures: Callable[[float], float]) -> LongRun:
    """A run whose figures are functions of the time: `threads` is that of "threads, workers", and so on."""
    changing = {name: figures[name.partition(",")[0]] for name in FLAT if name.partition(",")[0] in figures}
    changing.pop("threads, other Python", None)
    run = LongRun(times, 5_000 + BURST, statuses={"x": status})
    for at in map(float, range(int(times.whole))):
        run.samples.append(Sample(at, {**FLAT, **{name: figure(at) for name, figure in changing.items()}}))
    return run


def growing(run: LongRun) -> list[str]:
    return [row["what"] for row in bad(verdicts(run))]


def risen(by: float) -> Callable[[float], float]:
    """A figure of a thousand that rises by so much in the judged time, with bursts."""
    return lambda at: 1000 + by * (at - HALF_AN_HOUR.warm_up) / HALF_AN_HOUR.judged + 40 * burst(at)


@pytest.mark.parametrize(
    "figures",
    [
        pytest.param(
            {
                "processes": lambda at: 9 + 4 * burst(at),
                "threads": lambda at: 200 + 90 * burst(at) + at % 7,
                "descriptors": lambda at: 400 + 50 * burst(at) + at % 5,
                "memory": lambda at: 1000 + 300 * burst(at),
            },
            id="rises with each burst and falls again",
        ),
        pytest.param({"threads": lambda at: 200 + (50 + at / 10) * burst(at)}, id="bursts become greater"),
        pytest.param({"threads": lambda at: 100 + min(at, HALF_AN_HOUR.warm_up)}, id="grows in the warm-up only"),
        pytest.param({"threads": risen(11)}, id="below the bound of threads"),
        pytest.param({"memory": risen(50)}, id="below the bound of memory"),
    ],
)
def test_what_falls_again_or_stays_below_its_bound_is_good(figures: dict[str, Callable[[float], float]]) -> None:
    assert growing(ran(**figures)) == []


@pytest.mark.parametrize(
    ("run", "grown"),
    [
        (ran(processes=risen(8)), "processes, workers"),
        (ran(threads=risen(18)), "threads, workers"),
        (ran(descriptors=risen(18)), "descriptors, workers"),
        (ran(memory=risen(90)), "memory, all"),
        (ran(processes=lambda at: 9 + (at >= HALF_AN_HOUR.warm_up + HALF_AN_HOUR.judged / 2)), "processes, workers"),
        (ran(processes=lambda _: 0), "workers at the same time"),
        (ran(status=Status("x", state="failing", batch=9)), "stream x"),
        (ran(status=Status("x", state="running", batch=9, restarts=1)), "stream x"),
        (ran(status=Status("x", state="running", batch=9, lag_records=BURST + 5_001)), "stream x"),
    ],
)
def test_growth_above_the_bound_is_seen_and_a_run_without_workers_or_with_a_bad_stream_proves_nothing(
    run: LongRun, grown: str
) -> None:
    assert growing(run) == [grown]


def test_one_part_that_differs_does_not_decide() -> None:
    assert slope([(0, 5), (1, 5), (2, 90), (3, 5), (4, 5), (5, 5)]) == 0


def test_memory_is_judged_from_ten_minutes_on() -> None:
    assert growing(ran(Times.of(2, WARM_UP_SHARE), memory=lambda at: 500 + at * 10)) == []
    assert growing(ran(Times.of(10, WARM_UP_SHARE), memory=lambda at: 500 + at * 10)) == ["memory, all"]


def test_a_run_that_was_cut_short_or_saw_nothing_of_a_kind_proves_nothing() -> None:
    run = ran()
    del run.samples[len(run.samples) * 3 // 4 :]
    assert sorted(growing(run)) == sorted(FLAT)
    run = ran()
    for sample in run.samples:
        del sample.figures["descriptors, workers"]
    assert growing(run) == ["descriptors, "]


def test_workers_that_grow_while_other_processes_end_are_growth() -> None:
    run = ran(threads=lambda at: 20 + at / 60)
    for sample in run.samples:
        sample.figures["threads, other Python"] = 100 - int(sample.at / 30)
    assert growing(run) == ["threads, workers"]


def test_every_part_has_a_burst_and_a_run_that_is_all_warm_up_is_refused() -> None:
    for minutes in (1.5, 2, 10, 30, 120):
        times = Times.of(minutes, WARM_UP_SHARE)
        assert burst_every(times) <= times.judged / PARTS
    with pytest.raises(ValueError, match="too few"):
        Times.of(0.9, WARM_UP_SHARE)
