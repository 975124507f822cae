"""The status of a running stream: figures of its batches, of Spark's progress reports and of its topics' ends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from streaming_jobs.ledger.positions import TopicOffsets, ends_of
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchReport
from streaming_jobs.runtime.lag import Ends, LagClock
from streaming_jobs.runtime.stream_queries import RunningQuery
from streaming_jobs.state.checkpoint import state_skew
from streaming_jobs.state.status import Status, Totals, broken_rules, late_rows, moment, update
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted

log = structlog.get_logger()

_RECENT = 5.0
_SKEW_EVERY = 60.0
"""Seconds between two readings of the state's snapshots."""


class ProcessClock(Protocol):
    """The two clocks of a process; the module `time` is one."""

    def time(self) -> float:
        """Seconds since 1970, which may be set back."""

    def monotonic(self) -> float:
        """Seconds that only grow."""


@dataclass
class LiveStatus:
    """Keeps one stream's status up to date; the stream continues from `position`."""

    status: Status
    clock: ProcessClock
    position: TopicOffsets | None = None
    has_run: bool = False
    """True if a batch was done in this session; the status covers earlier batches too."""
    _lag: LagClock = field(init=False)
    _seen_batch: int = field(default=-1, init=False)
    _newest_record: int | None = field(default=None, init=False)
    _read_in_plan: dict[int, float] = field(default_factory=dict, init=False)
    """By batch that Spark has not reported yet: seconds that are reading and decoding, not planning."""
    _warned: dict[str, str] = field(default_factory=dict, init=False)
    _skew_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._lag = LagClock(self.status.read_up_to)

    def beat(self, ends: Ends | None, failures: int) -> None:
        """Renew the heartbeat and the lag, which changes during a batch and before the first one too."""
        status = self.status
        status.heartbeat = self.clock.time()
        status.not_ahead(status.heartbeat)
        status.failures = failures
        if ends is None or self.position is None:
            return
        lag = self._lag.measure(self.position, ends)
        status.lag_at, status.lag_records, status.lag_s = lag.at, lag.records, lag.seconds
        status.lag_partitions = {t: {str(p): n for p, n in each.items()} for t, each in lag.partitions.items()}
        status.read_up_to = lag.read_up_to
        status.blocked = {t: {str(p): at for p, at in each.items()} for t, each in ends.blocked(self.position).items()}

    def refresh(self, query: RunningQuery, pipeline: BatchPipeline | None) -> None:
        """Take over Spark's newest progress, and note if the stream is idle."""
        reported = self.take_progress(query, pipeline)
        if pipeline is not None and self.status.state_operators and self.clock.monotonic() >= self._skew_at:
            self._skew_at = self.clock.monotonic() + _SKEW_EVERY
            self.status.state_skew = state_skew(pipeline.files.checkpoint)
        if self.status.state in ("running", "idle", "starting"):
            patience = max(_RECENT, 3 * self.status.batch_every_s)
            recent = self.clock.time() - (self.status.committed_at or 0) < patience
            if recent or (pipeline is not None and pipeline.in_batch):
                self.status.state = "running"
            elif reported or self.has_run:
                self.status.state = "idle"

    def take_progress(self, query: RunningQuery, pipeline: BatchPipeline | None) -> bool:
        """Take over the reports since the last look: figures from the newest, sums from all of them.

        False if there was no report yet; a stream without new records makes its first after ten seconds.
        """
        reports = query.reports(self._seen_batch)
        if not reports:
            return False
        for report in reports:
            batch, took = report["batchId"], report["durationMs"]
            # A report of an idle moment carries the number of the next batch.
            if batch > self._seen_batch and "addBatch" in took:
                self.status.late_rows_dropped += late_rows(report)
                around = (took.get("triggerExecution", 0) - took["addBatch"]) / 1000
                self._took("plan", max(around - self._read_in_plan.get(batch, 0.0), 0.0))
                self._seen_batch = batch
        self._read_in_plan = {batch: s for batch, s in self._read_in_plan.items() if batch > self._seen_batch}
        update(self.status, reports[-1])
        self._take_warnings(pipeline)
        return True

    def batch_done(self, done: BatchReport) -> None:
        """Take over a batch. One that was skipped, since an earlier session had committed it, brings no rows now.

        The totals have each batch once: a skipped one may be missing from them, if a kill kept it out of the ledger.
        """
        self.has_run = True
        status, entry = self.status, done.entry
        status.batch, status.batch_ms, status.batch_records = entry.batch, done.milliseconds, entry.records
        status.path, status.committer = done.path, done.committer
        status.committed_at = self.clock.time()
        self.position = ends_of(entry.offsets)
        status.totals = (status.totals or Totals(status.started_at)).plus(entry, status.committed_at)
        self._newest_record = done.newest_record if done.newest_record is not None else self._newest_record
        if not done.skipped:
            status.batches += 1
            self._read_in_plan[entry.batch] = done.read_in_plan_s
            for phase, seconds in done.phase_s.items():
                self._took(phase, seconds)
            for table, age in status.tables.items():
                if entry.rows.get("written" if table == entry.table else table):
                    status.tables[table] = replace(age, rows_at=status.committed_at)
            if entry.records:
                status.processed_rows_per_s = round(entry.records * 1000 / max(done.milliseconds, 1), 1)
            status.rows_written += entry.rows_written
            status.dead_letters += entry.dead_letters
            status.late_rows += entry.late_rows
            status.quarantined += entry.quarantined
            status.dropped += entry.dropped
            for rule, rows in broken_rules(entry).items():
                status.broken[rule] = status.broken.get(rule, 0) + rows
        if entry.note:
            status.warnings = [*status.warnings, entry.note][-10:]
        log.info(
            "batch",
            stream=status.stream,
            batch=entry.batch,
            records=entry.records,
            rows=entry.rows_written,
            dead_letters=entry.dead_letters,
            quarantined=entry.quarantined,
            dropped=entry.dropped,
            ms=done.milliseconds,
            path=done.path,
            committer=done.committer,
        )

    def _took(self, phase: str, seconds: float) -> None:
        self.status.phase_s[phase] = round(self.status.phase_s[phase] + seconds, 6)

    def _take_warnings(self, pipeline: BatchPipeline | None) -> None:
        """Warn of a watermark ahead of the records' timestamps, of rows dropped behind it, and of postponed upkeep."""
        status = self.status
        at = moment(status.watermark) if status.watermark else None
        status.watermark_ahead_s = max(at - self._newest_record / 1e6, 0.0) if at and self._newest_record else 0.0
        warnings: dict[str, str] = {}
        if status.watermark_ahead_s:
            warnings["ahead"] = (
                f"the watermark, {status.watermark}, lies {status.watermark_ahead_s:,.0f} s after the newest record's "
                "own timestamp, so records on time are late: event times lie in the future (see max_ahead of the topic)"
            )
        if status.late_rows:
            kept = "a longer lateness keeps them"
            if pipeline is not None and pipeline.late:
                kept = f"they are kept: {commands.late_days(status.stream)}"
            warnings["late"] = (
                f"behind the watermark, in batches that dropped such rows: {counted(status.late_rows, 'record')} since "
                f"this session began; {kept}"
            )
        for kind, text in warnings.items():
            if kind not in self._warned:
                log.warning(text, stream=status.stream)
        for upkeep in pipeline.upkeep if pipeline is not None else ():
            warnings |= {f"{upkeep.name}: {what}": text for what, text in upkeep.put_off.items()}
        status.warnings = [w for w in status.warnings if w not in self._warned.values()] + list(warnings.values())
        self._warned = warnings
