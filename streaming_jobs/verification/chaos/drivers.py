"""Driver processes that are started to be killed: Python, its JVM, or both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from streaming_jobs.verification.chaos.faults import Victim

_SAID = ("level=error", "level=warning", "Error", "REC-")
_POLL = 0.05


@dataclass
class DriverProcess:
    """One session's process. Its standard input is a pipe of ours: it ends by itself when we are gone.

    Looking for its JVM, or for what is left of it, goes through all processes of the machine: not to be done too often.
    """

    streams: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    _jvm: psutil.Process | None = None

    @classmethod
    def start(cls, streams: Sequence[str], environment: Mapping[str, str], log: Path, *arguments: str) -> DriverProcess:
        """Start a session of these streams in the home that the environment names."""
        command = [sys.executable, "-m", "streaming_jobs.session", "--streams", ",".join(streams), "--supervised"]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *arguments],
                env=dict(environment),
                cwd=log.parent,  # no configuration file lies there
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return cls(tuple(streams), process, log, time.monotonic())

    @property
    def exit_code(self) -> int | None:
        """Of the Python process, negative for a signal; None while it lives."""
        return self.process.poll()

    @property
    def jvm(self) -> psutil.Process | None:
        """The session's JVM, once there is one."""
        if self._jvm is None and self.process.poll() is None:
            with suppress(psutil.Error):
                found = psutil.Process(self.process.pid).children(recursive=True)
                self._jvm = next((child for child in found if _is_session(child)), None)
        return self._jvm

    @property
    def gone(self) -> bool:
        """True if Python, JVM and whatever they started have ended."""
        return self.process.poll() is not None and not _group_lives(self.process.pid)

    def kill(self, victim: Victim) -> bool:
        """kill -9; False when there is no JVM yet that could be killed."""
        jvm = self.jvm
        if victim != "python" and jvm is None:
            return False
        if victim != "python" and jvm is not None:
            with suppress(psutil.NoSuchProcess):
                jvm.kill()
        if victim != "jvm":
            self.process.kill()
        return True

    def wait(self, seconds: float) -> int | None:
        """The exit code once Python and JVM are gone; None if that takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.gone:
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL)
        return self.process.returncode

    def stop(self, seconds: float) -> int | None:
        """Ask for a stop at the next batch border and wait; the exit code, None if it did not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(seconds)

    def end(self) -> None:
        """Make sure that nothing of it is left."""
        if not self.gone:  # the number of a group that has ended may be another's by now
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def words(self, lines: int = 6) -> str:
        """What it last said of an error, or the last it said at all."""
        text = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in text if any(mark in line for mark in _SAID)] or text
        return "\n".join(line[:1000] for line in told[-lines:])


def _is_session(process: psutil.Process) -> bool:
    """True if it is the session's JVM, and not the short-lived one that works out how to start it."""
    return process.name() == "java" and "org.apache.spark.launcher.Main" not in process.cmdline()


def _group_lives(group: int) -> bool:
    """True if a process of the group runs; one that only waits to be collected does not."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
