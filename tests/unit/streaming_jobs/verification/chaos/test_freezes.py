"""A driver that was stopped in an open transaction: what has to happen when it wakes, and which ends fail the run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from streaming_jobs.verification.chaos import sessions
from streaming_jobs.verification.chaos.drivers import DriverProcess
from streaming_jobs.verification.chaos.faults import Freeze
from streaming_jobs.verification.chaos.home import Home
from streaming_jobs.verification.chaos.sessions import ChaosFailed, FreezeRunner, Tally
from tests.support.proofs import BATCHES, flights_home, make_tables

STREAMS = ("flights_clean", "carrier_totals")
REFUSED = 'level=error error="REC-023 another driver writes topic x for stream y now"'


@dataclass
class World:
    """Drivers, broker and tables of a run, and what was done to them, in order."""

    home: Home
    done: list[str] = field(default_factory=list)
    drivers: list[FakeDriver] = field(default_factory=list)
    version: int = 10
    zombie_ends_with: int | None = 78
    zombie_says: str = REFUSED
    stops_with: int = 0

    def kill(self) -> None:
        self.done.append("broker killed")

    def start(self) -> None:
        self.done.append("broker started")


@dataclass
class FakeDriver:
    world: World
    streams: tuple[str, ...]
    environment: dict[str, str]
    log: Path
    exit_code: int | None = None
    frozen: bool = False

    @property
    def name(self) -> str:
        return f"driver {self.world.drivers.index(self) + 1}"

    @property
    def stopped(self) -> bool:
        return "RECOURSE_CRASH" in self.environment

    def freeze(self) -> None:
        self.frozen = True
        self.world.done.append(f"{self.name} frozen")

    def wake(self) -> None:
        self.world.done.append(f"{self.name} woken")

    def wait(self, seconds: float) -> int | None:
        return self.world.zombie_ends_with

    def stop(self, seconds: float) -> int:
        self.world.done.append(f"{self.name} asked to stop")
        return self.world.stops_with

    def words(self) -> str:
        return self.world.zombie_says

    def end(self) -> None:
        self.world.done.append(f"{self.name} ended")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(flights_home(tmp_path))
    make_tables(made.home.settings.tables)
    lease = made.home.settings.state / "flights_clean" / "lease"
    lease.parent.mkdir(parents=True)
    lease.touch()

    def start(streams: tuple[str, ...], environment: dict[str, str], log: Path) -> FakeDriver:
        made.drivers.append(FakeDriver(made, streams, environment, log))
        made.done.append(f"{made.drivers[-1].name} started{'' if lease.exists() else ', the lease is free'}")
        return made.drivers[-1]

    def newest(self: Home, table: str) -> int:
        made.version += 1
        return made.version

    monkeypatch.setattr(DriverProcess, "start", start)
    monkeypatch.setattr(Home, "newest_version", newest)
    monkeypatch.setattr(Home, "restarts", lambda *_: 0)
    monkeypatch.setattr(sessions, "_LOOK_EVERY", 0)
    return made


def run(world: World, then: Any) -> Tally:
    tally = Tally()
    FreezeRunner(world.home, world, tally, lambda _: None).run(Freeze(STREAMS, "flights_clean", 2, then))  # type: ignore[arg-type]
    return tally


def test_the_broker_is_killed_while_the_transaction_is_open_and_the_same_session_goes_on(world: World) -> None:
    tally = run(world, "broker")
    assert world.done == [
        "driver 1 started",
        "broker killed",
        "broker started",
        "driver 1 woken",
        "driver 1 asked to stop",
        "driver 1 ended",
    ]
    assert world.drivers[0].streams == STREAMS
    assert world.drivers[0].environment["RECOURSE_CRASH"] == f"flights_clean:transaction_open:{BATCHES + 2}+:stop"
    assert (tally.broker_kills, tally.transactions_cut, tally.zombies, tally.sessions) == (1, 1, 0, 1)


def test_a_zombie_wakes_when_another_driver_has_the_stream_and_its_lease(world: World) -> None:
    tally = run(world, "zombie")
    assert world.done == [
        "driver 1 started",
        "driver 1 frozen",
        "driver 2 started, the lease is free",
        "driver 1 woken",
        "driver 2 asked to stop",
        "driver 2 ended",
        "driver 1 ended",
    ]
    assert world.drivers[0].streams == ("flights_clean",) and world.drivers[1].streams == STREAMS
    assert (tally.broker_kills, tally.zombies, tally.sessions) == (0, 1, 2)


def test_what_a_stream_reads_is_written_beside_it_while_its_zombie_waits(world: World) -> None:
    world.home = replace(world.home, fed="another topic")
    run(world, "zombie")
    streams = [driver.streams for driver in world.drivers]
    assert streams == [("carrier_totals",), ("flights_clean",), ("flights_clean",)]
    assert world.done[-5:] == [
        "driver 3 asked to stop",
        "driver 3 ended",
        "driver 2 ended",
        "driver 1 asked to stop",
        "driver 1 ended",
    ]


@pytest.mark.parametrize(
    ("code", "says"), [(None, REFUSED), (0, REFUSED), (1, REFUSED), (78, "level=error error='no table'")]
)
def test_a_zombie_that_ends_in_another_way_fails_the_run(world: World, code: int | None, says: str) -> None:
    world.zombie_ends_with, world.zombie_says = code, says
    with pytest.raises(ChaosFailed, match="was not refused by its topic when it was woken"):
        run(world, "zombie")
    assert world.done[-2:] == ["driver 2 ended", "driver 1 ended"], "no process is left"


@pytest.mark.parametrize("then", ["broker", "zombie"])
def test_a_session_that_does_not_go_on_fails_the_run(world: World, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Home, "newest_version", lambda *_: 10)
    monkeypatch.setattr(sessions.time, "monotonic", lambda real=time.monotonic, step=[0]: step.append(0) or len(step))  # type: ignore[misc]
    with pytest.raises(ChaosFailed, match="did not continue within 240 s"):
        run(world, then)


def test_a_session_that_ends_instead_of_going_on_fails_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Home, "newest_version", lambda *_: 10)
    monkeypatch.setattr(FakeDriver, "wake", lambda self: setattr(self, "exit_code", 1))
    with pytest.raises(ChaosFailed, match="ended with exit code 1 and did not continue"):
        run(world, "broker")


def test_a_session_that_does_not_stop_at_a_border_fails_the_run(world: World) -> None:
    world.stops_with = 1
    with pytest.raises(ChaosFailed, match="did not stop at a batch border"):
        run(world, "broker")
