"""A session's driver as a child process: started with a pipe to its standard input, stopped at a batch border.

Only the driver's own pid is ever asked to stop: a signal to its process group would kill the JVM first, and
the batch with it. The pipe's end of file tells a driver that whoever started it is gone, also after a kill -9.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from streaming_jobs.files import private_folder

JVM_GONE_WITHIN = 10.0
"""Seconds that the JVM of an ended driver may take to end, before its process group is killed."""


class BoundedLog:
    """A file that child processes append to, kept below `limit` bytes; mode 0600.

    It is cut by whoever calls `trim` now and then, not by the writers, which may outlive the caller. The newest
    half stays, in the same file, because the writers keep it open for appending.
    """

    def __init__(self, path: Path, limit: int = 8 * 1024 * 1024) -> None:
        self.path = path
        self.limit = limit

    def open(self) -> int:
        """A descriptor for appending; the caller closes it."""
        private_folder(self.path.parent)
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, line: str) -> None:
        """Append a line of our own."""
        descriptor = self.open()
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)

    def trim(self) -> None:
        """Drop the older half if the file has grown beyond its limit."""
        with suppress(FileNotFoundError):
            if self.path.stat().st_size <= self.limit:
                return
            kept = self.tail(self.limit // 2)
            os.truncate(self.path, 0)
            self.write(f"(older lines dropped)\n{kept}")

    def tail(self, size: int = 4096) -> str:
        """The last whole lines, at most `size` bytes."""
        try:
            with self.path.open("rb") as file:
                length = file.seek(0, os.SEEK_END)
                file.seek(max(0, length - size))
                data = file.read(size)
        except FileNotFoundError:
            return ""
        if length > size:
            data = data.partition(b"\n")[2] or data
        return data.decode("utf-8", "replace").rstrip("\n")

    def tail_from(self, mark: str, size: int = 4096) -> str:
        """The last whole lines, at most `size` bytes, after the last line that is `mark`."""
        text = self.tail(size)
        return text.rpartition(f"{mark}\n")[2] if f"{mark}\n" in text else text if text != mark else ""


class Driver:
    """One driver process. Starting, asking it to stop, and making sure that nothing of it is left."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: BoundedLog) -> None:
        self.command = list(command)
        self.environment = dict(environment)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> int:
        """Start the process and return its pid."""
        output = self.log.open()
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        finally:
            os.close(output)
        return self._process.pid

    @property
    def pid(self) -> int | None:
        """Of the driver's Python process; None before `start`."""
        return self._process.pid if self._process else None

    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        return self._process.poll() if self._process else None

    def ask_to_stop(self) -> None:
        """SIGTERM to the driver alone: each stream ends at its next batch border."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def end(self, patience: float) -> int | None:
        """Ask it to stop, wait `patience` seconds, then kill what is left of its process group; the exit code."""
        if self._process is None:
            return None
        self.ask_to_stop()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._end_group(0.0 if self._process.returncode is None else JVM_GONE_WITHIN)
        if self._process.stdin:
            self._process.stdin.close()
        return self._process.wait()

    def _end_group(self, patience: float) -> None:
        """Wait for the group (the JVM dies by itself within seconds of its driver), then kill it."""
        assert self._process is not None
        group = self._process.pid
        deadline = time.monotonic() + patience
        while _group_lives(group):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _group_lives(group: int) -> bool:
    """True if a process of the group runs; one that has ended and only waits to be collected does not."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False
