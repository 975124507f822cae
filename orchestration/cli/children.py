"""A session as a child process: its settings by environment, its signals forwarded, its end awaited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO

PERMANENT, BUSY = 78, 75
"""Exit codes of a session beyond 0, 1 and 2: permanent failure, lease held by another driver."""


class SessionProcess:
    """`python -m streaming_jobs.session` in its own process group.

    The terminal's Ctrl-C does not reach it: the JVM would die of it before the batch has ended. It gets SIGTERM
    from us instead, and end of file on its standard input when we are gone.
    """

    def __init__(
        self,
        streams: Sequence[str],
        environment: Mapping[str, str],
        *,
        trigger: str | None = None,
        log: IO[str] | None = None,
    ) -> None:
        command = [sys.executable, "-m", "streaming_jobs.session", "--streams", ",".join(streams), "--supervised"]
        if trigger:
            command += ["--trigger", trigger]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log or sys.stderr,
            stderr=log or sys.stderr,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Of the driver's Python process."""
        return self._process.pid

    def running(self) -> bool:
        """Whether the session still lives."""
        return self._process.poll() is None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal; raises subprocess.TimeoutExpired."""
        return self._process.wait(timeout)

    def stop(self) -> None:
        """Ask it to stop at a batch border."""
        if self.running():
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; the next start repeats the batch it was in, and nothing is doubled."""
        if self.running():
            self._process.kill()

    def end(self, deadline: float) -> int:
        """Stop it, kill it after `deadline` seconds or at another Ctrl-C, and return its exit code."""
        self.stop()
        try:
            return self.wait(deadline)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self.kill()
            return self.wait()


@contextmanager
def on_stop_signals(action: Callable[[int], None]) -> Iterator[None]:
    """Within the block, call `action` with 1, 2, ... for each SIGINT, SIGTERM or SIGHUP instead of their defaults."""
    count = 0

    def handle(_: int, __: FrameType | None) -> None:
        nonlocal count
        count += 1
        action(count)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
