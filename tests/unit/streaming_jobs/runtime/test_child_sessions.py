"""Child sessions of a session: started, started again after a failure that may pass, on request, and ended with it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from streaming_jobs.platform.back_off import OF_SESSIONS
from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess
from streaming_jobs.runtime.child_sessions import ChildSessions, command_for
from streaming_jobs.runtime.stream_restarts import TOGETHER, RestartReasons, StreamRestarts
from streaming_jobs.settings import Settings
from streaming_jobs.state.requests import START
from tests.conftest import SettingsFactory


class Child:
    """A process that ends when the test says so."""

    def __init__(self, command: ChildCommand) -> None:
        self.command = command
        self.pid = 7
        self.exit_code: int | None = None
        self.calls: list[str] = []

    def ask_to_end(self) -> None:
        self.calls.append("ask")

    def kill(self) -> int:
        self.calls.append("kill")
        self.exit_code = -9
        return -9

    def end(self, patience: float, group_patience: float = 0.0) -> int:
        self.calls.append("end")
        return self.exit_code or 0


class Family:
    def __init__(self) -> None:
        self.now = 0.0
        self.children: list[Child] = []
        self.refused = False
        start: Any = self._start
        command = ["python", "-m", "x", "--streams", "a,b"]
        self.sessions = ChildSessions(command, 60.0, start=start, clock=lambda: self.now)

    def _start(self, command: ChildCommand) -> ChildProcess:
        if self.refused:
            raise OSError("no memory")
        self.children.append(Child(command))
        return cast("ChildProcess", self.children[-1])

    def ends(self, code: int) -> None:
        self.children[-1].exit_code = code
        self.sessions.look()


@pytest.mark.parametrize(
    "command",
    [["python", "-m", "x", "--streams", "a,b", "--supervised"], ["python", "-m", "x", "--streams=a,b", "--supervised"]],
)
def test_a_child_has_the_command_line_of_its_session_with_other_streams(command: list[str]) -> None:
    assert command_for(command, ["b"]) == ["python", "-m", "x", "--supervised", "--streams", "b", "--again"]
    assert command_for(command_for(command, ["a", "b"]), ["b"]).count("--streams") == 1


def test_a_child_is_started_again_after_a_failure_that_may_pass_with_growing_delay() -> None:
    family = Family()
    family.sessions.start(["b"])
    for number, delay in enumerate((OF_SESSIONS.first, 2 * OF_SESSIONS.first), start=1):
        family.ends(1)
        assert family.sessions.alive and family.sessions.streams == {"b"} and len(family.children) == number
        family.now += delay - 0.1
        family.sessions.look()
        assert len(family.children) == number
        family.now += 0.2
        family.sessions.look()
        assert len(family.children) == number + 1
    family.ends(0)
    assert not family.sessions.alive and not family.sessions.streams and not family.sessions.failed


def test_a_child_that_waits_for_its_next_try_is_started_at_once_if_somebody_asks() -> None:
    family = Family()
    family.sessions.start(["b"])
    family.ends(1)
    assert family.sessions.waiting == {"b"} and len(family.children) == 1
    family.sessions.hurry({"a"})
    family.sessions.look()
    assert len(family.children) == 1
    family.sessions.hurry({"b"})
    family.sessions.look()
    assert len(family.children) == 2 and not family.sessions.waiting


def test_a_child_that_failed_for_good_waits_for_a_start_and_one_that_cannot_be_started_is_tried_again() -> None:
    family = Family()
    family.sessions.start(["b"])
    family.ends(78)
    assert not family.sessions.alive and family.sessions.failed == {"b": 78}
    family.sessions.start(["b"])
    assert family.sessions.alive and not family.sessions.failed and len(family.children) == 2
    family = Family()
    family.refused = True
    family.sessions.start(["b"])
    assert family.sessions.alive and not family.children
    family.refused, family.now = False, OF_SESSIONS.first + 1
    family.sessions.look()
    assert len(family.children) == 1


def test_the_end_of_a_session_ends_its_children_and_starts_none() -> None:
    family = Family()
    family.sessions.start(["b"])
    family.sessions.ask_to_stop()
    family.sessions.ask_to_stop()
    assert family.children[0].calls == ["ask"]
    family.now = 61.0
    family.sessions.look()
    assert family.children[0].calls[:2] == ["ask", "kill"] and not family.sessions.alive
    family.sessions.close()


# Requests for a start, against child sessions: each is answered once, also if that start fails.


class Both:
    """The streams of a session: `a` runs, and `b` has ended and is let go."""

    can_start = True

    def __init__(self) -> None:
        status: Any = SimpleNamespace(state="running", error=None)
        self.runners: Any = [
            SimpleNamespace(
                stream=SimpleNamespace(name=name),
                status=status,
                ended=name == "b",
                detached=name == "b",
                in_batch=False,
                gave_up=False,
            )
            for name in ("a", "b")
        ]

    def held_elsewhere(self, stream: str) -> bool:
        return False

    def declared(self, stream: str) -> bool:
        return True


class Session:
    """A session whose code on disk is another one, and its children, which are no real processes."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.family = settings, Family()
        streams: Any = Both()
        reasons = RestartReasons(settings, began=time.time())
        self.restarts = StreamRestarts(settings, streams, reasons, self.family.sessions, clock=lambda: self.family.now)

    def look(self, seconds: float) -> None:
        """Look as a session does, ten times a second."""
        for _ in range(int(seconds * 10)):
            self.restarts.look()
            self.family.now += 0.1

    def ask(self) -> None:
        time.sleep(0.02)  # file times are coarser than the clock
        START.ask(self.settings, "b", "a test")


@pytest.fixture
def session(settings: SettingsFactory) -> Session:
    return Session(settings())


@pytest.mark.parametrize("code", [78, 2])
def test_a_start_that_is_refused_in_another_process_is_not_repeated(session: Session, code: int) -> None:
    """That process may have ended before it could answer the request, whose file is still there."""
    session.ask()
    session.look(TOGETHER + 1)
    assert len(session.family.children) == 1
    session.family.children[-1].exit_code = code
    session.look(30)
    assert len(session.family.children) == 1 and session.restarts.failed_elsewhere
    session.ask()
    session.look(TOGETHER + 1)
    assert len(session.family.children) == 2 and not session.restarts.failed_elsewhere


def test_a_request_ends_the_wait_for_the_next_try_and_only_once(session: Session) -> None:
    session.ask()
    session.look(TOGETHER + 1)
    session.family.children[-1].exit_code = 1
    session.look(1)
    assert len(session.family.children) == 1
    session.ask()
    session.look(1)
    assert len(session.family.children) == 2
    session.family.children[-1].exit_code = 1
    session.look(1)
    assert len(session.family.children) == 2, "that request was answered"
