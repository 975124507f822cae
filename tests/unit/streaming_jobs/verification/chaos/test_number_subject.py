"""The run over topics: its feeder, and its faults, which are the same for a seed and hit every point and process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.settings import Settings
from streaming_jobs.verification.chaos import number_subject
from streaming_jobs.verification.chaos.faults import Freeze, Phase, PointKill, ProcessKill, Steps
from streaming_jobs.verification.chaos.kill_loop import home_of, plan_of
from streaming_jobs.verification.chaos.number_subject import NUMBERS, NumberFeed
from streaming_jobs.verification.chaos.numbers import Fed
from streaming_jobs.verification.chaos.sessions import ChaosFailed
from streaming_jobs.verification.topic import RawRecord


class FakeProducer:
    """Takes records, and reports those before `fails_from` as delivered, the others as failed."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.records: list[tuple[bytes, bytes]] = []
        self.full_once, self.fails_from, self.unanswered = True, 1_000_000, 0
        self.lock = threading.Lock()

    def produce(self, topic: str, key: bytes, value: bytes, on_delivery: Callable[[Any, Any], None]) -> None:
        if self.full_once:
            self.full_once = False
            raise BufferError
        with self.lock:
            self.records.append((key, value))
            on_delivery("broken" if len(self.records) > self.fails_from else None, None)

    def poll(self, seconds: float) -> None: ...

    def flush(self, seconds: float) -> int:
        return self.unanswered


@pytest.fixture
def producers(monkeypatch: pytest.MonkeyPatch) -> list[FakeProducer]:
    made: list[FakeProducer] = []

    def connect(config: dict[str, Any]) -> FakeProducer:
        made.append(FakeProducer(config))
        return made[-1]

    monkeypatch.setattr(number_subject, "Producer", connect)
    return made


def test_at_the_end_every_key_has_all_its_numbers_and_a_burst_is_at_full_speed(producers: list[FakeProducer]) -> None:
    made = NumberFeed({"bootstrap.servers": "x"}, "t", seed=1, rate=20)
    made.start()
    assert made.burst(5000, 3600) >= 5000, "at the feed's rate of 20 a second this test would run into its time limit"
    held = made.finish()
    sent = producers[0].records
    assert held == len(sent) >= 5000 and not made.dry
    fed = Fed([RawRecord("t", 0, i, 0, *each) for i, each in enumerate(sent)])
    assert fed.faults() == [] and len(fed.numbers) >= 40
    assert producers[0].config["enable.idempotence"] and producers[0].config["partitioner"] == "murmur2_random"


def test_a_record_that_is_not_delivered_ends_the_run(producers: list[FakeProducer]) -> None:
    made = NumberFeed({}, "t", seed=1, rate=10_000)
    producers[0].fails_from = 3
    made.start()
    with pytest.raises(ChaosFailed, match="could not be sent to t: broken"):
        made.burst(5000, 30)
    with pytest.raises(ChaosFailed, match="could not be sent"):
        made.finish()


def test_records_that_fail_or_that_nobody_acknowledges_and_a_burst_that_takes_too_long_end_the_run(
    producers: list[FakeProducer],
) -> None:
    made = NumberFeed({}, "t", seed=1, rate=10)
    producers[0].unanswered = 7
    with pytest.raises(ChaosFailed, match="7 records are not acknowledged"):
        made.finish()
    made = NumberFeed({}, "t", seed=1, rate=10)
    with pytest.raises(ChaosFailed, match="0 of 100 records are fed"):
        made.burst(100, 0)


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
