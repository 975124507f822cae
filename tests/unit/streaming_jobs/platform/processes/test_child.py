"""A child, its group and its tree: out of the terminal's reach, ended in order, killed whole, never mistaken.

Children that end with their parent: one kind is killed, the other is asked to end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess, ProcessTree
from streaming_jobs.platform.processes.parent_death import ChildReaper, terminated_with_parent
from tests.support import ROOT
from tests.support.waiting import wait_for

READS_TO_THE_END = "import sys; print('ready', flush=True); sys.stdin.read(); print('the pipe has ended', flush=True)"
STOPS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
while True: time.sleep(60)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True: time.sleep(60)
"""
LEAVES_ONE = """
import subprocess, sys
print("ready", subprocess.Popen(["sleep", sys.argv[1]]).pid, flush=True)
sys.stdin.read()
"""
LEAVES_ONE_THAT_IS_NOT_COLLECTED = """
import os, time
if os.fork() == 0:
    if (ended := os.fork()) == 0:
        os._exit(0)
    os.setpgid(0, 0)
    print("ready", os.getpid(), ended, flush=True)
    time.sleep(60)
"""
Start = Callable[..., ChildProcess]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.fixture
def start(output: Path) -> Iterator[Start]:
    """Starts a script with its arguments, and waits until it is ready. What it has started is killed at the end."""
    started: list[ChildProcess] = []

    def start(script: str, *arguments: str) -> ChildProcess:
        command = ChildCommand([sys.executable, "-c", script, *arguments], dict(os.environ), stdin=subprocess.PIPE)
        with output.open("wb") as file:
            started.append(command.start(file))
        wait_for(lambda: "ready" in output.read_text(), "the child")
        return started[-1]

    yield start
    for child in started:
        child.kill()


def test_a_child_leads_a_group_of_its_own_and_is_killed_all_the_same_if_it_does_not(start: Start) -> None:
    child = start(STOPS)
    assert os.getpgid(child.pid) == child.pid != os.getpgrp()
    assert os.getsid(child.pid) == child.pid
    process = subprocess.Popen(["sleep", "10"])  # it leads no group
    assert ChildProcess(process).kill() == -signal.SIGKILL


def test_it_gets_its_environment_folder_and_umask_and_nothing_of_ours(tmp_path: Path, output: Path) -> None:
    script = "import os, pathlib; pathlib.Path('made').touch(); print(sorted(os.environ), os.getcwd())"
    folder = tmp_path / "folder"
    folder.mkdir()
    with output.open("wb") as file:
        child = ChildCommand([sys.executable, "-c", script], {"LC_ALL": "C", "A": "b"}, folder, umask=0o077).start(file)
    assert child.wait(20.0) == 0
    assert output.read_text() == f"['A', 'LC_ALL'] {folder}\n"
    assert (folder / "made").stat().st_mode & 0o777 == 0o600
    child.collect()


def test_it_reads_the_end_of_its_input_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = (
        "import os, subprocess, sys, time; from streaming_jobs.platform.processes.child import ChildCommand\n"
        "command = ChildCommand([sys.executable, '-c', sys.argv[1]], dict(os.environ), stdin=subprocess.PIPE)\n"
        "child = command.start(open(sys.argv[2], 'wb')); time.sleep(60)"
    )
    log = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-c", parent, READS_TO_THE_END, str(log)]) as process:
        wait_for(lambda: log.exists() and "ready" in log.read_text(), "the child")
        process.kill()
    wait_for(lambda: log.read_text() == "ready\nthe pipe has ended\n", "the child's end")


def test_an_end_in_order_gives_the_childs_own_exit_code_and_a_child_that_does_not_end_in_time_is_killed(
    start: Start,
) -> None:
    assert start(STOPS).end(20.0) == 7
    child = start(STUBBORN)
    assert child.wait(0.05) is None
    assert child.wait_until_gone(0.05) is None
    assert child.exit_code is None
    child = start(STUBBORN)
    assert child.end(0.2, group_patience=3600.0) == -signal.SIGKILL
    assert child.wait_until_gone(20.0) == -signal.SIGKILL


