"""The faults of a run over topics: the same for a seed, every point, workers and planners, both kinds of freezes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.settings import Settings
from streaming_jobs.verification.chaos.faults import Freeze, Phase, PointKill, ProcessKill, Steps
from streaming_jobs.verification.chaos.kill_loop import home_of, plan_of
from streaming_jobs.verification.chaos.number_subject import NUMBERS

SEEDS = range(30)


def steps(kills: int, seed: int) -> tuple[Steps, Sequence[int]]:
    return NUMBERS.steps(plan_of(NUMBERS, kills, seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_sixty_kills_hit_every_point_of_every_stream_and_freeze_drivers_in_both_ways(seed: int) -> None:
    phases, broker_after = steps(60, seed)
    assert (phases, broker_after) == steps(60, seed)
    faults = [f for phase in phases if isinstance(phase, Phase) for lane in phase.lanes for f in lane.faults]
    assert len(faults) == 60
    points = {(fault.stream, fault.point) for fault in faults if isinstance(fault, PointKill)}
    assert points == {(stream, point) for stream, points in NUMBERS.points.items() for point in points}
    processes = [fault.process for fault in faults if isinstance(fault, ProcessKill)]
    assert min(processes.count("planner"), processes.count("worker")) >= 3
    freezes = [phase for phase in phases if isinstance(phase, Freeze)]
    assert [freeze.then for freeze in freezes].count("broker") == [f.then for f in freezes].count("zombie") == 5
    assert isinstance(phases[0], Phase), "the first batches make the tables"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_never_waits_for_records_of_one_that_does_not_run(seed: int) -> None:
    phases = [phase for phase in steps(60, seed)[0] if isinstance(phase, Phase)]
    apart = [phase for phase in phases if len(phase.lanes[0].streams) == 1]
    assert apart
    for phase in apart:
        running = {lane.streams[0] for lane in phase.lanes if lane.runs_on}
        assert len(running) == len(phase.lanes)
        assert "numbers_copied" in running or not running & {"numbers_copied_again", "numbers_in_windows"}
        assert "numbers_added_up" in running or "number_differences" not in running


@pytest.mark.parametrize("kills", [1, 5, 12])
def test_few_kills_have_one_freeze_of_each_kind(kills: int) -> None:
    for seed in SEEDS:
        phases, _ = steps(kills, seed)
        assert sorted(phase.then for phase in phases if isinstance(phase, Freeze)) == ["broker", "zombie"]


def test_the_home_names_what_the_streams_declare(tmp_path: Path) -> None:
    home = home_of(NUMBERS, tmp_path, Settings.load(), 10)
    topology = Topology.load(home.settings.flows)
    for subject in home.subjects:
        stream = topology[subject.stream]
        assert stream.primary.name == subject.table
        assert [topic.name for topic in stream.topics] == [subject.topic]
    staged = [stream for stage in NUMBERS.stages for stream in stage]
    assert [subject.stream for subject in home.subjects] == staged == list(NUMBERS.points)
