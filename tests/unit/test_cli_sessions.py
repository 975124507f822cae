"""A session as a child: not reached by the terminal's Ctrl-C, stopped in order, never left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestration.cli.children import SessionProcess, on_stop_signals

OBEDIENT = """
import os, signal, sys, time
def stop(*_):
    print("stopped", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", sys.argv[1:], os.environ.get("RECOURSE_HOME"), flush=True)
while os.read(0, 1): pass
print("parent gone", flush=True)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True: time.sleep(60)
"""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], SessionProcess]]:
    """Starts a script in the place of `python -m streaming_jobs.session`."""
    started: list[SessionProcess] = []
    interpreter = tmp_path / "interpreter"
    interpreter.write_text(f'#!/bin/sh\nexec \'{sys.executable}\' -c "$SCRIPT" "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))

    def start(script: str) -> SessionProcess:
        environment = {"SCRIPT": script, "RECOURSE_HOME": "/home"}
        with (tmp_path / "log").open("w") as log:
            child = SessionProcess(["a", "b"], environment, trigger="available-now", log=log)
        started.append(child)
        _until(lambda: "ready" in (tmp_path / "log").read_text())
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()


def _until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_gets_streams_trigger_and_settings(session: Callable[[str], SessionProcess], tmp_path: Path) -> None:
    session(OBEDIENT)
    said = (tmp_path / "log").read_text()
    assert "'--streams', 'a,b', '--supervised', '--trigger', 'available-now'" in said
    assert "/home" in said


def test_it_is_out_of_reach_of_the_terminals_interrupt(session: Callable[[str], SessionProcess]) -> None:
    child = session(OBEDIENT)
    assert os.getpgid(child.pid) == child.pid != os.getpgrp()


def test_end_stops_it_in_order(session: Callable[[str], SessionProcess], tmp_path: Path) -> None:
    child = session(OBEDIENT)
    assert child.end(deadline=20.0) == 0
    assert (tmp_path / "log").read_text().endswith("stopped\n")


def test_end_kills_what_does_not_stop_in_time(session: Callable[[str], SessionProcess]) -> None:
    child = session(STUBBORN)
    assert child.end(deadline=0.1) == -signal.SIGKILL


def test_stop_signals_are_counted_and_their_defaults_come_back() -> None:
    counts: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    with on_stop_signals(counts.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert counts == [1, 2]
    assert signal.getsignal(signal.SIGTERM) is before
