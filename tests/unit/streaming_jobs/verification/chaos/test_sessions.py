"""A lane takes its session through faults: which ends count as kills or end the run, and how its drivers start."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streaming_jobs.platform.processes.child import ChildProcess
from streaming_jobs.settings import Settings
from streaming_jobs.verification.chaos import flight_subject, sessions
from streaming_jobs.verification.chaos.drivers import DriverProcess
from streaming_jobs.verification.chaos.faults import (
    CLUSTER_PROCESSES,
    ClusterProcess,
    Fault,
    Lane,
    PointKill,
    ProcessKill,
    RandomKill,
    Victim,
)
from streaming_jobs.verification.chaos.flight_subject import FLIGHTS, SHIPPED, FlightFeed
from streaming_jobs.verification.chaos.home import Home
from streaming_jobs.verification.chaos.sessions import ChaosFailed, LaneRunner, Tally
from tests.support.proofs import BATCHES, flights_home, make_tables

pytestmark = pytest.mark.slow

POINT = PointKill("flights_clean", "staged", 2)
PLANNER = ProcessKill("planner", 1, 0.0, choice=5)
WORKER = ProcessKill("worker", 0, 0.5, choice=5)
CLOCK = "streaming_jobs.verification.chaos.sessions.time.monotonic"


@dataclass
class FakeProcess:
    """A planner or a worker."""

    pid: int
    dead: bool = False

    def kill(self) -> None:
        self.dead = True


@dataclass
class FakeDriver:
    """A driver whose exit code the test sets."""

    environment: dict[str, str]
    log: Path
    streams: tuple[str, ...] = ("flights_clean",)
    exit_code: int | None = None
    killed: list[Victim] = field(default_factory=list)
    has_jvm: bool = True
    started: float = field(default_factory=time.monotonic)
    gone: bool = True
    jvm: None = None
    processes: list[FakeProcess] = field(default_factory=list)
    asked_to_end: bool = False

    @property
    def child(self) -> FakeDriver:
        return self

    def ask_to_end(self) -> None:
        self.asked_to_end = True

    def planners(self) -> list[FakeProcess]:
        return [process for process in self.processes if not process.dead]

    def executors(self) -> list[FakeProcess]:
        return self.planners()

    def reading_workers(self, port: int) -> list[FakeProcess]:
        assert port == 9092
        return self.planners()

    def kill(self, victim: Victim) -> bool:
        if victim != "python" and not self.has_jvm:
            return False
        self.killed.append(victim)
        self.exit_code = -9
        return True

    def words(self, lines: int = 6) -> str:
        return "level=error found='no table'"

    def end(self) -> None:
        self.gone = True


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = flights_home(tmp_path)
    make_tables(made.settings.tables)
    return made


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> list[FakeDriver]:
    started: list[FakeDriver] = []

    def start(streams: Any, environment: dict[str, str], log: Path, *_: str) -> FakeDriver:
        started.append(FakeDriver(environment, log))
        return started[-1]

    monkeypatch.setattr(DriverProcess, "start", start)
    return started


def runner(home: Home, *faults: Fault) -> LaneRunner:
    return LaneRunner(home, Lane(("flights_clean",), faults), Tally(), lambda _: None)


def stepped(lane: LaneRunner, times: int = 3) -> LaneRunner:
    for _ in range(times):
        lane.step()
    return lane


def test_a_driver_that_dies_at_its_point_is_a_kill_and_the_lane_is_done(home: Home, drivers: list[FakeDriver]) -> None:
    lane = stepped(runner(home, POINT), 1)
    # The newest batch in the table is number 3.
    assert drivers[0].environment["RECOURSE_CRASH"] == f"flights_clean:staged:{BATCHES + 2}+"
    drivers[0].exit_code = -signal.SIGKILL
    stepped(lane)
    assert lane.done and lane.tally.kills == 1 and dict(lane.tally.points) == {"flights_clean:staged": 1}
    assert len(drivers) == 1


def test_a_lane_runs_on_after_its_faults_until_it_is_finished(
    home: Home, drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_LOOK_EVERY", 0.0)
    lane = LaneRunner(home, Lane(("flights_clean",), (POINT,), runs_on=True), Tally(), lambda _: None)
    stepped(lane, 1)
    lane.finish()
    assert not drivers[0].asked_to_end, "its fault is to come"
    lane._over = False
    drivers[0].exit_code = -signal.SIGKILL
    stepped(lane)
    assert not lane.done and len(drivers) == 2 and "RECOURSE_CRASH" not in drivers[1].environment
    drivers[1].exit_code = 1
    stepped(lane)
    assert len(drivers) == 3 and len(lane.tally.unplanned) == 1
    lane.finish()
    assert drivers[2].asked_to_end
    drivers[2].exit_code = -signal.SIGTERM  # it was loading its modules
    stepped(lane)
    assert lane.done and lane.tally.kills == 1 and len(drivers) == 3


def test_a_driver_that_refuses_ends_the_run_with_its_words(home: Home, drivers: list[FakeDriver]) -> None:
    lane = stepped(runner(home, POINT), 1)
    drivers[0].exit_code = 78
    with pytest.raises(ChaosFailed, match="refused to continue") as raised:
        lane.step()
    assert "no table" in raised.value.found and str(drivers[0].log) in raised.value.next_step


def test_a_driver_that_ends_by_itself_is_counted_its_fault_comes_again_and_too_many_of_them_end_the_run(
    home: Home, drivers: list[FakeDriver]
) -> None:
    lane = stepped(runner(home, POINT), 1)
    drivers[0].exit_code = 1
    stepped(lane, 2)
    assert lane.tally.kills == 0 and len(lane.tally.unplanned) == 1 and "exit code 1" in lane.tally.unplanned[0]
    assert len(drivers) == 2 and "RECOURSE_CRASH" in drivers[1].environment
    with pytest.raises(ChaosFailed, match="without a kill more than 5 times"):
        for _ in range(50):
            lane.step()
            drivers[-1].exit_code = 1


def test_a_random_kill_waits_for_its_commits_and_its_seconds(
    home: Home, drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    commits, clock = [10], [1000.0]
    monkeypatch.setattr(Home, "commits", lambda *_: commits[0])
    monkeypatch.setattr(CLOCK, lambda: clock[0])
    lane = stepped(runner(home, RandomKill("both", 2, 1.5)))
    drivers[0].started = clock[0]
    commits[0] = 11
    stepped(lane)
    commits[0] = 12
    stepped(lane)
    clock[0] += 1.4
    stepped(lane)
    assert drivers[0].killed == []
    clock[0] += 0.2
    stepped(lane)
    assert drivers[0].killed == ["both"] and lane.done
    assert dict(lane.tally.victims) == {"both": 1}


@dataclass
class Session:
    """A lane whose session's commits, position, restarts and clock the test sets."""

    lane: LaneRunner
    driver: FakeDriver
    version: int = 10
    position: int = 100
    restarts: int = 0
    now: float = 1000.0

    def after(self, seconds: float = 0.0, versions: int = 0) -> Session:
        self.now += seconds
        self.version += versions
        stepped(self.lane)
        return self


