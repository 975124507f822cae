"""The stop of one stream's query: at a batch border, from outside if it is idle, by force after a deadline.

A query is over when neither its batch nor its thread runs any more; Spark calls it terminated before that.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import structlog

from streaming_jobs.runtime.stream_queries import RunningQuery

log = structlog.get_logger()

_IDLE_BEFORE_STOP = 1.0
LINGERING = 300.0
"""Seconds that a batch may run on after its query was ended, before the session ends itself and its JVM."""


@dataclass
class QueryStop:
    """A stream's stop; all times in seconds of one monotonic clock.

    `deadline` is the time for a batch to reach its border, `interval` the trigger's time between two batches.
    """

    stream: str
    deadline: float
    interval: float
    lingering: float = LINGERING
    requested: threading.Event = field(default_factory=threading.Event)
    """The pipeline checks it before each batch."""
    requested_at: float = 0.0
    _no_batch_since: float | None = None
    _ending_since: float | None = None

    def request(self, now: float) -> bool:
        """Request a stop at the next batch border; False if one was requested before."""
        if self.requested.is_set():
            return False
        self.requested.set()
        self.requested_at = now
        return True

    def is_stuck(self, now: float) -> bool:
        """True if a batch has outlived the end of its query for too long: only the end of this process ends it."""
        return self._ending_since is not None and now - self._ending_since > self.lingering

    def press(self, query: RunningQuery, now: float, *, in_batch: bool) -> None:
        """Stop the query if it is idle or past the deadline; a busy one stops at its batch border."""
        if in_batch:
            self._no_batch_since = None
        elif self._no_batch_since is None:
            self._no_batch_since = now
        patience = max(_IDLE_BEFORE_STOP, self.interval)
        idle = self._no_batch_since is not None and now - self._no_batch_since > patience
        if idle or now - self.requested_at > self.deadline:
            self._ending(now, in_batch=in_batch)
            try:
                query.stop()
            except Exception as error:  # noqa: BLE001 - it waits stopTimeout at most; the next poll tries again
                log.warning("the query has not stopped yet", stream=self.stream, reason=str(error)[:200])

    def is_over(self, query: RunningQuery, now: float, *, in_batch: bool) -> bool:
        """True if neither the batch nor the thread of an inactive query runs any more.

        Spark calls a query terminated as soon as a stop is requested, and waits for its thread afterwards,
        `stopTimeout` at most. A batch that it interrupts runs on in Python to the end of its commit, and then in Spark.
        """
        if in_batch or not query.ended:
            self._ending(now, in_batch=in_batch)
            return False
        self._ending_since = None
        return True

    def _ending(self, now: float, *, in_batch: bool) -> None:
        if self._ending_since is None:
            self._ending_since = now
            if in_batch:
                log.info("the stream is held until its batch is over", stream=self.stream, at_most=self.lingering)
