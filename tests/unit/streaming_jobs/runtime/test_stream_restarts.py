"""One stream of a session starts again, with the code on disk, and the others run on: with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import holder
from streaming_jobs.state.requests import START, STOP
from streaming_jobs.state.status import Status, read_status
from tests.conftest import SettingsFactory
from tests.support.waiting import wait_for
from tests.support.without_spark import FLOW, without_spark

pytestmark = pytest.mark.slow

AT_WORK = ("running", "idle")


def of(home: Settings, stream: str) -> Status:
    return read_status(home, stream) or Status(stream)


def works(home: Settings, stream: str) -> bool:
    return of(home, stream).state in AT_WORK


@contextmanager
def both_run(flow: Path, home: Settings, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A session without Spark whose streams both run."""
    process = without_spark(flow, home, *options)
    try:
        for stream in ("watched", "beside"):
            wait_for(lambda stream=stream: works(home, stream), f"{stream}")
        yield process
    finally:
        process.kill()
        process.wait()


def corrected(flow: Path) -> None:
    flow.write_text(FLOW.replace('return t.select("n")', "return t", 1))


@pytest.mark.parametrize("why", ["recovery", pytest.param("request", marks=pytest.mark.long)])
def test_a_stream_starts_again_with_the_code_on_disk_and_the_others_run_on(
    flow: Path, settings: SettingsFactory, why: str
) -> None:
    """In a process of its own, which ends with the session; the next start on request restarts that process."""
    home = settings()
    with both_run(flow, home) as process:
        before = {name: of(home, name) for name in ("watched", "beside")}
        if why == "recovery":
            STOP.ask_for(home, "watched", "watched-0001")
            wait_for(lambda: of(home, "watched").state == "stopped" and not holder(home, "watched"), "the stop")
            corrected(flow)
            STOP.clear_for(home, "watched", "watched-0001")
        else:
            corrected(flow)
            START.ask(home, "watched", "a test")

        def new(name: str, code: str) -> bool:
            now = of(home, name)
            return now.state in AT_WORK and now.code_version not in ("", code)

        wait_for(lambda: new("watched", before["watched"].code_version), "the new code")
        there = of(home, "watched")
        assert there.pid != process.pid and psutil.Process(there.pid).ppid() == process.pid
        assert there.run_id == before["watched"].run_id
        assert (of(home, "beside").pid, of(home, "beside").begun_at) == (process.pid, before["beside"].begun_at)
        assert START.request(home, "watched") is None, "it is done"

        flow.write_text(FLOW)
        START.ask(home, "watched", "a test")
        wait_for(lambda: new("watched", there.code_version), "the code of before")
        assert of(home, "watched").pid == there.pid, "alone in its process, it needs no other one"
        assert of(home, "beside").begun_at == before["beside"].begun_at

        STOP.ask(home, "watched", "a test")
        wait_for(lambda: of(home, "watched").state == "stopped" and not psutil.pid_exists(there.pid), "its end")
        assert works(home, "beside")
        STOP.clear(home, "watched", STOP.request(home, "watched"))  # type: ignore[arg-type]
        START.ask(home, "watched", "a test")
        wait_for(lambda: works(home, "watched"), "the third start")
        third = of(home, "watched").pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert not psutil.pid_exists(third) and holder(home, "watched") is None
        assert (of(home, "watched").state, of(home, "beside").state) == ("stopped", "stopped")


def test_streams_in_processes_of_their_own_outlive_faults_and_come_together_again(
    flow: Path, settings: SettingsFactory
) -> None:
    home = settings()
    with both_run(flow, home) as process:
        corrected(flow)
        START.ask(home, "watched", "a test")
        wait_for(lambda: of(home, "watched").pid not in (process.pid, 0), "a process of its own")
        wait_for(lambda: works(home, "watched"), "its start")
        os.kill(killed := of(home, "watched").pid, signal.SIGKILL)
        wait_for(lambda: of(home, "watched").pid != killed and works(home, "watched"), "another one")
        assert of(home, "beside").pid == process.pid

        START.ask(home, "beside", "a test")
        wait_for(lambda: of(home, "beside").pid != process.pid and works(home, "beside"), "the other")
        assert process.poll() is None
        flow.write_text(FLOW)
        for name in ("watched", "beside"):
            START.ask(home, name, "a test")
        wait_for(lambda: of(home, "beside").pid == of(home, "watched").pid == process.pid, "one process again")
        wait_for(lambda: works(home, "beside") and works(home, "watched"), "both of them")
        process.kill()
        assert process.wait(30) == -signal.SIGKILL


def test_a_stop_and_a_start_of_one_stream_with_unchanged_code_happen_in_the_same_process(
    flow: Path, settings: SettingsFactory
) -> None:
    """Also of one that was stopped before the session began, and of one that runs: it stops first."""
    home = settings()
    with both_run(flow, home) as process:
        begun = {name: of(home, name).begun_at for name in ("watched", "beside")}
        START.ask(home, "watched", "a test")
        wait_for(lambda: of(home, "watched").begun_at != begun["watched"], "the restart")
        wait_for(lambda: START.request(home, "watched") is None, "the end of the request")
        again = of(home, "watched").begun_at
        STOP.ask(home, "watched", "a test")
        wait_for(lambda: of(home, "watched").state == "stopped" and not holder(home, "watched"), "the stop")
        START.ask(home, "watched", "a test")
        assert of(home, "watched").state == "stopped", "the stop request is stronger"
        STOP.clear(home, "watched", STOP.request(home, "watched"))  # type: ignore[arg-type]
        wait_for(lambda: of(home, "watched").begun_at != again, "the start")
        assert of(home, "watched").pid == of(home, "beside").pid == process.pid
        assert of(home, "beside").begun_at == begun["beside"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0

    STOP.ask(home, "watched", "a test")
    late = without_spark(flow, home, "--respect-stop")
    try:
        wait_for(lambda: of(home, "beside").pid == late.pid and works(home, "beside"), "the session")
        STOP.clear(home, "watched", STOP.request(home, "watched"))  # type: ignore[arg-type]
        START.ask(home, "watched", "a test")
        wait_for(lambda: of(home, "watched").pid == late.pid and works(home, "watched"), "the start")
        late.send_signal(signal.SIGTERM)
        assert late.wait(30) == 0 and holder(home, "watched") is None
    finally:
        late.kill()
        late.wait()