StartSession = Callable[..., Session]


@pytest.fixture
def session(home: Home, drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch) -> StartSession:
    def start(*faults: Fault, backlog_end: int = 0) -> Session:
        lane = runner(home, *faults)
        lane.backlog_end = backlog_end
        made = Session(lane, FakeDriver({}, Path()))
        monkeypatch.setattr(Home, "commits", lambda *_: made.version + 1)
        monkeypatch.setattr(Home, "newest_version", lambda *_: made.version)
        monkeypatch.setattr(Home, "position", lambda *_: made.position)
        monkeypatch.setattr(Home, "restarts", lambda *_: made.restarts)
        monkeypatch.setattr(sessions, "bootstrap_servers", lambda _: "127.0.0.1:9092")
        monkeypatch.setattr(CLOCK, lambda: made.now)
        stepped(lane, 1)
        made.driver = drivers[0]
        made.driver.started = lane._begun = made.now
        return made

    return start


def test_the_killed_planner_is_the_one_that_the_seed_chose_and_the_same_session_goes_on(
    session: StartSession, drivers: list[FakeDriver]
) -> None:
    made = session(PLANNER, RandomKill("python", 1, 0.0))
    made.driver.processes = [FakeProcess(7), FakeProcess(8), FakeProcess(9)]
    assert not any(process.dead for process in made.after().driver.processes), "no commit yet"
    made.after(versions=1)
    assert [process.pid for process in made.driver.processes if process.dead] == [9], "5 modulo 3"
    assert dict(made.lane.tally.processes) == {"planner": 1} and made.lane.tally.kills == 1
    made.restarts = 1
    made.after(versions=1)
    assert made.driver.killed == [], "the batch that was running may still be committed"
    made.after(versions=1)
    assert made.driver.killed == [] and made.lane.tally.restarts == 1
    made.after(versions=1)
    assert made.driver.killed == ["python"] and len(drivers) == 1 and made.lane.done
    assert made.lane.tally.kills == 2 and made.lane.tally.unplanned == []


