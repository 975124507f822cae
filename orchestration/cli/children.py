"""A session as a child of a command: its settings by environment, our signals forwarded, its end awaited."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import BinaryIO

from orchestration.sessions.driver import Driver, Output
from streaming_jobs.runtime.session_options import supervised_command

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminal:
    """Our own standard error in the place of a log file."""

    def open(self) -> BinaryIO:
        """A second descriptor for it; the caller closes it."""
        return os.fdopen(os.dup(sys.stderr.fileno()), "wb", buffering=0)


def session_driver(
    streams: Sequence[str],
    environment: Mapping[str, str],
    output: Output,
    *,
    trigger: str | None = None,
    asked_at: float | None = None,
) -> Driver:
    """The driver, not yet started, of a session with these streams; settings travel in its environment.

    Stops that were asked for after `asked_at` (seconds since 1970; its start) are obeyed.
    """
    options = ["--asked-at", f"{asked_at:.3f}"] if asked_at is not None else []
    options += ["--trigger", trigger] if trigger else []
    return Driver(supervised_command(streams, *options), environment, output)


def end(driver: Driver, patience: float) -> None:
    """Stop the driver at a batch border; kill it after `patience` seconds, or at another Ctrl-C."""
    try:
        driver.end(patience)
    except KeyboardInterrupt:
        kill(driver)


def kill(driver: Driver) -> None:
    """End the driver at once; its next start repeats the batch it was in, and nothing is doubled."""
    driver.end(0.0)


def attend(driver: Driver, patience: float, say: Callable[[str], None]) -> int:
    """Wait for a started driver and return its exit code.

    A first SIGINT, SIGTERM or SIGHUP to us stops it at a batch border within `patience` seconds; a second one,
    or an error here, ends it at once.
    """
    asked = 0

    def count(_: int, __: FrameType | None) -> None:
        nonlocal asked
        asked += 1  # only counted here: a handler may run in the middle of anything

    deadline = float("inf")
    with _handled_by(count):
        try:
            while (code := driver.exit_code()) is None:
                if asked > 1 or time.monotonic() > deadline:
                    say("ending at once")
                    kill(driver)
                elif asked == 1 and deadline == float("inf"):
                    say("stopping at the next batch border; Ctrl-C again ends it at once")
                    deadline = time.monotonic() + patience
                    driver.ask_to_stop()
                time.sleep(0.05)
        finally:
            kill(driver)
    return code


def stop_signals_interrupt() -> AbstractContextManager[None]:
    """SIGTERM and SIGHUP interrupt like Ctrl-C, also where a shell has made this process ignore SIGINT."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    return _handled_by(interrupt)


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
