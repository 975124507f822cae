"""Driver processes that are started to be killed: Python, its JVM, both, or a Python process of the JVM."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess
from streaming_jobs.runtime.session_options import supervised_command
from streaming_jobs.verification.chaos.faults import Victim
from streaming_jobs.verification.chaos.python_processes import ReadingWorkers, planners

_OF_ERRORS = ("level=error", "level=warning", "Error", "REC-")


@dataclass
class DriverProcess:
    """One session's process. Its standard input is a pipe of ours: it stops when we are gone.

    Looking for its JVM, or for what is left of it, goes through all processes of the machine: not to be done too often.
    """

    streams: tuple[str, ...]
    child: ChildProcess
    log: Path
    started: float
    _jvm: psutil.Process | None = None
    _reading: ReadingWorkers | None = None

    @classmethod
    def start(cls, streams: Sequence[str], environment: Mapping[str, str], log: Path, *arguments: str) -> DriverProcess:
        """Start a session of these streams in the home that the environment names."""
        log.parent.mkdir(parents=True, exist_ok=True)
        folder = log.parent  # no configuration file lies there
        command = ChildCommand(supervised_command(streams, *arguments), environment, folder, subprocess.PIPE)
        with log.open("wb") as output:
            child = command.start(output)
        return cls(tuple(streams), child, log, time.monotonic())

    @property
    def pid(self) -> int:
        """Of the Python process."""
        return self.child.pid

    @property
    def exit_code(self) -> int | None:
        """Of the Python process, negative for a signal; None while it runs."""
        return self.child.exit_code

    @property
    def jvm(self) -> psutil.Process | None:
        """The session's JVM, once there is one."""
        if self._jvm is None and self.exit_code is None:
            with suppress(psutil.Error):
                below = psutil.Process(self.pid).children(recursive=True)
                self._jvm = next((process for process in below if process.name() == "java"), None)
        return self._jvm

    @property
    def gone(self) -> bool:
        """True if Python, JVM and whatever they started have ended."""
        return self.child.gone

    def kill(self, victim: Victim) -> bool:
        """kill -9; False when there is no JVM yet that could be killed."""
        jvm = self.jvm
        if victim != "python" and jvm is None:
            return False
        if victim != "python" and jvm is not None:
            with suppress(psutil.NoSuchProcess):
                jvm.kill()
        if victim != "jvm":
            self.child.process.kill()
        return True

    @property
    def stopped(self) -> bool:
        """True if its Python is stopped by a signal."""
        if self.exit_code is None:
            with suppress(psutil.Error):
                return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def freeze(self) -> None:
        """Stop its Python and its JVM, as a machine does that hangs."""
        self.child.process.send_signal(signal.SIGSTOP)
        if (jvm := self.jvm) is not None:
            with suppress(psutil.NoSuchProcess):
                jvm.suspend()

    def wake(self) -> None:
        """Let Python and JVM continue."""
        if (jvm := self.jvm) is not None:
            with suppress(psutil.NoSuchProcess):
                jvm.resume()
        self.child.process.send_signal(signal.SIGCONT)

    def planners(self) -> list[psutil.Process]:
        return planners(self._children())

    def reading_workers(self, port: int) -> list[psutil.Process]:
        """The workers that read from the broker at `port` now, seen by two looks: the first returns none."""
        if self._reading is None:
            self._reading = ReadingWorkers(port)
        return self._reading.among(self._children())

    def wait(self, seconds: float) -> int | None:
        """The exit code once Python and JVM are gone; None if that takes longer than `seconds`."""
        return self.child.wait_until_gone(seconds)

    def stop(self, seconds: float) -> int | None:
        """Ask for a stop at the next batch border and wait; the exit code, None if it did not end."""
        self.child.ask_to_end()
        return self.wait(seconds)

    def end(self) -> None:
        """Make sure that nothing of it is left."""
        self.child.kill()

    def _children(self) -> list[psutil.Process]:
        if self.exit_code is None:
            with suppress(psutil.Error):
                return psutil.Process(self.pid).children(recursive=True)
        return []

    def words(self, lines: int = 6) -> str:
        """The last lines that it wrote on errors, or the last of all if there are none."""
        text = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in text if any(mark in line for mark in _OF_ERRORS)] or text
        return "\n".join(line[:1000] for line in errors[-lines:])
