"""A child process that leads a process group: started, waited for with a deadline, asked to end, killed with its group.

Its own group has two uses. Ctrl-C in a terminal does not reach the child. And processes that the child has started and
left behind can be found by the group's number, such as a driver's JVM, which ends some seconds after its Python. A
process that has made another group is not among them; `tree` below is for those.

The order of an end: `ask_to_end` the child alone, `wait` with a deadline, then `kill` what is left of the group.

The number of a group is the pid of its leader. The system gives it to no new process while the group has a member,
even one that has ended and waits to be collected. So if the child was collected and a process has its pid, the group no
longer exists and that process is a stranger, which is never signalled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from streaming_jobs.errors import TransientError
from streaming_jobs.platform.processes.parent_death import ChildReaper

NICENESS = 10
"""Of what gives the streams precedence."""
JAVA_HEAP_FULL = 3
"""Exit code of a JVM under -XX:+ExitOnOutOfMemoryError."""


def lower_priority() -> None:
    """Let the streams go first: this process, and what it starts, gets what they leave of the CPU."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def ended_by(code: int) -> str:
    """The words for a return code as `subprocess` gives it: negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    if -code == signal.SIGKILL:
        return "killed by signal 9, perhaps because memory ran out (see `dmesg`)"
    name = ""
    with suppress(ValueError):  # a real-time signal has no name
        name = f" ({signal.Signals(-code).name})"
    return f"ended by signal {-code}{name}"


def jvm_gone(jvm: subprocess.Popen[bytes] | None, patience: float) -> TransientError | None:
    """The error that says how our JVM ended, if it has ended or does so within `patience` seconds."""
    try:
        code = None if jvm is None else jvm.wait(patience)
    except subprocess.TimeoutExpired:
        return None
    if code is None:
        return None
    full = "exit code 3: its heap was full; raise spark.driver_memory_mb"
    words = full if code == JAVA_HEAP_FULL else ended_by(code)
    return TransientError(f"Spark's JVM is gone: {words}", "the next session repeats its batches")


_LOOK_EVERY = 0.1
JVM_GONE_WITHIN = 10.0
"""Seconds that the JVM of an ended Spark driver takes to end at most: a `group_patience` for `ChildProcess.end`."""


@dataclass(frozen=True)
class ChildCommand:
    """A command line with the environment of its process; it may be started many times."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    """The whole environment: nothing of ours is added."""
    folder: Path | None = None
    """The working directory; None: ours."""
    stdin: int = subprocess.DEVNULL
    """With subprocess.PIPE the child reads end of file when we end, or close the pipe."""
    umask: int = -1
    """-1: ours."""

    def start(self, output: int | IO[bytes], errors: int | IO[bytes] = subprocess.STDOUT) -> ChildProcess:
        """Start it; standard output and standard error both go to `output`, a file or subprocess.PIPE.

        With `errors`, standard error goes there instead.
        """
        process = subprocess.Popen(
            list(self.arguments),
            env=dict(self.environment),
            cwd=self.folder,
            stdin=self.stdin,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            umask=self.umask,
        )
        return ChildProcess(process)

    def start_reaped(self, output: int | IO[bytes]) -> ChildProcess:
        """Start it as `start` does; it is killed when this process ends: see `ChildReaper`."""
        with ExitStack() as undo:
            reaper = ChildReaper()
            undo.callback(reaper.release)
            child = self.start(output)
            undo.callback(child.kill)
            reaper.watch(child.pid)
            undo.pop_all()
        return ChildProcess(child.process, reaper)


class ChildProcess:
    """A started child and its process group. Always `end` or `kill` it: only that collects it."""

    def __init__(self, process: subprocess.Popen[bytes], reaper: ChildReaper | None = None) -> None:
        """`process` leads a group: it was started with `start_new_session`."""
        self.process = process
        self._reaper = reaper

    @property
    def pid(self) -> int:
        """The child's pid, which is the number of its group."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """The child's exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def gone(self) -> bool:
        """True if the child and all of its group have ended.

        The check reads all processes of the machine: do not repeat it too often.
        """
        return self.exit_code is not None and not self._group_runs()

    def wait(self, seconds: float) -> int | None:
        """Wait for the child; returns its exit code, or None if it still runs after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def wait_until_gone(self, seconds: float) -> int | None:
        """Wait for all of its group; returns the child's exit code, or None if that takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.gone:
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_EVERY)
        return self.process.returncode

    def ask_to_end(self) -> None:
        """Send SIGTERM to the child alone, without waiting: it has to end what it has started."""
        if self.exit_code is None:
            self.process.send_signal(signal.SIGTERM)

    def end(self, patience: float, group_patience: float = 0.0) -> int:
        """Ask it to end, wait `patience` seconds, then kill the rest of its group; returns the exit code.

        If it ends in time, the rest of its group has `group_patience` seconds to end too.
        """
        self.ask_to_end()
        if self.wait(patience) is not None:
            self.wait_until_gone(group_patience)
        return self.kill()

    def kill(self) -> int:
        """Send SIGKILL to the rest of its group, then `collect`. Further calls change nothing."""
        if not self._pid_is_anothers():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()  # also where the group could not be signalled: it is waited for without a deadline
        return self.collect()

    def collect(self) -> int:
        """Close our side of its standard input, wait for its end, and return its exit code."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        code = self.process.wait()
        if self._reaper is not None:
            self._reaper.release()
            self._reaper = None
        return code

    def _pid_is_anothers(self) -> bool:
        return self.process.returncode is not None and psutil.pid_exists(self.pid)

    def _group_runs(self) -> bool:
        """True if a process of the group runs; a zombie does not count."""
        if self._pid_is_anothers():
            return False
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    return True
        return False


# A process and all of its descendants in any process group, for a child whose children make groups.
#
# The system knows the parent of a process only while that parent runs. So the tree of a child is taken before the
# child gets its signal; it names the processes that the child may leave behind.

_LOOK_AT_TREE_EVERY = 0.02


@dataclass(frozen=True)
class ProcessTree:
    """Processes as they were at one moment, parents before their children."""

    processes: tuple[psutil.Process, ...] = ()

    @classmethod
    def of(cls, child: ChildProcess) -> ProcessTree:
        """The child and its descendants; empty once the child has ended, because another process may have its pid."""
        if child.exit_code is not None:
            return cls()
        try:
            top = psutil.Process(child.pid)
            return cls((top, *top.children(recursive=True)))
        except psutil.NoSuchProcess:
            return cls()

    def wait(self, seconds: float) -> ProcessTree:
        """Wait at most `seconds` for all of them to end; returns the processes that still run."""
        deadline = time.monotonic() + seconds
        while (left := [process for process in self.processes if _runs(process)]) and time.monotonic() < deadline:
            time.sleep(_LOOK_AT_TREE_EVERY)
        return ProcessTree(tuple(left))

    def kill(self) -> None:
        """Send SIGKILL to each of them that still runs."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _runs(process: psutil.Process) -> bool:
    """False also for a process that has ended and waits to be collected: its files are closed."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
