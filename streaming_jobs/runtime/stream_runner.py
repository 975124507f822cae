"""One stream inside a session: preflight, start, watch, stop, and restart after a transient error."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import structlog

from streaming_jobs.errors import (
    FunctionFailed,
    FunctionRaised,
    LeaseLost,
    OffsetsLost,
    PermanentError,
    PreflightRefused,
    RecourseError,
    TableAwaited,
    TopicUnknown,
    TransientError,
)
from streaming_jobs.platform.back_off import OF_STREAMS
from streaming_jobs.platform.failures import classify, named, report_of
from streaming_jobs.preflight.findings import enforce, not_deployed
from streaming_jobs.preflight.snapshot import StreamSnapshot
from streaming_jobs.runtime import declaration
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchReport
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.lag import position_in
from streaming_jobs.runtime.live_status import LiveStatus, ProcessClock
from streaming_jobs.runtime.stream_queries import Queries, QueryHooks, RunningQuery
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import UNKNOWN_FOR
from streaming_jobs.state import stream_history
from streaming_jobs.state.lease import Lease
from streaming_jobs.state.status import ENDED, Status, TableAge
from streaming_jobs.stream import Stream
from streaming_jobs.text.durations import parse_duration

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


log = structlog.get_logger()

# The retries of a failed stream: soon at first, then every ten minutes; none for a failure that would recur.
#
# | failure | tried again |
# |---|---|
# | may pass (`TransientError`) | after 1, 2, 4 ... 60 s, `max_restarts` times in a row |
# | still there after that, while other streams of the session run | every ten minutes |
# | a table that it reads does not exist yet (`TableAwaited`) | every two seconds, for `await_table` |
# | the broker does not know a topic that was there before (`TopicUnknown`) | every two seconds, for a minute |
# | of the stream's function, a second time in a row: same kind, place and batch | never: it would repeat itself |
# | needs a person (`PermanentError`, `UsageError`) | never |
#
# After ten good batches, or ten minutes, the count restarts. With `max_restarts` 0 there are no retries.

LASTING_DELAY = 600.0
AWAIT_DELAY = 2.0
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
        self._healthy_since, self.lasting = now, False

    def batch_done(self) -> None:
        """Count a good batch; enough of them end the row of failures."""
        self._good_batches += 1
        if self._good_batches >= HEALTHY_BATCHES:
            self.failures = 0

    def still_running(self, now: float) -> None:
        """Note that the stream runs; a long enough time ends the row of failures."""
        if self.failures and now - self._healthy_since > OF_STREAMS.healthy_after:
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
        delay = LASTING_DELAY if self.lasting else OF_STREAMS.delay(self.failures)
        self.next_at = now + delay
        return error, delay

    def _awaited(self, error: TransientError, now: float) -> tuple[RecourseError, float | None]:
        """Schedule the next check for a missing table or topic, which is not a failure until the wait is over."""
        patience = UNKNOWN_FOR if isinstance(error, TopicUnknown) else self.await_table
        if self._awaited_since is None:
            self._awaited_since = now
        if now - self._awaited_since < patience:
            self.next_at = now + AWAIT_DELAY
            return error, AWAIT_DELAY
        return PreflightRefused(f"{error.found}, after {patience:g} s of waiting", error.next_step), None


def _for_good(error: RecourseError) -> FunctionFailed:
    """The function's exception as an error that would recur."""
    permanent = FunctionFailed(
        error.found, "correct the function; a supervised session then loads it, any other has to be started again"
    )
    permanent.__cause__ = error.__cause__
    return permanent


