"""The surroundings of one batch: its files, the functions of its session, its report, its path, the pause after it.

`batch.py` is the batch itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from streaming_jobs.errors import FunctionFailed, FunctionRaised, PermanentError, TransientError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.platform.failures import classify, larger_than_the_driver_takes
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.runtime.spark_plan import PlanTraits
from streaming_jobs.settings import StreamSettings
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.ledger_file import LedgerFile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from streaming_jobs.runtime.planned_once import RowsCounted
    from streaming_jobs.sources.base import SourceCounts
    from streaming_jobs.sources.read_times import BatchReadTimes


class StopAtBorder(Exception):
    """Raised at the beginning of a batch after a stop request: the only graceful way to end a query."""


class Replan(Protocol):
    """A check before each batch, which Spark has planned but not started."""

    def __call__(self, checkpoint: Checkpoint, batch: int) -> bool:
        """True if it rewrote the batch's checkpoint entry: the query is then restarted and reads the new entry."""


class Query(Protocol):
    """The running query, as the pipeline sees it: figures of the batch whose plan has just run."""

    def observed(self, observation: str) -> SourceCounts:
        """The counts of one source, taken ahead of the stream's function."""

    def dropped_behind(self) -> int | None:
        """The watermark (ms since 1970) behind which state operators dropped rows; None if they dropped none."""

    def count_failed_rows(self, wanted: bool) -> None:
        """Count the rows of the plan that runs next even if it fails, or do not."""

    def rows_counted(self) -> RowsCounted | None:
        """The rows, by topic, of a plan that has failed since; None if this Spark does not say."""

    def send_anew(self, records: Mapping[str, DataFrame]) -> bool:
        """Have a plan that has failed read these records, by topic, if it runs again; False if it cannot."""

    def read_times(self) -> BatchReadTimes:
        """The seconds that reading and decoding the batch's records took."""


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
    phase_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase, without `plan` (`PHASES` in `state/status.py`)."""
    read_in_plan_s: float = 0.0
    """Seconds of `read` and `decode` that Spark counts as planning."""


def phases(times: BatchReadTimes, computed: float, staged: float, committed: float, written: float) -> dict[str, float]:
    """The seconds of a batch by phase, from those until all its rows were staged, and of its commits after that.

    `staged` are the seconds of writing within the former, `written` within both. What tasks do at the same time as
    others does not add up to the time that passed: their phases are then shortened, all alike.
    """
    of_tasks = {"read": times.tasks.read, "decode": times.tasks.decode, "write": staged}
    fits = min(computed / total, 1.0) if (total := sum(of_tasks.values())) else 1.0
    inside = {phase: seconds * fits for phase, seconds in of_tasks.items()}
    after = min(written - staged, committed)
    return {
        "read": times.planner.read + inside["read"],
        "decode": times.planner.decode + inside["decode"],
        "function": max(computed - sum(inside.values()), 0.0),
        "write": inside["write"] + after,
        "commit": committed - after,
    }


@dataclass(frozen=True)
class BatchFiles:
    """Files of a stream's batches in its state folder, beside their tables."""

    checkpoint: Checkpoint
    ledger: LedgerFile
    attempts: DriverPathAttempts


@dataclass(frozen=True)
class BatchHooks:
    """Functions of the session around each batch.

    `stop` ends the query at the next border. `check_lease` is called before a batch begins and before its first commit,
    and raises LeaseLost if this driver may no longer write. `between` is called with the number of the finished batch,
    `before_commit` while the rows of a batch are computed, in another thread, and again when they are ready, `report`
    when they are in the tables.
    `at` is called at each crash point, and `idle` by the session's main thread, several times per second, whether or
    not a batch runs. `settled` waits at most so many seconds for what `between` has begun beside the batches, and
    returns whether all of it is done. `first_read` gives, in a replay, the time at which all records of a batch were
    first read, in milliseconds since 1970.
    """

    stop: threading.Event
    before_commit: Callable[[], None]
    report: Callable[[BatchReport], None]
    between: Callable[[int], None]
    replan: Replan | None = None
    check_lease: Callable[[], None] = lambda: None
    at: Callable[[str, str, int], None] = crash_point
    idle: Callable[[], None] = lambda: None
    settled: Callable[[float], bool] = lambda _: True
    first_read: Callable[[Sequence[OffsetRange]], int | None] = lambda _: None


