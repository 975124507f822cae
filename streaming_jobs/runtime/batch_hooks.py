"""The surroundings of one batch: its files beside the tables, the functions of its session, and its report.

`batch.py` is the batch itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from streaming_jobs.ledger.entry import DROPPED, QUARANTINED, LedgerEntry, taken_out
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime.batch_path import DriverPathAttempts, Route
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.ledger_file import LedgerFile

if TYPE_CHECKING:
    from streaming_jobs.sources.base import SourceCounts


class StopAtBorder(Exception):
    """Raised at the top of a batch when a stop is asked for: the one graceful way to end a query."""


class Replan(Protocol):
    """A check before each batch: Spark has planned it, and nothing of it is done yet."""

    def __call__(self, checkpoint: Checkpoint, batch: int) -> bool:
        """True if it wrote the batch's checkpoint entry anew: the query is then restarted and reads the new entry."""


class Query(Protocol):
    """The running query, as the pipeline sees it: figures of the batch whose plan has just run."""

    def observed(self, observation: str) -> SourceCounts:
        """The counts of one source, taken ahead of the stream's function."""

    def dropped_behind(self) -> int | None:
        """The watermark (ms since 1970) behind which state operators dropped rows; None if they dropped none."""


@dataclass(frozen=True)
class BatchReport:
    """The outcome of one batch: its ledger `entry`, and figures beside it; times in ms."""

    entry: LedgerEntry
    path: Route
    committer: str
    milliseconds: int
    version: int | None
    skipped: bool = False
    newest_record: int | None = None
    """The largest record timestamp of sources with an event time, in microseconds since 1970."""

    @property
    def batch(self) -> int:
        return self.entry.batch

    @property
    def records(self) -> int:
        """Offsets it read; rows, from tables."""
        return self.entry.records

    @property
    def rows(self) -> int:
        """Rows it wrote to the primary table."""
        return self.entry.rows.get("written", 0)

    @property
    def dead_letters(self) -> int:
        return self.entry.rows.get("dead_letters", 0)

    @property
    def dropped(self) -> int:
        """Rows that row rules have dropped."""
        return taken_out(self.entry.rows, DROPPED)

    @property
    def quarantined(self) -> int:
        """Rows that row rules have set aside."""
        return taken_out(self.entry.rows, QUARANTINED)

    @property
    def late(self) -> int:
        """Records behind the watermark, if the stream's function dropped any of them."""
        return self.entry.rows.get("late", 0)


@dataclass(frozen=True)
class BatchFiles:
    """Files of a stream's batches in its state folder, beside their tables."""

    checkpoint: Checkpoint
    ledger: LedgerFile
    attempts: DriverPathAttempts


@dataclass(frozen=True)
class BatchHooks:
    """Functions of the session around each batch.

    `stop` ends the query at the next border. `between` is called with the number of the finished batch, `before_commit`
    when the rows of a batch are ready, `report` when they are in the tables. `at` is called at each crash point, and
    `idle` by the session's main thread, several times per second, whether or not a batch runs. `settled` waits at most
    so many seconds for what `between` has begun beside the batches, and returns whether all of it is done. `first_read`
    gives, in a replay, the time at which all records of a batch were first read, in milliseconds since 1970.
    """

    stop: threading.Event
    before_commit: Callable[[], None]
    report: Callable[[BatchReport], None]
    between: Callable[[int], None]
    replan: Replan | None = None
    at: Callable[[str, str, int], None] = crash_point
    idle: Callable[[], None] = lambda: None
    settled: Callable[[float], bool] = lambda _: True
    first_read: Callable[[Sequence[OffsetRange]], int | None] = lambda _: None