def test_what_the_child_has_left_behind_is_given_its_time_and_then_killed(start: Start, output: Path) -> None:
    child = start(LEAVES_ONE, "60")
    left = psutil.Process(int(output.read_text().split()[1]))
    began = time.monotonic()
    assert child.end(20.0, group_patience=0.5) == -signal.SIGTERM
    assert time.monotonic() - began > 0.5
    wait_for(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE, "the end of what was left")


def test_what_ends_soon_after_the_child_is_not_waited_for_longer(start: Start) -> None:
    child = start(LEAVES_ONE, "0.3")
    child.end(20.0, group_patience=3600.0)


def test_a_child_is_gone_when_all_of_its_group_has_ended(start: Start, output: Path) -> None:
    child = start(LEAVES_ONE, "60")
    left = psutil.Process(int(output.read_text().split()[1]))
    assert not child.gone
    child.process.kill()
    assert child.wait(20.0) == -signal.SIGKILL
    assert not child.gone
    left.kill()
    assert child.wait_until_gone(20.0) == -signal.SIGKILL
    assert child.gone


def test_a_group_whose_last_member_only_waits_to_be_collected_is_gone(start: Start, output: Path) -> None:
    child = start(LEAVES_ONE_THAT_IS_NOT_COLLECTED)
    outside, ended = (psutil.Process(int(pid)) for pid in output.read_text().split()[1:])
    try:
        assert child.wait(20.0) == 0
        wait_for(lambda: ended.status() == psutil.STATUS_ZOMBIE, "the end of the last member")
        assert os.getpgid(ended.pid) == child.pid
        assert child.gone
    finally:
        outside.kill()


def test_a_pid_that_another_process_has_by_now_is_left_alone(start: Start) -> None:
    other = start(STOPS)
    collected = subprocess.Popen(["true"])
    collected.wait(20)
    collected.pid = other.pid
    child = ChildProcess(collected)
    assert child.gone
    assert child.end(0.0) == 0
    assert other.wait(0.3) is None


def test_a_command_that_cannot_start_leaves_no_reaper(tmp_path: Path, output: Path) -> None:
    folder = tmp_path / "gone"
    command = ChildCommand(["/bin/sleep", "60"], {}, folder)
    before = psutil.Process().children()
    with output.open("wb") as file, pytest.raises(FileNotFoundError):
        command.start_reaped(file)
    assert psutil.Process().children() == before


STARTS_ONE_IN_A_GROUP_OF_ITS_OWN = """
import subprocess, time
print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid, flush=True)
time.sleep(60)
"""


def test_a_tree_holds_what_has_a_group_of_its_own_and_ends_it_when_its_parent_has_ended(tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = ChildCommand([sys.executable, "-c", STARTS_ONE_IN_A_GROUP_OF_ITS_OWN], dict(os.environ))
    with output.open("wb") as file:
        child = command.start(file)
    below = int(wait_for(output.read_text, "the process below"))
    tree = ProcessTree.of(child)
    assert [process.pid for process in tree.processes] == [child.pid, below]
    child.kill()
    left = tree.wait(0.0)
    assert [process.pid for process in left.processes] == [below]
    left.kill()
    assert left.wait(20.0) == ProcessTree()


def test_a_process_that_nobody_has_collected_yet_has_ended() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as child:
        tree = ProcessTree((psutil.Process(child.pid),))
        assert tree.wait(0.0) == tree
        child.kill()
        assert tree.wait(3600.0) == ProcessTree()


def test_a_child_that_has_ended_has_no_tree(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as file:
        child = ChildCommand(["/bin/true"], {}).start(file)
    assert child.wait(20.0) == 0
    child.process.pid = os.getpid()  # the system has given the pid to another process
    assert ProcessTree.of(child) == ProcessTree()


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
