"""One stream inside a session: preflight, start, watch, stop, and start again after a passing fault."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from streaming_jobs.durations import parse_duration
from streaming_jobs.errors import OffsetsLost, PermanentError, RecourseError, TransientError
from streaming_jobs.failures import classify, named, report_of
from streaming_jobs.positions import TopicOffsets
from streaming_jobs.preflight.rules import check_start, enforce
from streaming_jobs.preflight.snapshot import StreamSnapshot, start_over
from streaming_jobs.preflight.take_snapshot import folders, take_snapshot
from streaming_jobs.preflight.torn_files import mend
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchReport, Replan
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.lag import EndOffsets, LagClock, position_in
from streaming_jobs.runtime.query_builder import Connection, QueryBuilder
from streaming_jobs.runtime.retries import Retries
from streaming_jobs.settings import Settings, StreamSettings
from streaming_jobs.spelling import counted
from streaming_jobs.state.lease import Lease
from streaming_jobs.state.status import Status, late_rows, moment, update
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.state.totals import Totals
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = structlog.get_logger()

_IDLE_BEFORE_STOP = 1.0
_TOPIC_CHECK_EVERY = 1.0
LINGERING = 300.0
"""Seconds that a batch may run on after its query was ended, before the session ends itself and its JVM."""


@dataclass
class StreamRunner:
    """A stream of this session. All methods are called from the session's main thread.

    After `left`, the session has released its lease, and its files are no longer this session's.
    """

    stream: Stream
    settings: Settings
    connection: Connection | None
    lease: Lease
    trigger: str | None
    status: Status
    own: StreamSettings = field(init=False)
    stop_requested: threading.Event = field(default_factory=threading.Event)
    ends: EndOffsets | None = None
    replan: Replan | None = None
    query: StreamingQuery | None = None
    pipeline: BatchPipeline | None = None
    left: bool = False
    _position: TopicOffsets | None = None
    _lag: LagClock = field(init=False)
    _stop_since: float = 0.0
    _not_in_batch_since: float = 0.0
    _ending_since: float | None = None
    retries: Retries = field(init=False)
    _restart_at: float | None = None
    _topics_checked: float = 0.0
    _seen_batch: int = -1
    _has_run: bool = False
    """True if a batch was done in this session; the status knows of batches before it too."""
    _newest_record: int | None = None
    _warned: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.own = self.settings.for_stream(self.stream.name)
        self.retries = Retries(self.own.max_restarts)
        loaded_code(self.stream, self.settings.flows)  # before its file can change
        self.status.trigger, self.status.batch_every_s = self._trigger, self._interval()
        self._lag = LagClock(self.status.read_up_to)

    @property
    def ended(self) -> bool:
        """True if the stream is over in this session."""
        return self.status.state in ("stopped", "failed")

    @property
    def gave_up(self) -> bool:
        """True if the quick tries are used up and the next one is minutes away."""
        return self._restart_at is not None and self.retries.lasting

    @property
    def reach(self) -> Connection:
        """The connection, which is there from preflight on."""
        assert self.connection is not None
        return self.connection

    def preflight(self) -> StreamSnapshot:
        """Look at checkpoint, tables and topics; raises PreflightRefused or OffsetsLost."""
        mend(self.settings, self.stream)
        snapshot = take_snapshot(self.settings, self.stream, self.reach.topics)
        self.status.warnings = enforce(check_start(snapshot))
        for warning in self.status.warnings:
            log.warning(warning, stream=self.stream.name)
        self._position = position_in(snapshot)
        return snapshot

    def start(self, spark: SparkSession) -> None:
        """Start the query, or record why not; a passing fault is tried again later by `poll`."""
        self._restart_at = None
        self.status.begun_at = time.time()
        try:
            self._start(spark)
        except Exception as error:  # noqa: BLE001 - every failure becomes one of ours, and is shown
            self.fail(classify(error))

    def poll(self, spark: SparkSession) -> None:
        """Look after the query: its end, its restart, its stop."""
        if self.ended:
            return
        if self.query is None:
            if self.stop_requested.is_set():
                self._stopped()
            elif self._restart_at is not None and time.monotonic() >= self._restart_at:
                self.status.restarts += 1
                self.start(spark)
            return
        if not self.query.isActive:
            if self._is_out(self.query):
                self._query_ended()
            return
        if self.stop_requested.is_set():
            self._press_stop()
            return
        self.retries.still_running(time.monotonic())

    @property
    def in_batch(self) -> bool:
        """True if a batch is being written, be it that of a query which Spark calls terminated."""
        return self.pipeline is not None and self.pipeline.in_batch

    @property
    def stuck(self) -> bool:
        """True if a batch has outlived the end of its query for too long: only the end of this process ends it."""
        return self._ending_since is not None and time.monotonic() - self._ending_since > LINGERING

    def request_stop(self) -> None:
        """Ask for a stop at the next batch border."""
        if not self.stop_requested.is_set() and not self.ended:
            self.stop_requested.set()
            self._stop_since = time.monotonic()
            self.status.state = "stopping"
            log.info("stop requested", stream=self.stream.name)

    def leave_stopped(self) -> None:
        """A stop was asked for before the start: nothing is started."""
        self.stop_requested.set()
        self._stopped()

    def beat(self) -> None:
        """A sign of life, with the lag of now: it changes while a batch runs, and before the first one."""
        status = self.status
        status.heartbeat = time.time()
        status.not_ahead(status.heartbeat)
        status.failures = self.retries.failures
        if self.query is None:
            status.input_rows_per_s = status.processed_rows_per_s = None
        ends = self.ends.newest(t.name for t in self.stream.sources.values()) if self.ends is not None else None
        if ends is None or self._position is None:
            return
        lag = self._lag.measure(self._position, ends)
        status.lag_at, status.lag_records, status.lag_s = lag.at, lag.records, lag.seconds
        status.lag_partitions = {t: {str(p): n for p, n in each.items()} for t, each in lag.partitions.items()}
        status.read_up_to = lag.read_up_to

    def refresh_status(self) -> None:
        """Bring the status up to date with Spark's newest progress report."""
        self.beat()
        if self.query is None or self.ended:
            return
        reported = self._take_progress(self.query)
        if self.status.state in ("running", "idle", "starting"):
            recent = time.time() - (self.status.committed_at or 0) < max(5.0, 3 * self._interval())
            if recent or (self.pipeline is not None and self.pipeline.in_batch):
                self.status.state = "running"
            elif reported or self._has_run:
                self.status.state = "idle"

    def _take_progress(self, query: StreamingQuery) -> bool:
        """Every report since the last look: the newest for the figures, all of them for what is summed up.

        Whether there was any report; a stream without new records makes its first after ten seconds.
        """
        newest = query.lastProgress
        if newest is None:
            return False
        fresh = [newest] if newest.batchId <= self._seen_batch + 1 else query.recentProgress
        for report in fresh:
            # A report of an idle moment carries the number of the batch that is still to come.
            if report.batchId > self._seen_batch and "addBatch" in report.durationMs:
                self._seen_batch = report.batchId
                self.status.late_rows_dropped += late_rows(json.loads(report.json))
        update(self.status, json.loads(newest.json))
        self._take_warnings()
        return True

    def _take_warnings(self) -> None:
        """Warn of a watermark ahead of the records' own timestamps, of rows dropped behind it, of upkeep put off."""
        status, name = self.status, self.stream.name
        at = moment(status.watermark) if status.watermark else None
        status.watermark_ahead_s = max(at - self._newest_record / 1e6, 0.0) if at and self._newest_record else 0.0
        said: dict[str, str] = {}
        if status.watermark_ahead_s:
            said["ahead"] = (
                f"the watermark, {status.watermark}, lies {status.watermark_ahead_s:,.0f} s after the newest record's "
                "own timestamp, so records on time are late: event times lie in the future (see max_ahead of the topic)"
            )
        if status.late_rows:
            said["late"] = (
                f"behind the watermark, in batches that dropped such rows: {counted(status.late_rows, 'record')} since "
                "this session began; a longer lateness keeps them"
            )
        for kind, text in said.items():
            if kind not in self._warned:
                log.warning(text, stream=name)
        if self.pipeline is not None:
            for upkeep in self.pipeline.upkeep:
                said |= {f"{upkeep.sink.name}: {what}": text for what, text in upkeep.put_off.items()}
        status.warnings = [w for w in status.warnings if w not in self._warned.values()] + list(said.values())
        self._warned = said

    def _start(self, spark: SparkSession) -> None:
        snapshot = self.preflight()
        assembly = QueryBuilder(
            stream=self.stream,
            settings=self.settings,
            connection=self.reach,
            trigger=self._trigger,
            stop=self.stop_requested,
            before_commit=self._check_topics,
            report=self._report,
            replan=self.replan,
        )
        ready = assembly.assemble(spark, snapshot)
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", self.stream.name)
        self.pipeline = ready.pipeline
        self.query = ready.start()
        self.retries.started(time.monotonic())
        code = ready.pipeline.code
        if self._position is None:
            self._position = ready.record.starts
        self.status.generation = ready.record.generation
        self.status.code_version = f"{code.hash} ({code.package})"
        self.status.error = self.status.next_try = None
        self.status.state = "running" if self._has_run else "starting"
        log.info("stream started", stream=self.stream.name, generation=ready.record.generation, code=code.hash)

    def _check_topics(self, record: StreamRecord) -> None:
        """Before a commit, at most once a second: the topics are still the ones the stream began with."""
        if time.monotonic() - self._topics_checked < _TOPIC_CHECK_EVERY:
            return
        for topic in record.topics:
            try:
                info = self.reach.quick.describe(topic.name)
            except TransientError:  # the broker is away; the records were read while it was there
                log.info("topic could not be checked: no broker", topic=topic.name)
                return
            if info is None or info.id != topic.topic_id:
                raise OffsetsLost(
                    f"topic {topic.name} was deleted{'' if info is None else ' and made anew'} while stream "
                    f"{self.stream.name} was reading it",
                    start_over(self.stream.name, folders(self.settings, self.stream)),
                )
        self._topics_checked = time.monotonic()

    def _report(self, done: BatchReport) -> None:
        self.retries.batch_done()
        self._has_run = True
        status = self.status
        status.batch, status.batch_ms, status.batch_records = done.batch, done.milliseconds, done.records
        status.path, status.committer = done.path, done.committer
        status.committed_at = time.time()
        self._position = {r.topic: r.end for r in done.entry.offsets}
        status.totals = (status.totals or Totals(status.started_at)).plus(done.entry)
        self._newest_record = done.newest_record if done.newest_record is not None else self._newest_record
        if not done.skipped:
            if done.records:
                status.processed_rows_per_s = round(done.records * 1000 / max(done.milliseconds, 1), 1)
            status.rows_written += done.rows
            status.dead_letters += done.dead_letters
            status.late_rows += done.late
        if done.entry.note:
            status.warnings = [*status.warnings, done.entry.note][-10:]
        log.info(
            "batch",
            stream=self.stream.name,
            batch=done.batch,
            records=done.records,
            rows=done.rows,
            dead_letters=done.dead_letters,
            ms=done.milliseconds,
            path=done.path,
            committer=done.committer,
        )

    def _press_stop(self) -> None:
        """A busy stream ends itself at the border. An idle one gets no batch, so it is stopped from here."""
        assert self.query is not None and self.pipeline is not None
        now = time.monotonic()
        if self.pipeline.in_batch:
            self._not_in_batch_since = 0.0
        elif not self._not_in_batch_since:
            self._not_in_batch_since = now
        idle = self._not_in_batch_since and now - self._not_in_batch_since > max(_IDLE_BEFORE_STOP, self._interval())
        if idle or now - self._stop_since > self.own.stop_deadline.total_seconds():
            self._ending(now)
            try:
                self.query.stop()
            except Exception as error:  # noqa: BLE001 - it waits stopTimeout at most; the next poll asks again
                log.warning("the query has not stopped yet", stream=self.stream.name, reason=str(error)[:200])

    def _is_out(self, query: StreamingQuery) -> bool:
        """True if nothing of a query that is not active is at work any more.

        Spark calls a query terminated as soon as a stop is asked for (MicroBatchExecution.stop), and waits for its
        thread afterwards, `stopTimeout` at most. A batch that it interrupts goes on in Python to the end of its commit.
        """
        if self.in_batch or not _thread_ended(query):
            self._ending(time.monotonic())
            return False
        self._ending_since = None
        return True

    def _ending(self, now: float) -> None:
        if self._ending_since is None:
            self._ending_since = now
            if self.in_batch:
                log.info("the stream is held until its batch is over", stream=self.stream.name, at_most=LINGERING)

    def _query_ended(self) -> None:
        assert self.query is not None and self.pipeline is not None
        query, pipeline, self.query = self.query, self.pipeline, None
        self._take_progress(query)
        failure: BaseException | None = pipeline.failure or query.exception()
        # A stop interrupts what runs, and that can look like any failure; one that needs a person is never hidden.
        stopped = self.stop_requested.is_set() and not isinstance(failure, PermanentError)
        if pipeline.replanned and not self.stop_requested.is_set():
            self._restart_at = time.monotonic()
        elif failure is None or pipeline.stopped_at_border or stopped:
            self._stopped()
        else:
            self.fail(self._explained(classify(failure, where=named(pipeline.unfinished))))

    def _explained(self, error: RecourseError) -> RecourseError:
        """For records that are gone: the exact range, from the same rules as at start."""
        if isinstance(error, OffsetsLost):
            try:
                self.preflight()
            except (PermanentError, TransientError) as better:
                return better
        return error

    def _stopped(self) -> None:
        self.status.state, self.status.next_try = "stopped", None
        log.info("stream stopped", stream=self.stream.name, batch=self.status.batch)

    def fail(self, error: RecourseError) -> None:
        """Record a failure: the stream is over, or, for one that may pass, tried again by `poll`."""
        error, delay = self.retries.failed(error)
        if delay is None:
            self._over(error)
            return
        self._restart_at = time.monotonic() + delay
        self.status.state, self.status.next_try = "failing", time.time() + delay
        self.status.set_error({**report_of(error), "lasting": self.retries.lasting})
        log.warning("stream failed, will try again", stream=self.stream.name, error=str(error), seconds=delay)

    def give_up(self) -> None:
        """The session ends, since no other stream of it runs: this one is over as it is."""
        self._restart_at = self.status.next_try = None
        self.status.state = "failed"
        log.error("stream failed", stream=self.stream.name, error=(self.status.error or {}).get("found"))

    def _over(self, error: RecourseError) -> None:
        self.status.next_try = None
        self.status.set_error(report_of(error))
        self.status.state = "failed"
        # A refusal in our own words needs no traceback; anything else does.
        refused = error.__cause__ is None
        log.error("stream failed", stream=self.stream.name, error=str(error), exc_info=None if refused else error)

    @property
    def _trigger(self) -> str:
        return self.trigger or self.own.trigger

    def abandon(self, error: RecourseError) -> None:
        """The session itself is ending by an error: the stream is over, and nothing more is asked of the JVM."""
        self.query = None
        self._over(error)

    def _interval(self) -> float:
        trigger = self._trigger
        every = parse_duration(trigger.removeprefix("every ")) if trigger.startswith("every ") else None
        upsert = self.stream.primary.mode == "upsert"
        return (every or self.own.commit_interval(upsert=upsert)).total_seconds()


def _thread_ended(query: StreamingQuery) -> bool:
    """True if Spark's thread for the query has ended; its failure is asked for by `exception`."""
    from pyspark.errors import StreamingQueryException

    try:
        return bool(query.awaitTermination(0.001))  # type: ignore[arg-type]  # seconds, not zero; a float is taken
    except StreamingQueryException:  # this is how it tells that it ended with a failure
        return True
