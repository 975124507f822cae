"""A session's driver as a child process: started with a pipe to its standard input, stopped at a batch border.

Only the driver's own pid is ever asked to stop: a signal to its process group would kill the JVM first, and
the batch with it. The pipe's end of file tells a driver that whoever started it is gone, also after a kill -9.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess

JVM_GONE_WITHIN = 10.0
"""Seconds that the JVM of an ended driver may take to end, before its process group is killed."""


class Output(Protocol):
    """Where a driver writes its log to."""

    def open(self) -> IO[bytes]:
        """A file of its own for the driver; the caller closes it."""


class Driver:
    """One driver process. Starting, asking it to stop, and making sure that nothing of it is left."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: Output) -> None:
        """`environment` is added to ours."""
        self.command = list(command)
        self.environment = dict(environment)
        self.output = output
        self._child: ChildProcess | None = None

    def start(self) -> int:
        """Start the process and return its pid."""
        command = ChildCommand(self.command, {**os.environ, **self.environment}, stdin=subprocess.PIPE)
        with self.output.open() as output:
            self._child = command.start(output)
        return self._child.pid

    @property
    def pid(self) -> int | None:
        """Of the driver's Python process; None before `start`."""
        return self._child.pid if self._child else None

    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None before `start` and while it runs."""
        return self._child.exit_code if self._child else None

    def wait(self, seconds: float) -> int | None:
        """Its exit code when it has ended, or None if it still runs after `seconds`."""
        return self._child.wait(seconds) if self._child else None

    def ask_to_stop(self) -> None:
        """SIGTERM to the driver alone: each stream ends at its next batch border."""
        if self._child:
            self._child.ask_to_end()

    def end(self, patience: float) -> int | None:
        """Ask it to stop, wait `patience` seconds, then kill what is left of its process group; the exit code.

        The JVM ends by itself within seconds of its driver, and is given them.
        """
        return self._child.end(patience, JVM_GONE_WITHIN) if self._child else None
