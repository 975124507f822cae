"""Savepoints of a running stream, which are taken by themselves: none of their failures stops the stream."""

from __future__ import annotations

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
    """Takes a running stream's savepoints at an interval; called between two batches."""

    def __init__(self, settings: Settings, stream: Stream, record: StreamRecord) -> None:
        self._settings, self._stream, self._record = settings, stream, record
        newest = max((s.taken_at for s in savepoints(settings, record.stream)), default=None)
        self._last = newest if newest is not None else time.time()

    def after(self, batch: int) -> None:
        """Take one after this batch if it is time; a failure is logged and stops no stream."""
        every = self._settings.savepoint.every.total_seconds()
        if batch < 0 or not every or time.time() - self._last < every:
            return
        self._last = time.time()
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
