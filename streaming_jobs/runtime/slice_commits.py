"""Rebuilt slices and redrives in the driver: committed between two batches, also of an idle stream.

Only one thread may write a table. A batch runs in a thread of Spark's; `around` lets it hold a lock, which `look`,
called by the session's main thread, takes only if no batch runs. No failure here ends the stream: it becomes the
outcome of the change. Only a redrive or a slice that one table has, and another one does not take, holds the next batch
up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from streaming_jobs.errors import RecourseError, TransientError
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.runtime.redrive_commits import carry_out_redrives, refuse_begun
from streaming_jobs.sinks.sliced import SliceOutdated, sliced
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.state.redrive_requests import RedriveRequests
from streaming_jobs.state.slice_requests import SliceCommitRequest, SliceRequests

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = structlog.get_logger()

PUT_OFF = 5.0
"""Seconds until the next try, after requests could not be read or written."""


class BatchFunction(Protocol):
    """The function of a batch; while `in_batch` is true, the stream does not count as ended.

    `failure` is the exception that ends its query: Spark passes on only the text.
    """

    in_batch: bool
    failure: BaseException | None

    def __call__(self, frame: DataFrame, number: int, /) -> None:
        """Run the batch."""


@dataclass
class SliceCommits:
    """The waiting slices and redrives of one stream and its open tables, by name."""

    requests: SliceRequests
    redrives: RedriveRequests
    tables: Mapping[str, StoredTable]
    clock: Callable[[], float] = time.monotonic
    _batch: threading.Lock = field(default_factory=threading.Lock, init=False)
    _put_off: tuple[float, str] = field(default=(0.0, ""), init=False)
    """Until when nothing is tried, and why."""

    def around(self, batch: BatchFunction) -> Callable[[DataFrame, int], None]:
        """The function of a batch, with waiting changes committed before it; that counts as a part of the batch."""

        def run(frame: DataFrame, number: int) -> None:
            with self._batch:
                if self._any_waiting():
                    batch.in_batch = True
                    try:
                        self._commit()
                        refuse_begun(self.redrives)
                        _refuse_begun(self.requests)
                    except TransientError as error:
                        batch.failure = error
                        raise
                    finally:
                        batch.in_batch = False
                batch(frame, number)

        return run

    def look(self) -> None:
        """Commit waiting changes, unless a batch runs: then its end will."""
        if self._any_waiting() and self._batch.acquire(blocking=False):
            try:
                self._commit()
            finally:
                self._batch.release()

    def _any_waiting(self) -> bool:
        return self.requests.any_waiting() or self.redrives.any_waiting()

    def _commit(self) -> None:
        if self.clock() < self._put_off[0] or not self._any_waiting():
            return
        try:
            carry_out(self.requests, self.tables)
            carry_out_redrives(self.redrives, self.tables)
        except (RecourseError, OSError) as error:  # tried again later, until the request expires
            reason = str(error)[:300]
            if reason != self._put_off[1]:
                log.warning("changes put off", reason=reason)
            self._put_off = self.clock() + PUT_OFF, reason


def carry_out(requests: SliceRequests, tables: Mapping[str, StoredTable]) -> None:
    """Give every waiting slice its outcome; the caller is the one who may write the tables.

    Raises the error of a slice that its quarantine has, and its table does not take yet.
    """
    for request in requests.waiting():
        if request.state == "waiting" and not requests.claim(request):
            continue
        withdrawn = request if request.state == "expired" else None
        ended = requests.outcome(request.id) or withdrawn or _carried_out(requests, request, tables)
        requests.end(ended)
        crash_point("slice_ended", request.stream, 0)
        log.info("slice", stream=request.stream, table=request.table, slice=request.id, state=ended.state)


def _refuse_begun(requests: SliceRequests) -> None:
    """Raise TransientError while a slice is begun: the quarantine may have its rows, and the table not."""
    for each in requests.waiting():
        if each.state == "committing" and len(each.parts) > 1:
            raise TransientError(
                f"slice {each.id} of stream {each.stream} is not in the table and its quarantine yet",
                "remove what the stream's log names: the slice is ended at the next try",
            )


def _carried_out(
    requests: SliceRequests, request: SliceCommitRequest, tables: Mapping[str, StoredTable]
) -> SliceCommitRequest:
    begun, parts, version = False, request.parts, None
    if missing := [part.table for part in parts if part.table not in tables]:
        return request.ended("failed", reason=f"stream {request.stream} has no table {missing[0]}")
    try:
        changed = [(part, sliced(tables[part.table])) for part in parts]
        is_late = time.time() > request.expires
        # Looking for what is there may read the whole log: only a change of two commits, or a late one, needs it.
        there = [_there(tables[part.table], part) if is_late or len(parts) > 1 else None for part in parts]
        begun = any(version is not None for version in there)
        if is_late and not begun:
            return request.ended("expired", reason="nobody committed it in time")
        for part, table in changed if len(parts) > 1 and not begun else ():
            table.check(part.change, part.ledger)
        for number, ((part, table), version) in enumerate(zip(changed, there, strict=True)):
            if version is None:
                at = partial(crash_point, stream=request.stream, batch=number)
                version = table.replace(part.change, part.ledger, at)
            begun = True
            if part is not request:
                requests.end(part.ended("committed", version=version))
        return request.ended("committed", version=version)
    except SliceOutdated as outdated:
        if begun:
            again = "the quarantine has the slice, and the table does not: rebuild it again"
            log.warning("slice", stream=request.stream, table=request.table, slice=request.id, reason=again)
        return request.ended("outdated", reason=outdated.found)
    except Exception as error:
        if (version := _there(tables[request.table], request)) is not None:  # the error followed the commit
            return request.ended("committed", version=version)
        if begun:
            raise
        return request.ended("failed", reason=f"{type(error).__name__}: {error}"[:500])


def _there(stored: StoredTable, request: SliceCommitRequest) -> int | None:
    """The version that has the slice, by the table's log; None if there is none."""
    plan = request.ledger.plan
    noted = ((commit.version, commit.entry) for commit in stored.commits())
    return next((v for v, entry in noted if entry and (entry.kind, entry.plan) == ("slice", plan)), None)
