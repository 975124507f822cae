"""The verdict of `benchmarks/long_run.py`: growth is seen under bursts and noise, and neither of these is growth."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.long_run import PARTS, LongRun, Sample, Times, slope
from benchmarks.run import bad
from benchmarks.scenarios.growth import BURST, WARM_UP_SHARE, burst_every, verdicts
from streaming_jobs.state.status import Status

Figure = Callable[[float], float]
HALF_AN_HOUR = Times.of(30, WARM_UP_SHARE)
WARM_UP, JUDGED = HALF_AN_HOUR.warm_up, HALF_AN_HOUR.judged
PROCESSES, THREADS, DESCRIPTORS = (f"{what}, workers" for what in ("processes", "threads", "descriptors"))
MEMORY, OTHERS = "memory, all", "threads, other Python"
FLAT = {PROCESSES: 9, THREADS: 200, OTHERS: 100, DESCRIPTORS: 400, MEMORY: 1000}
GOOD = {"state": "running", "batch": 9}


def burst(at: float) -> bool:
    """True in the ten seconds after each minute."""
    return at % 60 < 10


def risen(by: float) -> Figure:
    """A figure of a thousand that rises by so much in the judged time, with bursts."""
    return lambda at: 1000 + by * (at - WARM_UP) / JUDGED + 40 * burst(at)


def ran(figures: dict[str, Figure], minutes: float = 30, **status: object) -> LongRun:
    """A run with figures that are functions of the time; the others are flat."""
    run = LongRun(Times.of(minutes, WARM_UP_SHARE), 5_000 + BURST, statuses={"x": Status("x", **GOOD | status)})  # type: ignore[arg-type]
    for at in map(float, range(int(run.times.whole))):
        run.samples.append(Sample(at, {**FLAT, **{name: figure(at) for name, figure in figures.items()}}))
    return run


def grown(run: LongRun) -> list[str]:
    return [row["what"] for row in bad(verdicts(run))]


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({name: lambda at, flat=flat: flat * (1 + burst(at)) + at % 7 for name, flat in FLAT.items()}, []),
        ({THREADS: lambda at: 200 + (50 + at / 10) * burst(at)}, []),  # bursts that become greater
        ({THREADS: lambda at: 100 + min(at, WARM_UP)}, []),  # in the warm-up only
        ({THREADS: risen(11)}, []),
        ({THREADS: risen(18)}, [THREADS]),
        ({DESCRIPTORS: risen(18)}, [DESCRIPTORS]),
        ({MEMORY: risen(50)}, []),
        ({MEMORY: risen(90)}, [MEMORY]),
        ({PROCESSES: risen(8)}, [PROCESSES]),
        ({PROCESSES: lambda at: 9 + (at >= WARM_UP + JUDGED / 2)}, [PROCESSES]),  # one that stays behind for good
        ({PROCESSES: lambda _: 0}, ["workers at the same time"]),
        ({THREADS: lambda at: 20 + at / 60, OTHERS: lambda at: 100 - at // 30}, [THREADS]),
    ],
)
def test_growth_is_judged_by_the_stated_bound_of_each_kind(figures: dict[str, Figure], found: list[str]) -> None:
    assert grown(ran(figures)) == found


@pytest.mark.parametrize("bad_status", [{"state": "failing"}, {"restarts": 1}, {"lag_records": BURST + 5_001}])
def test_a_stream_that_failed_or_is_behind_proves_nothing(bad_status: dict[str, object]) -> None:
    assert grown(ran({}, **bad_status)) == ["stream x"]


def test_one_part_that_differs_does_not_decide() -> None:
    assert slope([(0, 5), (1, 5), (2, 90), (3, 5), (4, 5), (5, 5)]) == 0


@pytest.mark.parametrize(("minutes", "found"), [(2, []), (10, [MEMORY])])
def test_memory_is_judged_from_ten_minutes_on(minutes: float, found: list[str]) -> None:
    assert grown(ran({MEMORY: lambda at: 500 + at * 10}, minutes)) == found


def test_a_run_that_was_cut_short_or_saw_nothing_of_a_kind_proves_nothing() -> None:
    short, blind = ran({}), ran({})
    del short.samples[len(short.samples) * 3 // 4 :]
    for sample in blind.samples:
        del sample.figures[DESCRIPTORS]
    assert (sorted(grown(short)), grown(blind)) == (sorted(FLAT), ["descriptors, "])


def test_every_part_has_a_burst_and_a_run_that_is_all_warm_up_is_refused() -> None:
    for minutes in (1.5, 2, 10, 30, 120):
        times = Times.of(minutes, WARM_UP_SHARE)
        assert burst_every(times) <= times.judged / PARTS
    with pytest.raises(ValueError, match="too few"):
        Times.of(0.9, WARM_UP_SHARE)
