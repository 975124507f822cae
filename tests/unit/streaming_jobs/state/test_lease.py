"""One driver per stream: a second one is refused while the first, or anything it left behind, still lives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from streaming_jobs.errors import LeaseBusy
from streaming_jobs.platform.processes.identity import mark
from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import Owner, acquire, holder, take
from tests.support import ROOT

STREAM = "orders"

DRIVER = """
import subprocess, sys
from pathlib import Path
from streaming_jobs.state.lease import acquire
from streaming_jobs.settings import Settings

lease = acquire(Settings.load({"home": Path(sys.argv[1])}), "orders", purpose="session", wait=0)
child = subprocess.Popen(["sleep", "60"], pass_fds=[lease.descriptor]) if sys.argv[2] == "with child" else None
print(child.pid if child else 0, flush=True)
sys.stdin.read()
"""


@contextmanager
def driver(home: Settings, kind: str = "alone") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that holds the lease, and the pid of the child that inherited it (0: none)."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(home.home), kind], env=environment, **pipes)  # type: ignore[call-overload]
    child = 0
    try:
        child = int(process.stdout.readline())
        yield process, child
    finally:
        for pid in filter(None, (child, process.pid if process.poll() is None else 0)):
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


@contextmanager
def living_process() -> Iterator[psutil.Process]:
    """A process that stands for a JVM."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait(10)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, "it did not happen within 10 s"


def lease_file(home: Settings) -> Path:
    return home.state / STREAM / "lease"


def left_behind(home: Settings, jvm: psutil.Process | None) -> Owner:
    """The lease of a driver that is dead, with its JVM."""
    path = lease_file(home)
    path.parent.mkdir(parents=True, exist_ok=True)
    owner = Owner(
        pid=2**22 - 7,
        pid_started=1.0,
        jvm=jvm.pid if jvm else None,
        jvm_started=jvm.create_time() if jvm else None,
        since=1.7e9,
        purpose="session",
    )
    path.write_text(json.dumps(asdict(owner)))
    return owner


def test_a_lease_names_its_owner_and_nothing_of_one_before_is_private_and_is_free_after_an_error(
    home: Settings,
) -> None:
    assert holder(home, STREAM) is None and not lease_file(home).exists(), "a look makes nothing"
    with pytest.raises(RuntimeError, match="inside"), take(home, STREAM, purpose="session") as lease:
        assert (lease.owner.pid, lease.owner.purpose, lease.owner.alive()) == (os.getpid(), "session", "driver")
        assert holder(home, STREAM) == lease.owner
        assert lease_file(home).stat().st_mode & 0o777 == 0o600
        raise RuntimeError("inside")
    assert holder(home, STREAM) is None
    longer = replace(left_behind(home, None), purpose="session " * 50)
    lease_file(home).write_text(json.dumps(asdict(longer)))
    with take(home, STREAM, purpose="x") as lease:
        assert json.loads(lease_file(home).read_text()) == asdict(lease.owner)


def test_a_refused_taker_leaves_the_owners_name_alone_and_no_descriptor_behind(home: Settings) -> None:
    with take(home, STREAM, purpose="session") as lease:
        before = psutil.Process().num_fds()
        for _ in range(3):
            with pytest.raises(LeaseBusy):
                acquire(home, STREAM, purpose="second", wait=0)
        assert psutil.Process().num_fds() == before
        assert holder(home, STREAM) == lease.owner


def test_a_second_driver_is_refused_and_told_who_holds_the_stream_until_that_one_is_killed(home: Settings) -> None:
    with driver(home) as (process, _):
        with pytest.raises(
            LeaseBusy, match=f"stream {STREAM} is held by process {process.pid} \\(session, since"
        ) as busy:
            acquire(home, STREAM, purpose="session", wait=0)
        assert busy.value.exit_code == 75
        assert busy.value.next_step == f"stop it first: recourse streams stop {STREAM}"
        owner = holder(home, STREAM)
        assert owner is not None and owner.pid == process.pid
    with driver(home) as (process, _):
        process.kill()
        with take(home, STREAM, purpose="session", wait=10) as lease:
            assert lease.owner.pid == os.getpid()


def test_a_lease_stays_held_while_a_child_that_inherited_it_lives(home: Settings) -> None:
    with driver(home, "with child") as (process, child):
        process.kill()
        process.wait(10)
        with pytest.raises(LeaseBusy):
            acquire(home, STREAM, purpose="session", wait=0.2)
        owner = holder(home, STREAM)
        assert owner is not None and owner.pid == process.pid
        os.kill(child, signal.SIGKILL)
        acquire(home, STREAM, purpose="session", wait=10).release()


def test_a_lease_whose_owner_is_just_writing_its_name_is_not_told_as_free(home: Settings) -> None:
    with take(home, STREAM, purpose="session") as lease:
        name = lease_file(home).read_text()
        lease_file(home).write_text(name[:20])
        writing = threading.Timer(0.1, lambda: lease_file(home).write_text(name))
        writing.start()
        assert holder(home, STREAM) == lease.owner
        writing.join()


def test_a_jvm_that_did_not_inherit_the_lease_is_waited_for_by_its_pid(home: Settings) -> None:
    with living_process() as jvm:
        owner = left_behind(home, jvm)
        with pytest.raises(LeaseBusy, match="is held by the JVM of a driver that was killed"):
            acquire(home, STREAM, purpose="session", wait=0)
        assert holder(home, STREAM) == owner
    acquire(home, STREAM, purpose="session", wait=0).release()


def test_another_process_under_the_jvms_old_pid_a_dead_owner_and_a_zombie_hold_nothing(home: Settings) -> None:
    with living_process() as other:
        owner = left_behind(home, other)
        reused = replace(owner, jvm_started=other.create_time() - 3600)
        lease_file(home).write_text(json.dumps(asdict(reused)))
        assert holder(home, STREAM) is None
        acquire(home, STREAM, purpose="session", wait=0).release()
    assert left_behind(home, None).alive() is None
    process = subprocess.Popen(["true"])
    started = mark(process.pid)
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert Owner(process.pid, started, None, None, 0.0, "session").alive() is None
    process.wait(10)


@pytest.mark.parametrize("text", ["", '{"pid": 1', "[]", '{"unknown": 1}'])
def test_a_lease_file_that_says_nothing_is_free(home: Settings, text: str) -> None:
    lease_file(home).parent.mkdir(parents=True)
    lease_file(home).write_text(text)
    assert holder(home, STREAM) is None
    acquire(home, STREAM, purpose="session", wait=0).release()
