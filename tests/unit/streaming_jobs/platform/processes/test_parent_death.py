"""Children that end with their parent: one kind is killed, the other is asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from streaming_jobs.platform.processes.parent_death import ChildReaper, terminated_with_parent
from tests.support import ROOT
from tests.support.waiting import wait_for

REAPED = """
import os, sys, threading, time
from streaming_jobs.platform.processes.child import ChildCommand
def start():
    print(ChildCommand(["/bin/sh", "-c", "trap '' TERM INT HUP; while :; do sleep 60; done"], {}).start_reaped(1).pid)
thread = threading.Thread(target=start)
thread.start(); thread.join()
print("started", flush=True)
time.sleep(60)
"""
ASKED = """
import os, subprocess, sys, time
from streaming_jobs.platform.processes.parent_death import terminated_with_parent
print(subprocess.Popen(terminated_with_parent(os.getpid(), ["/bin/sleep", "60"])).pid, flush=True)
time.sleep(60)
"""


@contextmanager
def parent_of(script: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A process that runs the script, and the child whose pid it prints."""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            yield parent, child
        finally:
            parent.kill()
            if child.is_running():
                child.kill()


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_reaped_child_that_ignores_signals_outlives_its_thread_and_ends_with_its_parent() -> None:
    with parent_of(REAPED) as (parent, child):
        assert parent.stdout is not None and parent.stdout.readline() == "started\n"
        with pytest.raises(psutil.TimeoutExpired):
            child.wait(0.3)
        parent.kill()
        wait_for(lambda: ended(child), "the child's end")


def test_a_reaper_that_was_released_kills_nobody() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as child:
        reaper = ChildReaper()
        reaper.watch(child.pid)
        reaper.release()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        child.kill()


def test_a_child_that_is_terminated_with_its_parent_ends_with_it_also_on_kill_9() -> None:
    with parent_of(ASKED) as (parent, child):
        wait_for(lambda: child.name() == "sleep", "the command")
        parent.kill()
        wait_for(lambda: ended(child), "the child's end")


def test_a_command_whose_parent_is_gone_already_does_not_start() -> None:
    command = terminated_with_parent(1, ["/bin/echo", "x"])
    assert subprocess.run(command, check=False, cwd=ROOT, capture_output=True).stdout == b""


def test_sigterm_ends_such_a_child_under_a_shell_that_ignores_signals() -> None:
    command = " ".join(terminated_with_parent(os.getpid(), ["/bin/sleep", "60"]))
    child = subprocess.Popen(["/bin/sh", "-c", f"trap '' INT TERM; exec {command}"], cwd=ROOT)
    wait_for(lambda: psutil.Process(child.pid).name() == "sleep", "the command")
    child.terminate()
    assert child.wait(10) == -signal.SIGTERM
