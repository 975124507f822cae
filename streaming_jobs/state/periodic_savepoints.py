"""Savepoints of a running stream, which are taken by themselves: none of their failures stops the stream.

A periodic savepoint is taken in a thread of its own while later batches run: it is of the batch after which it was
due, and of the tables' versions after that batch, which no later commit changes. One at a time; the runner waits for
it before it lets go of the stream (`settled`). If the process dies meanwhile, the savepoint has no savepoint.json, so
there is none, and retention removes what is there of it.
"""

from __future__ import annotations

import threading
import time

import structlog

from streaming_jobs.errors import RecourseError
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import stores
from streaming_jobs.state import stream_record
from streaming_jobs.state.savepoints import Reason, Savepoint, prune, savepoints, take
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream

log = structlog.get_logger()


class PeriodicSavepoints:
    """Takes a running stream's savepoints at an interval; `after` is called between two batches."""

    def __init__(self, settings: Settings, stream: Stream, record: StreamRecord) -> None:
        self._settings, self._stream, self._record = settings, stream, record
        newest = max((s.taken_at for s in savepoints(settings, record.stream)), default=None)
        self._last = newest if newest is not None else time.time()
        self._taking: threading.Thread | None = None

    def after(self, batch: int) -> None:
        """Begin to take one after this batch if it is time, and none is being taken."""
        every = self._settings.savepoint.every.total_seconds()
        if batch < 0 or not every or time.time() - self._last < every or not self.settled(0):
            return
        self._last = time.time()
        # No daemon: an interpreter that ends in order waits for it.
        self._taking = threading.Thread(target=self._take, args=(batch,), name=f"savepoint {self._stream.name}")
        self._taking.start()

    def settled(self, seconds: float) -> bool:
        """Wait at most so long for the savepoint that is being taken; True if there is none any longer."""
        if self._taking is None:
            return True
        self._taking.join(seconds)
        return not self._taking.is_alive()

    def _take(self, batch: int) -> None:
        try_take(self._settings, self._stream, self._record, batch, "time")


def try_take(
    settings: Settings, stream: Stream, record: StreamRecord, batch: int, reason: Reason, note: str = ""
) -> Savepoint | None:
    """Take one, and drop those past their age; a failure is only logged, since the stream can continue without it."""
    taken = None
    faults: tuple[type[Exception], ...] = (OSError, RecourseError, ValueError, KeyError)
    faults += tuple(fault for store in stores(stream) for fault in store.faults)
    try:
        taken = take(settings, stream, record, batch, reason, note)
        prune(settings, stream)
        stream_record.prune(settings, record, settings.savepoint.keep_generations)
    except faults as error:
        what = "no savepoint was taken" if taken is None else "old savepoints and generations stay for now"
        log.warning(what, stream=record.stream, batch=batch, reason=str(error)[:300])
    if taken is not None:
        log.info("savepoint", stream=record.stream, savepoint=taken.id, reason=reason)
    return taken
