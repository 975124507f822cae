"""The process of a recovery, seen from the run that started it: its launch goes in, its events come out."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from orchestration.recoveries.events import Event, decode
from orchestration.recoveries.launch import Launch
from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.driver import JVM_GONE_WITHIN
from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess

READ_WITHIN = 5.0
"""Seconds that the last events of an ended process may take to be read."""


def recovery_command() -> list[str]:
    """The command line of the process."""
    return [sys.executable, "-m", "orchestration.recoveries.child"]


class RecoveryProcess:
    """One process, in a process session of its own. It reads the end of its standard input when we are gone."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: BoundedLog) -> None:
        """`environment` is added to ours; what the process logs is appended to `log`."""
        self._command = ChildCommand(list(command), {**os.environ, **environment}, stdin=subprocess.PIPE)
        self._log = log
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._child: ChildProcess | None = None
        self._reader: threading.Thread | None = None

    def start(self, launch: Launch) -> int:
        """Start it with its launch, and return its pid."""
        with self._log.open() as errors:
            self._child = self._command.start(subprocess.PIPE, errors)
        streams = self._child.process
        assert streams.stdin is not None and streams.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(streams.stdout,), name="events", daemon=True)
        self._reader.start()
        with suppress(BrokenPipeError):  # it has ended already, and its exit code says so
            streams.stdin.write(f"{launch.encode()}\n".encode())
            streams.stdin.flush()
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None before `start` and while it runs."""
        return self._child.exit_code if self._child else None

    def next(self, seconds: float) -> Event | None:
        """The next event; None if there is none within `seconds`."""
        with suppress(queue.Empty):
            return self._events.get(timeout=seconds)
        return None

    def rest(self) -> list[Event]:
        """The events of the ended process that were not taken yet."""
        if self._reader is not None:
            self._reader.join(READ_WITHIN)
        events = []
        while (event := self.next(0.0)) is not None:
            events.append(event)
        return events

    def end(self, patience: float) -> int | None:
        """Interrupt it, wait `patience` seconds, then kill what is left of its process group; the exit code."""
        return self._child.end(patience, JVM_GONE_WITHIN) if self._child else None

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                if line.strip():
                    self._events.put(decode(line))
