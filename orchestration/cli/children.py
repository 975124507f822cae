"""What a command starts and ends: a session as its child, the steps of `recourse up`, parts that are tried again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from orchestration.cli.text import say
from streaming_jobs.errors import RecourseError, SetupError, TransientError, setup_error
from streaming_jobs.platform.back_off import BackOff
from streaming_jobs.platform.processes.child import JVM_GONE_WITHIN, ChildCommand, ChildProcess
from streaming_jobs.runtime.session_options import supervised_command

if TYPE_CHECKING:
    from streaming_jobs.settings import Settings

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BACK_OFF = BackOff(1.0, 60.0)

_Result = TypeVar("_Result")


def session_driver(
    streams: Sequence[str],
    environment: Mapping[str, str],
    *,
    trigger: str | None = None,
    asked_at: float | None = None,
) -> ChildCommand:
    """The driver of a session with these streams; settings travel in its environment.

    Stop requests from after `asked_at` (seconds since 1970; its start) are obeyed.
    """
    options = ["--asked-at", f"{asked_at:.3f}"] if asked_at is not None else []
    options += ["--trigger", trigger] if trigger else []
    return ChildCommand(supervised_command(streams, *options), {**os.environ, **environment}, stdin=subprocess.PIPE)


def stop_patience(settings: Settings, streams: Sequence[str]) -> float:
    """Seconds that a session with these streams may take to stop: the last batch, and its JVM."""
    return max(settings.for_stream(name).stop_deadline.total_seconds() for name in streams) + 15


def end(driver: ChildProcess, patience: float) -> None:
    """Stop the driver at a batch border; kill it after `patience` seconds, or at another Ctrl-C."""
    try:
        driver.end(patience, JVM_GONE_WITHIN)
    except KeyboardInterrupt:
        driver.kill()


def attend(driver: ChildProcess, patience: float, say: Callable[[str], None]) -> int:
    """Wait for a driver and return its exit code.

    A first SIGINT, SIGTERM or SIGHUP to us stops it at a batch border within `patience` seconds; a second one,
    or an error here, ends it at once: its next start repeats the batch it was in, and nothing is doubled.
    """
    asked = 0

    def count(_: int, __: FrameType | None) -> None:
        nonlocal asked
        asked += 1  # only counted here: a handler may run in the middle of anything

    deadline = float("inf")
    with _handled_by(count):
        try:
            while (code := driver.exit_code) is None:
                if asked > 1 or time.monotonic() > deadline:
                    say("ending at once")
                    driver.kill()
                elif asked == 1 and deadline == float("inf"):
                    say("stopping at the next batch border; Ctrl-C again ends it at once")
                    deadline = time.monotonic() + patience
                    driver.ask_to_end()
                time.sleep(0.05)
        finally:
            driver.end(0.0, JVM_GONE_WITHIN)
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


@dataclass(frozen=True)
class Step:
    """Something that was started, with its orderly end and its immediate end."""

    name: str
    stop: Callable[[], object]
    kill: Callable[[], object]


@dataclass
class Steps:
    """A stack of steps. Leaving the block stops them, last one first; another Ctrl-C meanwhile kills the rest.

    Add a step before it starts, so that an interrupted start is ended too: `stop` and `kill` have to work then.
    If a stop fails, the others are stopped all the same; the first error is raised at the end.
    """

    started: list[Step] = field(default_factory=list)

    def add(self, name: str, stop: Callable[[], object], kill: Callable[[], object] | None = None) -> None:
        """Register a step; without `kill` its stop is used for both."""
        self.started.append(Step(name, stop, kill or stop))

    def close(self) -> None:
        in_order = True
        first: Exception | None = None
        while self.started:
            step = self.started[-1]
            try:
                if in_order:
                    say(f"stopping: {step.name}")
                    step.stop()
                else:
                    step.kill()
            except KeyboardInterrupt:
                if in_order:
                    say("ending at once")
                in_order = False
                continue  # the same step again, killed
            except Exception as error:  # noqa: BLE001 - raised after the other steps have ended
                say(f"stopping: {step.name} failed: {error}")
                first = first or error
            self.started.pop()
        if first is not None:
            raise first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def awaited(name: str, action: Callable[[], _Result], settings: Settings) -> _Result:
    """The result of `action`, retried until it succeeds; raises an error that retries cannot cure.

    An error is retried if it says that it may pass, and every error while the disk is full: it seldom names the cause.
    """
    from streaming_jobs.state.health import disk_space

    def passes(error: RecourseError) -> bool:
        transient = isinstance(error, TransientError) or (isinstance(error, SetupError) and error.may_pass)
        return transient or disk_space(settings).colour == "red"

    results: list[_Result] = []
    part = Retried(name, lambda: results.append(action()), settings.home, passes=passes)
    part()
    while not results:
        time.sleep(1.0)
        part()
    return results[0]


class Retried:
    """Calls `action`, and after a failure again in 1, 2, 4, ... 60 seconds, for as long as it takes.

    A failure is printed when it differs from the one before, and the end of failures is printed too. Failures are the
    errors of Recourse for which `passes` is true, and those of the machine (a full disk); `home` is named where such an
    error names no path. Any other exception is raised.
    """

    def __init__(
        self,
        name: str,
        action: Callable[[], object],
        home: Path,
        *,
        passes: Callable[[RecourseError], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._action, self._home, self._passes, self._clock = name, action, home, passes, clock
        self._failures, self._next, self._printed = 0, 0.0, ""

    def __call__(self) -> None:
        """Call the action, unless it has failed and its pause is not over."""
        if self._clock() < self._next:
            return
        try:
            self._action()
        except RecourseError as error:
            self._failed(error)
        except OSError as error:
            if (known := setup_error(error, self._home)) is None:
                raise
            self._failed(known)
        else:
            if self._failures:
                say(f"{self._name}: works again")
            self._failures, self._next, self._printed = 0, 0.0, ""

    def _failed(self, error: RecourseError) -> None:
        if not self._passes(error):
            raise error
        self._failures += 1
        delay = _BACK_OFF.delay(self._failures)
        self._next = self._clock() + delay
        if (text := str(error)) != self._printed:
            self._printed = text
            say(f"{self._name}: {text}\n  tried again in {delay:.0f} s, then up to every {_BACK_OFF.longest:.0f} s")
