"""A part of `recourse up` that a failure does not end: called about once a second, or awaited at the start."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from orchestration.cli.output import say
from streaming_jobs.errors import RecourseError, SetupError, TransientError, setup_error
from streaming_jobs.settings import Settings
from streaming_jobs.state.health import disk_space

LONGEST_DELAY = 60.0

_Result = TypeVar("_Result")


def awaited(name: str, action: Callable[[], _Result], settings: Settings) -> _Result:
    """The result of `action`, which is tried until it succeeds; raises an error that does not pass by itself.

    Errors pass that say so, and all that come while the disk is full: what fails then seldom says why.
    """

    def passes(error: RecourseError) -> bool:
        told = isinstance(error, TransientError) or (isinstance(error, SetupError) and error.may_pass)
        return told or disk_space(settings).colour == "red"

    results: list[_Result] = []
    part = Retried(name, lambda: results.append(action()), settings.home, passes=passes)
    part()
    while not results:
        time.sleep(1.0)
        part()
    return results[0]


class Retried:
    """Calls `action`; after a failure again in 1, 2, 4, ... 60 seconds, for as long as it takes.

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
        """Call the action, unless it has failed and its time has not come."""
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
        delay = min(LONGEST_DELAY, 2.0 ** min(self._failures, 10))
        self._failures, self._next = self._failures + 1, self._clock() + delay
        if (text := str(error)) != self._printed:
            self._printed = text
            say(f"{self._name}: {text}\n  tried again in {delay:.0f} s, then up to every {LONGEST_DELAY:.0f} s")