# The path of a batch's rows: through the driver, which is quicker, or through the executors, which hold more.

Route = Literal["driver", "executor"]


@dataclass
class DriverPathAttempts:
    """The batch on the driver path, noted on disk, so that a repetition after a crash takes the executors."""

    file: Path

    def died(self, txn: Txn) -> bool:
        """True if an earlier attempt at this batch began on the driver path and did not finish."""
        try:
            return self.file.read_text() == str(txn.version)
        except FileNotFoundError:
            return False

    def begin(self, txn: Txn) -> None:
        """Note that the batch takes the driver path. The note of a batch that is done matches no later one."""
        self.file.write_text(str(txn.version))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Forget the batch if the stream's function raises: no driver has died of it, so it may take any path again."""
        try:
            yield
        except Exception as error:
            if isinstance(classify(error), FunctionRaised | FunctionFailed):
                self.forget()
            raise

    def forget(self) -> None:
        self.file.unlink(missing_ok=True)


def choose_path(
    settings: StreamSettings, traits: PlanTraits, *, records: int, bytes_per_record: float, died_before: bool
) -> Route:
    """Choose the driver or the executors for a batch.

    The number of records is known from the offsets before the batch runs. State can emit any number of rows;
    there the session's cap on result size stops a batch that does not fit, and its repetition takes the executors.
    An unknown operator may multiply rows or keep state, so its rows go through the driver only if the setting `path`
    is driver.
    """
    if settings.path != "auto":
        return settings.path
    if died_before or traits.unknown or (traits.multiplies and records > 10_000):
        return "executor"
    fits = records * bytes_per_record <= settings.driver_path_max_mb << 20
    return "driver" if traits.stateful or fits else "executor"


@contextmanager
def fits_the_driver(settings: StreamSettings, batch: int) -> Iterator[None]:
    """Translate the refusal by the session's cap on result size: this batch's repetition takes the executors."""
    try:
        yield
    except Exception as error:
        if not larger_than_the_driver_takes(error):
            raise
        if settings.path == "driver":
            raise PermanentError(
                f"batch {batch} does not fit the driver, and the setting `path` keeps it there",
                "set path to auto, or lower max_offsets_per_trigger",
            ) from error
        raise TransientError(
            f"batch {batch} did not fit the driver; it is repeated through the executors",
            "lower max_offsets_per_trigger if this happens often",
        ) from error


_PLENTY = 1000.0
_SHARE = 0.1
_WINDOW = 10.0
_LEAST_WINDOW = 1.0


@dataclass
class Pause:
    """The pause of a stream after a batch while few records arrive, so that its cost follows the number of records.

    A micro-batch costs the same for one record as for hundreds. Without a pause, a few records per second would be read
    in as many batches as the machine can run: more CPU time, commits and files than at ten times the records. So after
    a batch the stream waits until its batches take at most `_SHARE` of the time, but no longer than `longest`. From
    `_PLENTY` records per second on there is no wait. The wait comes after a batch, never before it, so records that
    arrive after a quiet moment are read at once. There is none after the first batch, which is slow and no measure of
    the rate of records.
    """

    longest: timedelta
    clock: Callable[[], float] = time.monotonic
    _recent: deque[tuple[float, int]] = field(default_factory=deque)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def after(self, records: int, started: float) -> float:
        """Seconds to wait after a batch of `records` that started at `started` and has just ended."""
        now, first = self.clock(), not self._recent
        self._recent.append((started, records))
        if first:
            return 0.0
        while self._recent[0][0] < now - _WINDOW and len(self._recent) > 1:
            self._recent.popleft()
        rate = sum(count for _, count in self._recent) / min(max(now - self._began, _LEAST_WINDOW), _WINDOW)
        few = max(0.0, 1.0 - rate / _PLENTY)
        return min(self.longest.total_seconds() * few, (now - started) * (1 / _SHARE - 1))
