"""The stop of one stream's query: at a batch border, from outside if it is idle, by force after a deadline.

A query is over when nothing of it is at work any more, which is later than Spark says so.
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
    """A stream's stop; all times in seconds of one clock that never goes back.

    `deadline` is for a batch to reach its border, `interval` the time that the trigger leaves between two batches.
    """

    stream: str
    deadline: float
    interval: float
    lingering: float = LINGERING
    requested: threading.Event = field(default_factory=threading.Event)
    """Looked at by the pipeline before each batch."""
    requested_at: float = 0.0
    _no_batch_since: float | None = None
    _ending_since: float | None = None

    def request(self, now: float) -> bool:
        """Ask for a stop at the next batch border; False if that was done before."""
        if self.requested.is_set():
            return False
        self.requested.set()
        self.requested_at = now
        return True

    def is_stuck(self, now: float) -> bool:
        """True if a batch has outlived the end of its query for too long: only the end of this process ends it."""
        return self._ending_since is not None and now - self._ending_since > self.lingering

    def press(self, query: RunningQuery, now: float, *, in_batch: bool) -> None:
        """A busy stream ends itself at the border. An idle one gets no batch, so it is stopped from here."""
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
            except Exception as error:  # noqa: BLE001 - it waits stopTimeout at most; the next poll asks again
                log.warning("the query has not stopped yet", stream=self.stream, reason=str(error)[:200])

    def is_over(self, query: RunningQuery, now: float, *, in_batch: bool) -> bool:
        """True if nothing of a query that is not active is at work any more.

        Spark calls a query terminated as soon as a stop is asked for, and waits for its thread afterwards,
        `stopTimeout` at most. A batch that it interrupts goes on in Python to the end of its commit, and then in Spark.
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
