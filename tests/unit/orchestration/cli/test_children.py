"""A session as a child: not reached by the terminal's Ctrl-C, stopped in order, never left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestration.cli.children import Steps, attend, end, session_driver, stop_signals_interrupt
from streaming_jobs.platform.processes.child import ChildProcess

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


@dataclass
class Sessions:
    """Scripts in the place of `python -m streaming_jobs.session`, with one log."""

    log: Path
    patch: pytest.MonkeyPatch
    started: list[ChildProcess] = field(default_factory=list)

    def start(self, script: str) -> ChildProcess:
        environment = {"SCRIPT": script, "RECOURSE_HOME": "/home"}
        with self.log.open("ab") as log:
            child = session_driver(["a", "b"], environment, trigger="available-now").start(log)
        self.started.append(child)
        _until(lambda: "ready" in self.log.read_text())
        return child

    def start_and_signal(self, script: str, number: signal.Signals) -> ChildProcess:
        """Send us the signal at the first look at the child."""
        child = self.start(script)
        look, unsent = child.process.poll, [number]

        def look_and_signal() -> int | None:
            if unsent:
                os.kill(os.getpid(), unsent.pop())
            return look()

        self.patch.setattr(child.process, "poll", look_and_signal)
        return child


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sessions]:
    interpreter = tmp_path / "interpreter"
    interpreter.write_text(f'#!/bin/sh\nexec \'{sys.executable}\' -c "$SCRIPT" "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    made = Sessions(tmp_path / "log", monkeypatch)
    yield made
    for child in made.started:
        child.kill()


def _until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_gets_streams_trigger_and_settings(sessions: Sessions) -> None:
    sessions.start(OBEDIENT)
    text = sessions.log.read_text()
    assert "'--streams', 'a,b', '--supervised', '--trigger', 'available-now'" in text
    assert "/home" in text


def test_it_is_out_of_reach_of_the_terminals_interrupt(sessions: Sessions) -> None:
    pid = sessions.start(OBEDIENT).pid
    assert os.getpgid(pid) == pid != os.getpgrp()


def test_waiting_has_a_deadline(sessions: Sessions) -> None:
    assert sessions.start(OBEDIENT).wait(0.1) is None


def test_end_stops_it_in_order(sessions: Sessions) -> None:
    child = sessions.start(OBEDIENT)
    end(child, 20.0)
    assert child.exit_code == 0
    assert sessions.log.read_text().endswith("stopped\n")


def test_an_interrupt_while_it_ends_kills_it(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    child = sessions.start(STUBBORN)
    monkeypatch.setattr(child, "end", lambda *_: interrupt())
    end(child, 20.0)
    assert child.exit_code == -signal.SIGKILL


def test_in_the_foreground_an_interrupt_stops_it_at_a_border_and_its_exit_code_is_ours(sessions: Sessions) -> None:
    messages: list[str] = []
    assert attend(sessions.start_and_signal(OBEDIENT, signal.SIGTERM), 20.0, messages.append) == 0
    assert messages == ["stopping at the next batch border; Ctrl-C again ends it at once"]


def test_in_the_foreground_a_second_interrupt_ends_it_at_once(sessions: Sessions) -> None:
    messages: list[str] = []

    def say(line: str) -> None:
        messages.append(line)
        if len(messages) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    child = sessions.start_and_signal(STUBBORN, signal.SIGINT)
    assert attend(child, 3600.0, say) == -signal.SIGKILL, "without waiting for the stop"
    assert messages[-1] == "ending at once"


def test_in_the_foreground_patience_ends(sessions: Sessions) -> None:
    assert attend(sessions.start_and_signal(STUBBORN, signal.SIGINT), 0.2, lambda _: None) == -signal.SIGKILL


def test_sigterm_interrupts_and_its_default_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stop_signals_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
        _until(lambda: False, 1.0)
    assert signal.getsignal(signal.SIGTERM) is before


def interrupt() -> None:
    raise KeyboardInterrupt


def test_steps_end_last_one_first() -> None:
    done: list[str] = []
    with Steps() as steps:
        steps.add("broker", lambda: done.append("broker"))
        steps.add("streams", lambda: done.append("streams"))
    assert done == ["streams", "broker"]


def test_steps_end_after_an_error_and_the_error_is_kept() -> None:
    done: list[str] = []
    with pytest.raises(RuntimeError, match="in the block"), Steps() as steps:
        steps.add("broker", lambda: done.append("broker"))
        raise RuntimeError("in the block")
    assert done == ["broker"]


def test_a_second_interrupt_kills_the_step_it_met_and_all_that_remain() -> None:
    done: list[str] = []
    with Steps() as steps:
        steps.add("broker", lambda: done.append("broker stopped"), lambda: done.append("broker killed"))
        steps.add("streams", interrupt, lambda: done.append("streams killed"))
        steps.add("feeder", lambda: done.append("feeder stopped"))
    assert done == ["feeder stopped", "streams killed", "broker killed"]


def test_a_failing_stop_keeps_nothing_from_being_stopped_and_is_told() -> None:
    done: list[str] = []

    def fail() -> None:
        raise RuntimeError("will not end")

    with pytest.raises(RuntimeError, match="will not end"), Steps() as steps:
        steps.add("broker", lambda: done.append("broker"))
        steps.add("streams", fail)
    assert done == ["broker"]