@pytest.mark.parametrize("process", CLUSTER_PROCESSES)
def test_a_session_survives_the_kill_of_an_executor_and_of_its_machine_which_is_started_again(
    session: StartSession, monkeypatch: pytest.MonkeyPatch, process: ClusterProcess
) -> None:
    calls: list[str] = []
    machine = SimpleNamespace(kill=lambda: calls.append("kill"), start=lambda output: calls.append(output.name))
    monkeypatch.setattr(sessions, "Machine", SimpleNamespace(of=lambda _: machine))
    made = session(ProcessKill(process, 1, 0.0, choice=1))
    made.driver.processes = [FakeProcess(7), FakeProcess(8)]
    made.lane.home.settings.logs.mkdir(parents=True, exist_ok=True)
    made.after(versions=1)
    assert dict(made.lane.tally.processes) == {process: 1} and made.lane.tally.kills == 1
    if process == "machine":
        assert calls == ["kill", str(made.lane.home.settings.logs / "worker-001.log")]
    else:
        assert [each.pid for each in made.driver.processes if each.dead] == [8] and not calls
    made.after(versions=1)
    assert not made.driver.asked_to_end, "each table has two more versions first"
    made.after(versions=1)
    assert made.driver.asked_to_end and made.driver.killed == []


@pytest.mark.parametrize("following", [(), (POINT,), (RandomKill("jvm", 0, 1.0),)])
def test_a_session_that_went_on_is_stopped_before_a_fault_that_needs_another_one(
    session: StartSession, drivers: list[FakeDriver], following: tuple[Fault, ...]
) -> None:
    made = session(PLANNER, *following)
    made.driver.processes = [FakeProcess(7)]
    made.after(versions=1).after(versions=2)
    assert made.driver.asked_to_end and made.driver.killed == [] and not made.lane.done
    made.driver.exit_code = 0
    (made.lane.home.checkpoint("flights_clean").folder / "offsets" / "9").mkdir(parents=True)
    made.after()
    assert made.lane.tally.unplanned == [] and made.lane.tally.kills == 1
    assert not made.lane.tally.replayed, "a batch that was planned at a stop is not one that a kill interrupted"
    assert len(drivers) == 1 + len(following) and made.lane.done == (not following)


def test_a_planner_that_never_comes_is_a_kill_that_was_not_made(session: StartSession) -> None:
    made = session(PLANNER)
    made.after(versions=1).after(119)
    assert not made.lane.tally.not_made
    made.after(2)
    assert dict(made.lane.tally.not_made) == {"planner": 1} and made.lane.tally.kills == 0
    assert made.driver.asked_to_end


def test_a_session_that_ends_after_the_kill_of_a_planner_is_an_end_without_a_kill(session: StartSession) -> None:
    made = session(PLANNER)
    made.driver.processes = [FakeProcess(7)]
    made.after(versions=1)
    made.driver.exit_code = 1
    made.after()
    assert len(made.lane.tally.unplanned) == 1 and made.lane.tally.kills == 1 and made.lane.done


