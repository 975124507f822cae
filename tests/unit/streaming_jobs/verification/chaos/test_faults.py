"""The schedule of faults: repeatable by its seed, and complete."""

from __future__ import annotations

import pytest

from streaming_jobs.runtime.crash_points import POINTS
from streaming_jobs.verification.chaos.faults import (
    CLUSTER_PROCESSES,
    PYTHON_PROCESSES,
    VICTIMS,
    PointKill,
    ProcessKill,
    RandomKill,
    schedule,
)
from streaming_jobs.verification.chaos.flight_subject import FLIGHTS

SEEDS = range(50)
POINTS_OF = FLIGHTS.points


def test_the_same_seed_gives_the_same_schedule_and_another_one_another() -> None:
    assert schedule(7, 30, POINTS_OF) == schedule(7, 30, POINTS_OF)
    assert len({schedule(seed, 30, POINTS_OF) for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_forty_five_kills_hit_every_point_stream_and_victim_and_more_planners_and_workers_than_three(seed: int) -> None:
    faults = list(schedule(seed, 45, POINTS_OF).faults)
    points = [(fault.stream, fault.point) for fault in faults if isinstance(fault, PointKill)]
    assert sorted(points) == sorted((stream, point) for stream in POINTS_OF for point in POINTS_OF[stream])
    victims = [fault.victim for fault in faults if isinstance(fault, RandomKill)]
    processes = [fault.process for fault in faults if isinstance(fault, ProcessKill)]
    assert len(victims) + len(processes) == 18
    assert set(victims) == set(VICTIMS) and set(processes) == set(PYTHON_PROCESSES)
    faults = [fault for fault in schedule(seed, 45, POINTS_OF).faults if isinstance(fault, ProcessKill)]
    assert all(sum(fault.process == process for fault in faults) >= 4 for process in PYTHON_PROCESSES)
    assert len({fault.choice for fault in faults}) > 1, "which of several processes is chosen by the seed"


@pytest.mark.parametrize("seed", SEEDS)
def test_on_a_cluster_executors_and_machines_are_killed_and_all_streams_share_one_session(seed: int) -> None:
    made = schedule(seed, 45, POINTS_OF, cluster=True)
    processes = [fault.process for fault in made.faults if isinstance(fault, ProcessKill)]
    assert made.kills == 45 and set(processes) == {"planner", *CLUSTER_PROCESSES}
    assert all(processes.count(process) >= 3 for process in CLUSTER_PROCESSES)
    assert {lane.streams for phase in made.phases for lane in phase.lanes} == {tuple(POINTS_OF)}
    few = schedule(seed, 6, POINTS_OF, cluster=True)
    assert {f.process for f in few.faults if isinstance(f, ProcessKill)} == {*CLUSTER_PROCESSES}


def test_the_kill_of_a_worker_has_a_phase_of_its_own_that_begins_with_a_burst() -> None:
    for seed in SEEDS:
        first, *later = schedule(seed, 45, POINTS_OF).phases
        assert not first.burst, "the first batches make the tables"
        of_workers = [phase for phase in later if phase.burst]
        assert len(of_workers) >= 4
        assert all(phase.kills == 1 and phase.lanes[0].streams == tuple(POINTS_OF) for phase in of_workers)


def test_each_stream_has_each_point_and_each_fault_lies_in_a_session_that_runs_its_stream() -> None:
    two_tables = {"flights_split", "flights_judged", "flights_newest"}
    for stream, points in POINTS_OF.items():
        assert set(POINTS) - set(points) == (set() if stream in two_tables else {"secondary_committed"})
    for seed in SEEDS:
        for phase in schedule(seed, 30, POINTS_OF).phases:
            for lane in phase.lanes:
                assert all(f.stream in lane.streams for f in lane.faults if isinstance(f, PointKill))
            assert len({stream for lane in phase.lanes for stream in lane.streams}) == sum(
                len(lane.streams) for lane in phase.lanes
            )


@pytest.mark.parametrize("kills", [1, 2, 3, 7, 30, 100])
def test_there_are_as_many_faults_as_asked_for(kills: int) -> None:
    for seed in SEEDS:
        made = schedule(seed, kills, POINTS_OF)
        assert made.kills == len(list(made.faults)) == kills
        assert all(0 < at < kills for at in made.broker_after)


def test_streams_run_together_first_and_apart_later_and_the_broker_is_killed_several_times() -> None:
    made = [schedule(seed, 30, POINTS_OF) for seed in SEEDS]
    assert all(len(one.phases[0].lanes) == 1 for one in made)
    assert sum(any(len(phase.lanes) > 1 for phase in one.phases) for one in made) > len(made) / 2
    assert all(3 <= len(schedule(seed, 30, POINTS_OF).broker_after) <= 7 for seed in SEEDS)
