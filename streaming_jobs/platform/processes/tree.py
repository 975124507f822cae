"""A process and all of its descendants in any process group, for a child whose children make groups.

The system knows the parent of a process only while that parent runs. So the tree of a child is taken before the child
is asked to end; it names the processes that the child may leave behind.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

from streaming_jobs.platform.processes.child import ChildProcess

_LOOK_EVERY = 0.02


@dataclass(frozen=True)
class ProcessTree:
    """Processes as they were at one moment, those that have started others first."""

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
        """Wait at most `seconds` for all of them to end; returns those that still run."""
        deadline = time.monotonic() + seconds
        while (left := [process for process in self.processes if _runs(process)]) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
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
