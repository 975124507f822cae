"""Requests for a start, against processes of their own: each is answered once, also if that start fails."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from streaming_jobs.runtime.stream_restarts import TOGETHER, RestartReasons, StreamRestarts
from streaming_jobs.settings import Settings
from streaming_jobs.state import start_request
from tests.conftest import SettingsFactory
from tests.unit.streaming_jobs.runtime.test_split_sessions import Family


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
        start_request.ask(self.settings, "b", "a test")


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