# The stop of one stream's query: at a batch border, from outside if it is idle, by force after a deadline.
#
# A query is over when its batch and its thread have ended; Spark calls it terminated before that.

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
        """True if the batch and the thread of an inactive query have ended.

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


_SETTLE = 10.0
"""Seconds that a failing session waits for a savepoint; after that, the savepoint is incomplete and does not count."""


@dataclass
class StreamRunner:
    """A stream of this session.

    All methods are called from the session's main thread, except two: `batch_done` comes from Spark's callback thread,
    and `beat` also from the thread of `StatusFiles.beating`.
    After `detached`, the session has released its lease, and its files are no longer this session's.
    """

    stream: Stream
    settings: Settings
    queries: Queries
    lease: Lease
    status: Status
    trigger: str | None = None
    """Overrides the one in the settings."""
    clock: ProcessClock = time
    lingering: float = LINGERING
    query: RunningQuery | None = field(default=None, init=False)
    pipeline: BatchPipeline | None = field(default=None, init=False)
    detached: bool = field(default=False, init=False)
    stop: QueryStop = field(init=False)
    retries: Retries = field(init=False)
    live: LiveStatus = field(init=False)
    _lost_since: float | None = field(default=None, init=False)
    """The first failure with lost records, of those since the last batch, that preflight could not find."""

    def __post_init__(self) -> None:
        settings = self.settings.for_stream(self.stream.name)
        loaded_code(self.stream, self.settings.flows)  # before its file can change
        declaration.parts_of(self.stream, self.settings)
        self.trigger = self.trigger or settings.trigger
        every = self.trigger.removeprefix("every ") if self.trigger.startswith("every ") else None
        shortest = settings.commit_interval(upsert=self.stream.primary.mode == "upsert")
        interval = (parse_duration(every) if every is not None else shortest).total_seconds()
        self.status.trigger, self.status.batch_every_s = self.trigger, interval
        self.retries = Retries(settings.max_restarts, settings.await_table.total_seconds())
        self.stop = QueryStop(self.stream.name, settings.stop_deadline.total_seconds(), interval, self.lingering)
        self.live = LiveStatus(self.status, self.clock)
        self.status.tables = self._table_ages()

    def _table_ages(self) -> dict[str, TableAge]:
        """The ages of the tables of its sinks, as far as an earlier session has noted them, with today's objectives."""
        known, now = self.status.tables, self.clock.time()
        tables = () if self.stream.batches_only else self.stream.sinks.values()
        ages = {table.name: (known.get(table.name, TableAge(now)), table.fresh_within) for table in tables}
        return {
            name: replace(age, fresh_within_s=None if text is None else parse_duration(text).total_seconds())
            for name, (age, text) in ages.items()
        }

    @property
    def ended(self) -> bool:
        """True if the stream is over in this session."""
        return self.status.state in ENDED

    @property
    def gave_up(self) -> bool:
        """True if the quick tries are used up and the next one is minutes away."""
        return self.retries.gave_up

    @property
    def has_lease(self) -> bool:
        """False once the stream's lease has ended, by time or by another holder: its files are not this session's."""
        try:
            self.lease.check()
        except LeaseLost:
            return False
        return True

    @property
    def in_batch(self) -> bool:
        """True if a batch is being written, also one of a query that Spark calls terminated."""
        return self.pipeline is not None and self.pipeline.in_batch

    @property
    def stuck(self) -> bool:
        """True if a batch has outlived the end of its query for too long: only the end of this process ends it."""
        return self.stop.is_stuck(self.clock.monotonic())

    def preflight(self) -> StreamSnapshot:
        """Look at checkpoint, tables and topics; raises PreflightRefused or OffsetsLost."""
        checked = self.queries.preflight(self.stream)
        if self.settings.for_stream(self.stream.name).require_deploy:
            code = loaded_code(self.stream, self.settings.flows)
            last = stream_history.deploys(self.settings, self.stream.name)[-1:]
            enforce(list(not_deployed(checked.snapshot, code, last[0] if last else None)))
        self.status.warnings = checked.warnings
        for warning in checked.warnings:
            log.warning(warning, stream=self.stream.name)
        self.live.position = position_in(checked.snapshot)
        return checked.snapshot

    def start(self, spark: SparkSession) -> None:
        """Start the query, or record the failure; `poll` tries again later after a transient error."""
        self.retries.none_planned()
        self.status.begun_at = self.clock.time()
        try:
            self._start(spark)
        except Exception as error:  # noqa: BLE001 - every failure becomes a RecourseError, and is shown
            self.fail(classify(error))

    def poll(self, spark: SparkSession) -> None:
        """Handle the query's end, its restart and its stop."""
        if self.ended:
            return
        now, requested = self.clock.monotonic(), self.stop.requested.is_set()
        if self.query is None:
            if requested:
                self._stopped()
            elif self.retries.due(now):
                self.status.restarts += 1
                self.start(spark)
            return
        if not self.query.isActive:
            if self.stop.is_over(self.query, now, in_batch=self.in_batch) and self._settled(0):
                self._query_ended()
        elif requested:
            self.stop.press(self.query, now, in_batch=self.in_batch)
        else:
            self.retries.still_running(now)
            if self.pipeline is not None:
                self.pipeline.hooks.idle()

    def request_stop(self) -> None:
        """Request a stop at the next batch border."""
        if not self.ended and self.stop.request(self.clock.monotonic()):
            self.status.state = "stopping"
            log.info("stop requested", stream=self.stream.name)

    def leave_stopped(self) -> None:
        """Record the stream as stopped without a start: a stop was requested before it."""
        self.stop.requested.set()
        self._stopped()

    def beat(self) -> None:
        """Renew the heartbeat and the lag."""
        if self.query is None:
            self.status.input_rows_per_s = self.status.processed_rows_per_s = None
        self.live.beat(self.queries.ends(self.stream), self.retries.failures)

    def refresh_status(self) -> None:
        """Bring the status up to date with Spark's newest progress report."""
        self.beat()
        if self.query is not None and not self.ended:
            self.live.refresh(self.query, self.pipeline)

    def batch_done(self, done: BatchReport) -> None:
        """Take note of a batch that is in the tables."""
        self.retries.batch_done()
        self._lost_since = None
        self.live.batch_done(done)

    def fail(self, error: RecourseError) -> None:
        """Record a failure: the stream is over, or, after a transient error, `poll` tries again."""
        error, delay = self.retries.failed(error, self.clock.monotonic())
        if delay is None:
            self._over(error)
            return
        self.status.state, self.status.next_try = "failing", self.clock.time() + delay
        self.status.set_error({**report_of(error), "lasting": self.retries.lasting})
        log.warning("stream failed, will try again", stream=self.stream.name, error=str(error), seconds=delay)

    def give_up(self) -> None:
        """End the stream as failed: the session ends, since none of its other streams runs."""
        self.retries.none_planned()
        self.status.next_try = None
        self.status.state = "failed"
        found = (self.status.error or {}).get("found")
        stream_history.note_session_event(self.settings, self.status, "failed", found or "")
        log.error("stream failed", stream=self.stream.name, error=found)

    def abandon(self, error: RecourseError) -> None:
        """End the stream because the session fails; makes no further call to the JVM."""
        self.query = None
        if not self._settled(_SETTLE):
            log.warning("a savepoint is still being taken", stream=self.stream.name)
        self._over(error)

    def _settled(self, seconds: float) -> bool:
        """Wait at most so long for a savepoint that is being taken, so that no other driver finds one half taken."""
        if self.pipeline is None:
            return True
        self.pipeline.files.ledger.flush()
        return self.pipeline.hooks.settled(seconds)

    def _start(self, spark: SparkSession) -> None:
        snapshot = self.preflight()
        assert self.trigger is not None
        hooks = QueryHooks(self.trigger, self.stop.requested, self._built, self.batch_done, self.lease)
        launched = self.queries.launch(spark, self.stream, snapshot, hooks)
        assert self.pipeline is not None
        self.query = launched.query
        self.retries.started(self.clock.monotonic())
        code = self.pipeline.code
        if self.live.position is None:
            self.live.position = launched.starts
        self.status.generation = launched.generation
        self.status.code_version = str(code)
        declaration.note(self.stream, self.settings)
        self.status.error = self.status.next_try = None
        self.status.state = "running" if self.live.has_run else "starting"
        again, before = self.status.restarts > 0, self.status.last_error or {}
        reason = str(before.get("found", "")) if again else ""
        stream_history.note_session_event(self.settings, self.status, "restarted" if again else "started", reason)
        log.info("stream started", stream=self.stream.name, generation=launched.generation, code=code.hash)

    def _built(self, pipeline: BatchPipeline) -> None:
        self.pipeline = pipeline

    def _query_ended(self) -> None:
        assert self.query is not None and self.pipeline is not None
        query, pipeline, self.query = self.query, self.pipeline, None
        self.live.take_progress(query, pipeline)
        failure: BaseException | None = pipeline.failure or query.exception()
        requested = self.stop.requested.is_set()
        # A stop interrupts the batch, which can look like any failure; a permanent error is never hidden.
        stopped = requested and not isinstance(failure, PermanentError)
        if pipeline.replanned and not requested:
            self.retries.again_at(self.clock.monotonic())
        elif failure is None or pipeline.stopped_at_border or stopped:
            self._stopped()
        else:
            where, rebuild = named(pipeline.unfinished), self.stream.rebuild_step()
            self.fail(self._explained(classify(failure, where, rebuild)))

    def _explained(self, error: RecourseError) -> RecourseError:
        """The error; for lost records the error of preflight, which names the exact range.

        If preflight finds all records, the batch was planned by a broker that had just started, and may pass.
        """
        if not isinstance(error, OffsetsLost):
            return error
        try:
            self.preflight()
        except (PermanentError, TransientError) as better:
            return better
        now = self.clock.monotonic()
        if self._lost_since is None:
            self._lost_since = now
        if now - self._lost_since >= UNKNOWN_FOR:
            return error
        return TransientError(f"{error.found}; a look at the topics right after it finds all records", error.next_step)

    def _stopped(self) -> None:
        self.status.state, self.status.next_try = "stopped", None
        stream_history.note_session_event(self.settings, self.status, "stopped")
        log.info("stream stopped", stream=self.stream.name, batch=self.status.batch)

    def _over(self, error: RecourseError) -> None:
        self.status.next_try = None
        self.status.set_error(report_of(error))
        self.status.state = "failed"
        stream_history.note_session_event(self.settings, self.status, "failed", str(report_of(error)["found"]))
        # A refusal by Recourse needs no traceback; any other error does.
        refused = error.__cause__ is None
        log.error("stream failed", stream=self.stream.name, error=str(error), exc_info=None if refused else error)
