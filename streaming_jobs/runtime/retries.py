"""The retries of a failed stream: soon at first, then every ten minutes; none for a failure that would come again.

| failure | tried again |
|---|---|
| may pass (`TransientError`) | after 1, 2, 4 ... 60 s, `max_restarts` times in a row |
| still there after that, while other streams of the session run | every ten minutes |
| a table that it reads does not exist yet (`TableAwaited`) | every two seconds, for `await_table` |
| the broker does not know a topic that was there before (`TopicUnknown`) | every two seconds, for a minute |
| of the stream's function, a second time in a row: same kind, place and batch | never: it would come again |
| needs a person (`PermanentError`, `UsageError`) | never |

After ten good batches, or ten minutes, the count begins anew. With `max_restarts` 0 nothing is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

from streaming_jobs.errors import (
    FunctionFailed,
    FunctionRaised,
    PreflightRefused,
    RecourseError,
    TableAwaited,
    TopicUnknown,
    TransientError,
)
from streaming_jobs.sources.topics import UNKNOWN_FOR

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
LASTING_DELAY = 600.0
AWAIT_DELAY = 2.0
HEALTHY_AFTER = 600.0
HEALTHY_BATCHES = 10


@dataclass
class Retries:
    """The failures of one stream in a row, and its next try; times in seconds of one clock."""

    max_restarts: int
    await_table: float = 600.0
    """Seconds for which a table that does not exist yet is awaited."""
    failures: int = 0
    lasting: bool = False
    """True if the quick tries are used up."""
    next_at: float | None = None
    """The time of the next try; None if the stream runs, or is over."""
    _good_batches: int = 0
    _healthy_since: float = 0.0
    _origin: str = ""
    _awaited_since: float | None = None

    @property
    def gave_up(self) -> bool:
        """True if the quick tries are used up and the next one is minutes away."""
        return self.next_at is not None and self.lasting

    def due(self, now: float) -> bool:
        """True if it is time for the next try."""
        return self.next_at is not None and now >= self.next_at

    def again_at(self, now: float) -> None:
        """Plan a try without a failure."""
        self.next_at = now

    def none_planned(self) -> None:
        """Plan no try: the stream is being started, or is over."""
        self.next_at = None

    def started(self, now: float) -> None:
        """Note that the stream runs again."""
        self._healthy_since, self.lasting = now, False

    def batch_done(self) -> None:
        """Count a good batch; enough of them end the row of failures."""
        self._good_batches += 1
        if self._good_batches >= HEALTHY_BATCHES:
            self.failures = 0

    def still_running(self, now: float) -> None:
        """Note that the stream runs; a long enough time ends the row of failures."""
        if self.failures and now - self._healthy_since > HEALTHY_AFTER:
            self.failures = 0

    def failed(self, error: RecourseError, now: float) -> tuple[RecourseError, float | None]:
        """Count a failure; returns the error to show, and the seconds until the next try, None if there is none."""
        if isinstance(error, (TableAwaited, TopicUnknown)):
            return self._awaited(error, now)
        self._awaited_since = None
        self.failures += 1
        self._good_batches = 0
        before, self._origin = self._origin, error.origin if isinstance(error, FunctionRaised) else ""
        if isinstance(error, FunctionRaised) and (error.origin == before or not self.max_restarts):
            error = _for_good(error)
        if not isinstance(error, TransientError) or not self.max_restarts:
            return error, None
        self.lasting = self.failures > self.max_restarts
        delay = LASTING_DELAY if self.lasting else min(FIRST_DELAY * 2 ** (self.failures - 1), LONGEST_DELAY)
        self.next_at = now + delay
        return error, delay

    def _awaited(self, error: TransientError, now: float) -> tuple[RecourseError, float | None]:
        """Plan the next look for a table or a topic; it is no failure, until the time for it is over."""
        patience = UNKNOWN_FOR if isinstance(error, TopicUnknown) else self.await_table
        if self._awaited_since is None:
            self._awaited_since = now
        if now - self._awaited_since < patience:
            self.next_at = now + AWAIT_DELAY
            return error, AWAIT_DELAY
        return PreflightRefused(f"{error.found}, after {patience:g} s of waiting", error.next_step), None


def _for_good(error: RecourseError) -> FunctionFailed:
    """The function's exception as an error that would come again."""
    permanent = FunctionFailed(
        error.found, "correct the function; a supervised session then loads it, any other has to be started again"
    )
    permanent.__cause__ = error.__cause__
    return permanent
