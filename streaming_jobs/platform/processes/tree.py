"""A process and all below it, in whichever group: for a child whose children have groups and children of their own.

Who has started whom is known only as long as the one in between runs. So the tree of a child is taken before the child
is asked to end, and serves when the child has left some of it behind.
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
        """The child and all below it; empty once the child has ended, because its pid may be another's."""
        if child.exit_code is not None:
            return cls()
        try:
            top = psutil.Process(child.pid)
            return cls((top, *top.children(recursive=True)))
        except psutil.NoSuchProcess:
            return cls()

    def wait(self, seconds: float) -> ProcessTree:
        """Those that still run after `seconds`, or earlier if none does."""
        deadline = time.monotonic() + seconds
        while (left := [process for process in self.processes if _runs(process)]) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY)
        return ProcessTree(tuple(left))

    def kill(self) -> None:
        """SIGKILL to each of them that is still there."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _runs(process: psutil.Process) -> bool:
    """False also for one that nobody has collected yet: its files are closed."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
