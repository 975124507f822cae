"""A child process that leads a process group: started, waited for with a deadline, asked to end, killed with its group.

A group of its own does two things. Ctrl-C in a terminal does not reach the child. And what the child has started and
left behind is still found, by the group's number: a driver's JVM, which ends some seconds after its Python. A process
that has made a group of its own is not among them; `tree.py` is for those.

The order of an end: `ask_to_end` the child alone, `wait` with a deadline, then `kill` what is left of the group.

The number of a group is the pid of its leader. The system gives it to no new process as long as the group has a member,
one that waits to be collected included. So when the child has been collected and a process has its pid, the group is
over and that process is another's: it is never signalled.
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

from streaming_jobs.platform.processes.parent_death import ChildReaper

_LOOK_EVERY = 0.1


@dataclass(frozen=True)
class ChildCommand:
    """A command line with all that its process gets; start it once or again and again."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    """The whole of it: nothing of ours is added."""
    folder: Path | None = None
    """The working folder; None: ours."""
    stdin: int = subprocess.DEVNULL
    """With subprocess.PIPE the child reads the end of the file when we are gone, or close it."""
    umask: int = -1
    """-1: ours."""

    def start(self, output: int | IO[bytes]) -> ChildProcess:
        """Start it; standard output and standard error both go to `output`, a file or subprocess.PIPE."""
        process = subprocess.Popen(
            list(self.arguments),
            env=dict(self.environment),
            cwd=self.folder,
            stdin=self.stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=self.umask,
        )
        return ChildProcess(process)

    def start_reaped(self, output: int | IO[bytes]) -> ChildProcess:
        """Start it as `start` does, to be killed when we are gone: see `ChildReaper`."""
        with ExitStack() as undo:
            reaper = ChildReaper()
            undo.callback(reaper.release)
            child = self.start(output)
            undo.callback(child.kill)
            reaper.watch(child.pid)
            undo.pop_all()
        return ChildProcess(child.process, reaper)


class ChildProcess:
    """A started child and its process group. `end` or `kill` it in any case: only that collects it."""

    def __init__(self, process: subprocess.Popen[bytes], reaper: ChildReaper | None = None) -> None:
        """`process` leads a group: it was started with `start_new_session`."""
        self.process = process
        self._reaper = reaper

    @property
    def pid(self) -> int:
        """Of the child, and the number of its group."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """Of the child, negative for a signal; None while it runs."""
        return self.process.poll()

    @property
    def gone(self) -> bool:
        """True if the child and all of its group have ended.

        The look goes through all processes of the machine: not to be done too often.
        """
        return self.exit_code is not None and not self._group_runs()

    def wait(self, seconds: float) -> int | None:
        """The child's exit code when it has ended, or None if it still runs after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def wait_until_gone(self, seconds: float) -> int | None:
        """The child's exit code when all of its group has ended, or None if that takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.gone:
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_EVERY)
        return self.process.returncode

    def ask_to_end(self) -> None:
        """SIGTERM to the child alone, without waiting: what it has started is for it to end."""
        if self.exit_code is None:
            self.process.send_signal(signal.SIGTERM)

    def end(self, patience: float, group_patience: float = 0.0) -> int:
        """Ask it to end, wait `patience` seconds, then kill what is left of its group; the exit code.

        After an end in time the rest of its group has `group_patience` seconds to end too.
        """
        self.ask_to_end()
        if self.wait(patience) is not None:
            self.wait_until_gone(group_patience)
        return self.kill()

    def kill(self) -> int:
        """SIGKILL to all that is left of its group; then `collect`. Further calls change nothing."""
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
        """True if a process of the group runs; one that has ended and waits to be collected does not."""
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
