"""The schedule of faults: repeatable by its seed, and complete."""

from __future__ import annotations

import pytest

from streaming_jobs.crash import POINTS
from streaming_jobs.proof.faults import VICTIMS, PointKill, RandomKill, schedule

STREAMS = ("flights_clean", "airport_hours", "carrier_totals")
SEEDS = range(50)


def test_the_same_seed_gives_the_same_schedule_and_another_one_another() -> None:
    assert schedule(7, 30, STREAMS) == schedule(7, 30, STREAMS)
    assert len({schedule(seed, 30, STREAMS) for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_thirty_kills_hit_every_point_of_every_stream_and_every_victim(seed: int) -> None:
    faults = list(schedule(seed, 30, STREAMS).faults)
    points = [(fault.stream, fault.point) for fault in faults if isinstance(fault, PointKill)]
    assert sorted(points) == sorted((stream, point) for stream in STREAMS for point in POINTS)
    victims = [fault.victim for fault in faults if isinstance(fault, RandomKill)]
    assert sorted(victims) == sorted(VICTIMS * 5)


@pytest.mark.parametrize("kills", [1, 2, 3, 7, 30, 100])
def test_there_are_as_many_faults_as_asked_for(kills: int) -> None:
    for seed in SEEDS:
        made = schedule(seed, kills, STREAMS)
        assert made.kills == len(list(made.faults)) == kills
        assert all(0 < at < kills for at in made.broker_after)


def test_a_fault_lies_in_a_session_that_runs_its_stream() -> None:
    for seed in SEEDS:
        for phase in schedule(seed, 30, STREAMS).phases:
            for lane in phase.lanes:
                assert all(f.stream in lane.streams for f in lane.faults if isinstance(f, PointKill))
            assert len({stream for lane in phase.lanes for stream in lane.streams}) == sum(
                len(lane.streams) for lane in phase.lanes
            )


def test_streams_run_together_first_and_apart_in_some_later_phase() -> None:
    made = [schedule(seed, 30, STREAMS) for seed in SEEDS]
    assert all(len(one.phases[0].lanes) == 1 for one in made)
    assert sum(any(len(phase.lanes) > 1 for phase in one.phases) for one in made) > len(made) / 2


def test_the_broker_is_killed_several_times_in_thirty_kills() -> None:
    assert all(3 <= len(schedule(seed, 30, STREAMS).broker_after) <= 7 for seed in SEEDS)