def test_a_session_that_does_not_go_on_after_the_kill_of_its_planner_ends_the_run(session: StartSession) -> None:
    made = session(PLANNER)
    made.driver.processes = [FakeProcess(7)]
    made.after(versions=1)
    with pytest.raises(ChaosFailed, match="did not continue within 240 s after planner"):
        made.after(241, versions=1)


def test_a_worker_is_killed_while_it_reads_a_backlog_which_has_to_be_read_whole(session: StartSession) -> None:
    made = session(WORKER, backlog_end=40_000)
    assert made.driver.environment["RECOURSE_STREAM__TRIGGER"] == "every 1 second"
    made.driver.processes = [FakeProcess(7)]
    made.after().after(0.4)
    assert not made.driver.processes[0].dead
    made.after(0.2)
    assert made.driver.processes[0].dead and dict(made.lane.tally.processes) == {"worker": 1}
    made.after(versions=5)
    assert not made.driver.asked_to_end, "the backlog is not read"
    made.position = 40_000
    assert made.after().driver.asked_to_end


def test_a_burst_is_waited_for_by_the_streams_that_read_the_topic_of_the_feeder(
    session: StartSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = session(WORKER, backlog_end=40_000)
    made.lane.home = replace(made.lane.home, fed="another topic")
    assert made.after(5).driver.asked_to_end, "no stream of the session reads it"


def test_a_backlog_that_was_read_before_a_worker_was_seen_is_a_kill_that_was_not_made(session: StartSession) -> None:
    made = session(WORKER, backlog_end=40_000)
    made.after(5)
    assert not made.lane.tally.not_made
    made.position = 40_000
    made.after()
    assert dict(made.lane.tally.not_made) == {"worker": 1} and made.driver.asked_to_end


def test_a_jvm_that_is_not_there_yet_is_waited_for(home: Home, drivers: list[FakeDriver]) -> None:
    lane = stepped(runner(home, RandomKill("jvm", 0, 0.0)), 1)
    drivers[0].has_jvm = False
    stepped(lane)
    assert drivers[0].exit_code is None
    drivers[0].has_jvm = True
    stepped(lane)
    assert drivers[0].killed == ["jvm"] and lane.done


def test_a_driver_that_never_comes_to_its_fault_ends_the_run(
    home: Home, drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = stepped(runner(home, POINT), 1)
    monkeypatch.setattr(CLOCK, lambda real=time.monotonic: real() + 1000)
    with pytest.raises(ChaosFailed, match="did not come to 'flights_clean at staged'"):
        lane.step()


@pytest.mark.parametrize(("planned", "replayed", "skipped"), [(4, 1, 0), (3, 0, 1), (None, 0, 0)])
def test_a_batch_that_a_kill_caught_is_counted_by_the_side_it_was_on(
    home: Home, drivers: list[FakeDriver], planned: int | None, replayed: int, skipped: int
) -> None:
    folder = home.checkpoint("flights_clean").folder
    for log, last in (("offsets", planned), ("commits", 2 if planned == 3 else 3)):
        (folder / log).mkdir(parents=True)
        if last is not None:
            (folder / log / str(last)).touch()
    lane = stepped(runner(home, POINT), 1)
    drivers[0].exit_code = -signal.SIGKILL
    stepped(lane)
    assert (len(lane.tally.replayed), len(lane.tally.skipped)) == (replayed, skipped)


def test_drivers_see_the_settings_of_the_run_and_none_of_the_users(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECOURSE_TABLES_DIR", "/somewhere")
    monkeypatch.setenv("RECOURSE_STREAM__TRIGGER", "every 1 hour")
    environment = home.environment(RECOURSE_CRASH="x")
    ours = {name for name in environment if name.startswith("RECOURSE_")}
    assert "RECOURSE_TABLES_DIR" not in ours and "RECOURSE_STREAM__TRIGGER" not in ours
    for name in [name for name in ours if name != "RECOURSE_CRASH"] + ["RECOURSE_STREAM__TRIGGER"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("RECOURSE_TABLES_DIR")
    for name in ours - {"RECOURSE_CRASH"}:
        monkeypatch.setenv(name, environment[name])
    assert Settings.load() == home.settings


def test_every_subject_is_a_stream_that_the_drivers_know(home: Home) -> None:
    from streaming_jobs.catalog.topology import Topology

    known = Topology.load(home.settings.flows)
    for subject in FLIGHTS.streams:
        stream = known[subject.stream]
        assert stream.primary.name == subject.table
        others = [sink.name for sink in stream.secondary] + [*stream.quarantines.values(), stream.dead_letters]
        if subject in SHIPPED:  # their rules take nothing out of the real flights
            others = [stream.dead_letters]
        assert [e.table for e in subject.elsewhere] == others


def test_a_driver_process_is_ended_with_all_it_started(tmp_path: Path) -> None:
    import subprocess

    program = (
        "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('level=error nothing'); sys.stdout.flush()"
    )
    with (tmp_path / "log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{program}; input()"],
            stdin=subprocess.PIPE,
            stdout=output,
            start_new_session=True,
        )
    driver = DriverProcess(("x",), ChildProcess(process), tmp_path / "log", time.monotonic())
    deadline = time.monotonic() + 10
    while "level=error" not in driver.words() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert driver.words() == "level=error nothing" and not driver.gone
    process.kill()
    process.wait(10)
    assert not driver.gone, "the process it started still lives"
    driver.end()
    assert driver.wait(10) == -signal.SIGKILL and driver.gone


def test_a_feed_that_was_cut_inside_a_chunk_is_made_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import numpy as np

    from streaming_jobs.examples.flights.content import FlightsInTopic
    from streaming_jobs.examples.flights.dataset import TOTAL, flights_in

    sent: list[int] = []
    missing = np.array([7, *range(10, TOTAL)])  # the tenth flight is there, the eighth is not
    monkeypatch.setattr(flight_subject, "survey", lambda _: FlightsInTopic(9, TOTAL, missing))
    send: Callable[..., None] = lambda _, *, rate, share: sent.append(flights_in(share))  # noqa: E731
    monkeypatch.setattr(flight_subject, "feed", send)
    made = FlightFeed(Settings.load(), rate=1, records=100)
    assert made.finish() == 10 and sent == [10]


FAILED = (
    'timestamp=t level=error event="stream failed" stream=x error="REC-021 table x is gone\\n  next: put it back" '
    'exception="Traceback: REC-021 table x is gone"'
)
BUSY = (
    'timestamp=t level=error event="session failed" code=REC-011 found="stream x is held by process 7 (session)" '
    'next="stop it first: recourse streams stop x"'
)


@pytest.mark.parametrize(
    ("line", "text", "next_step"),
    [
        (FAILED, "table x is gone", "put it back"),
        (BUSY, "stream x is held by process 7 (session)", "stop it first: recourse streams stop x"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):", ""),
    ],
)
def test_a_refusal_is_read_out_of_the_log(home: Home, line: str, text: str, next_step: str) -> None:
    from streaming_jobs.verification.chaos.flight_damages import _refusal

    class Said:
        def words(self, lines: int = 6) -> str:
            return f"WARNING: nothing\n{line}" if lines > 1 else line

    assert _refusal(Said()) == (text, next_step)  # type: ignore[arg-type]


def test_a_burst_is_fed_at_full_speed_and_the_steady_rate_continues_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from streaming_jobs.examples.flights.dataset import TOTAL, flights_in
    from streaming_jobs.examples.flights.feeder import FeedReport

    calls: list[tuple[float | None, int]] = []
    held = 0

    def send(_: Any, *, rate: float | None, share: float, stop: Any, **__: Any) -> FeedReport:
        nonlocal held
        calls.append((rate, flights_in(share)))
        if rate is None:
            held = flights_in(share)
        else:
            stop.wait(30)
        return FeedReport(0, 0.0, held, TOTAL, stopped=rate is not None)

    monkeypatch.setattr(flight_subject, "feed", send)
    made = FlightFeed(Settings.load(), rate=60, records=1000)
    made.start()
    assert made.burst(400, 10) == 400
    made.stop()
    assert calls.count((None, 400)) == 1 and set(calls) <= {(None, 400), (60, 1000)}
