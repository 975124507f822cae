"""A lane takes its session through faults: which ends count as kills or end the run, and how its drivers start."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from streaming_jobs.platform.processes.child import ChildProcess
from streaming_jobs.settings import Settings
from streaming_jobs.verification.chaos import feeding
from streaming_jobs.verification.chaos.drivers import DriverProcess
from streaming_jobs.verification.chaos.faults import Fault, Lane, PointKill, RandomKill, Victim
from streaming_jobs.verification.chaos.feeding import Feeding
from streaming_jobs.verification.chaos.home import SUBJECTS, Home
from streaming_jobs.verification.chaos.session_runner import ChaosFailed, LaneRunner, Tally
from tests.support.proofs import BATCHES, make_tables

POINT = PointKill("flights_clean", "staged", 2)


@dataclass
class FakeDriver:
    """A driver whose exit code the test sets."""

    environment: dict[str, str]
    log: Path
    exit_code: int | None = None
    killed: list[Victim] = field(default_factory=list)
    has_jvm: bool = True
    started: float = field(default_factory=time.monotonic)
    gone: bool = True
    jvm: None = None

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
    made = Home.of(tmp_path, Settings.load(), max_offsets=50)
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
    assert drivers[0].environment["RECOURSE_CRASH"] == f"flights_clean:staged:{BATCHES + 2}"
    drivers[0].exit_code = -signal.SIGKILL
    stepped(lane)
    assert lane.done and lane.tally.kills == 1 and dict(lane.tally.points) == {"flights_clean:staged": 1}
    assert len(drivers) == 1


def test_a_driver_that_refuses_ends_the_run_with_its_words(home: Home, drivers: list[FakeDriver]) -> None:
    lane = stepped(runner(home, POINT), 1)
    drivers[0].exit_code = 78
    with pytest.raises(ChaosFailed, match="refused to go on") as raised:
        lane.step()
    assert "no table" in raised.value.found and str(drivers[0].log) in raised.value.next_step


def test_a_driver_that_ends_by_itself_is_counted_and_its_fault_comes_again(
    home: Home, drivers: list[FakeDriver]
) -> None:
    lane = stepped(runner(home, POINT), 1)
    drivers[0].exit_code = 1
    stepped(lane, 2)
    assert lane.tally.kills == 0 and len(lane.tally.unplanned) == 1 and "exit code 1" in lane.tally.unplanned[0]
    assert len(drivers) == 2 and "RECOURSE_CRASH" in drivers[1].environment


def test_a_driver_that_ends_by_itself_again_and_again_ends_the_run(home: Home, drivers: list[FakeDriver]) -> None:
    lane = runner(home, POINT)
    with pytest.raises(ChaosFailed, match="without a kill more than 5 times"):
        for _ in range(50):
            lane.step()
            drivers[-1].exit_code = 1


def test_a_random_kill_waits_for_its_commits_and_its_seconds(
    home: Home, drivers: list[FakeDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    commits, clock = [10], [1000.0]
    monkeypatch.setattr(Home, "commits", lambda *_: commits[0])
    monkeypatch.setattr("streaming_jobs.verification.chaos.session_runner.time.monotonic", lambda: clock[0])
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


def test_a_jvm_that_is_not_there_yet_is_waited_for(home: Home, drivers: list[FakeDriver]) -> None:
    lane = stepped(runner(home, RandomKill("jvm", 0, 0.0)), 1)
    drivers[0].has_jvm = False
    stepped(lane)
    assert drivers[0].exit_code is None
    drivers[0].has_jvm = True
    stepped(lane)
    assert drivers[0].killed == ["jvm"] and lane.done


def test_a_driver_that_never_comes_to_its_fault_ends_the_run(home: Home, drivers: list[FakeDriver]) -> None:
    lane = stepped(runner(home, POINT), 1)
    drivers[0].started -= 1000
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
    from streaming_jobs.topology import Topology

    known = Topology.load(home.settings.flows)
    for subject in SUBJECTS:
        stream = known[subject.stream]
        assert stream.primary.name == subject.table
        assert [sink.name for sink in stream.secondary] + [stream.dead_letters] == [e.table for e in subject.elsewhere]


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

    from streaming_jobs.examples.flights.content import TopicContent
    from streaming_jobs.examples.flights.dataset import TOTAL, flights_in

    sent: list[int] = []
    missing = np.array([7, *range(10, TOTAL)])  # the tenth flight is there, the eighth is not
    monkeypatch.setattr(feeding, "survey", lambda _: TopicContent(9, TOTAL, missing))
    send: Callable[..., None] = lambda _, *, rate, share: sent.append(flights_in(share))  # noqa: E731
    monkeypatch.setattr(feeding, "feed", send)
    made = Feeding(Settings.load(), rate=1, records=100)
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
    from streaming_jobs.verification.chaos.damages import _refusal

    class Said:
        def words(self, lines: int = 6) -> str:
            return f"WARNING: nothing\n{line}" if lines > 1 else line

    assert _refusal(Said()) == (text, next_step)  # type: ignore[arg-type]
