"""A Dagster run is a session: the run worker starts the driver, watches it, reports, and ends it in every case.

The causes that end a session, and the run's status then:

    Stop in the UI, or the run was set to canceling        driver stops at a batch border    CANCELED
    the driver ends on its own, exit code 0                                                  SUCCESS
    it has lasted dagster.max_session (continuous job)     driver stops at a batch border    SUCCESS
    the same, of a scheduled job without a time limit      driver stops at a batch border    FAILURE
    no heartbeat for stale_after + its patience            driver is killed                  FAILURE
    exit code 75 (lease busy), 78 (permanent), any other                                     FAILURE
    the code server above this worker is gone              driver stops at a batch border    FAILURE
    kill -9 of this worker                                 driver reads end of file, stops   FAILURE (by Dagster)

A session outlives trouble with Dagster's own storage: a figure that could not be reported is only logged.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import dagster as dg
import structlog

from orchestration.bundle.job import Continuous, Job, Schedule
from orchestration.sessions import run_logs
from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.driver import Driver
from orchestration.sessions.events import not_being_made, report_without_run
from orchestration.sessions.executor import AnyContext, end_stopped, last_word
from orchestration.sessions.looking_back import recent, unread
from orchestration.sessions.ownership import claim, parent_lives
from orchestration.sessions.reasons import of_log, of_streams, one_line
from orchestration.sessions.reporting import Reporter
from orchestration.sessions.tags import FAILURE_TAG, FINGERPRINT_TAG, HEARTBEAT_TAG, SESSION_TAG, STOPPED_BY_TAG
from streaming_jobs.errors import LeaseBusy, PermanentError, UsageError
from streaming_jobs.runtime.session_options import session_command
from streaming_jobs.settings import Settings
from streaming_jobs.state.health import ENDED
from streaming_jobs.state.status import Status, read_status, write_status
from streaming_jobs.stream import Stream
from streaming_jobs.text.durations import format_duration

log = structlog.get_logger()

PARENT_VARIABLE = "RECOURSE_PARENT"
"""Environment: pid and start time of `recourse up`; a session does not outlive it."""

POLL = 1.0
LOOK_AT_RUN_EVERY = 5.0
GRACE = 15.0
"""Seconds beyond the streams' own stop deadline before what is left of a driver is killed."""
TAIL = 6000
REPORT_EVERY = 30.0
"""Seconds between two reports of a worker in Dagster's storage."""
FIRST_HEARTBEAT_WITHIN = 600.0
"""Seconds from a driver's start to its first status: a loaded machine needs long to import Spark."""

Command = Callable[[Sequence[str]], list[str]]
Context = dg.AssetExecutionContext


@dataclass(frozen=True)
class SessionSpec:
    """The session of one job: its streams in one driver. `command` builds the driver's command line."""

    job: Job
    streams: tuple[Stream, ...]
    settings: Settings
    command: Command = session_command

    @property
    def log(self) -> BoundedLog:
        """The driver's log, one file per job."""
        return BoundedLog(self.settings.logs / f"session-{self.job.key}.log")

    @property
    def patience(self) -> float:
        """Seconds that a driver has to stop before it is killed."""
        deadlines = [self.settings.for_stream(s.name).stop_deadline for s in self.streams]
        return max(d.total_seconds() for d in deadlines) + GRACE


class Gone(Exception):
    """The process above this worker is gone, or the driver works no more; the text says which."""


class _LongEnough(Exception):
    """The session has reached dagster.max_session, which keeps a run's log bounded and brings new code into use."""


@dataclass
class _Watch:
    """Watches one run's driver, status files, state in Dagster's storage, and parent processes."""

    context: Context
    session: SessionSpec
    driver: Driver
    reporter: Reporter
    parent: int
    begun: float = field(default_factory=time.monotonic)
    looked_at: float = 0.0
    last_trouble: str = ""
    reported_at: float = float("-inf")
    beat: float | None = None
    beat_seen_at: float = field(default_factory=time.monotonic)

    def until_end(self) -> int:
        """Wait for the driver's end and return its exit code; raises when something else ends the session."""
        while (code := self.driver.exit_code()) is None:
            check_parents(self.parent)
            self._check_age()
            self._check_heartbeat()
            with self._trouble_is_logged():
                self.reporter.report(self.statuses())
                self.session.log.trim(_mark(self.context, self.session))
            if time.monotonic() - self.looked_at >= LOOK_AT_RUN_EVERY:
                self.looked_at = time.monotonic()
                self._check_own_run()
                self._report_to_storage()
            time.sleep(POLL)
        return code

    def statuses(self) -> dict[str, Status | None]:
        """The status files that this run's driver wrote."""
        statuses = {s.name: read_status(self.session.settings, s.name) for s in self.session.streams}
        return {name: s if s and s.run_id == self.context.run.run_id else None for name, s in statuses.items()}

    @contextmanager
    def _trouble_is_logged(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  (a full disk or a locked database must not end a stream)
            if (text := repr(error)) != self.last_trouble:
                self.last_trouble = text
                log.warning("report to Dagster failed, session continues", run=self.context.run.run_id, error=text)

    def _check_own_run(self) -> None:
        """Stop also if only the run's status in storage asks for it: a new code server cannot reach older workers."""
        with self._trouble_is_logged():
            check_own_run(self.context)

    def _report_to_storage(self) -> None:
        """Where other code locations share the instance, its watchdog may be on another host than this worker."""
        if self.session.settings.dagster.own_instance or time.monotonic() - self.reported_at < REPORT_EVERY:
            return
        self.reported_at = time.monotonic()
        with self._trouble_is_logged():
            self.context.instance.add_run_tags(self.context.run.run_id, {HEARTBEAT_TAG: f"{time.time():.0f}"})

    def _check_age(self) -> None:
        trigger, longest = self.session.job.trigger, self.session.settings.dagster.max_session
        if time.monotonic() - self.begun <= longest.total_seconds():
            return
        if isinstance(trigger, Continuous):
            raise _LongEnough
        if isinstance(trigger, Schedule) and not self.session.job.timeout_seconds:
            raise Gone(f"it has lasted {format_duration(longest)} (dagster.max_session), and its job has no time limit")

    def _check_heartbeat(self) -> None:
        """Raise Gone if the driver hangs: its heartbeat has not changed for long, by the clock that cannot be set."""
        found = [status for status in self.statuses().values() if status is not None]
        at_work = [status.heartbeat for status in found if status.state not in ENDED]
        newest, now = max(at_work, default=None), time.monotonic()
        if newest != self.beat or (found and not at_work):  # it may wait for the end of a recovery, without a stream
            self.beat, self.beat_seen_at = newest, now
        stale_after = self.session.settings.dagster.stale_after.total_seconds()
        limit = FIRST_HEARTBEAT_WITHIN if newest is None else stale_after + self.session.patience
        if now - self.beat_seen_at <= limit or not _writable(self.session.settings):
            return
        raise Gone(f"the driver hangs: process {self.driver.pid} has written no heartbeat for {limit:.0f} s")


def run_session(context: Context, session: SessionSpec, values: Mapping[str, object]) -> None:
    """Run one session to its end; raises Failure for a driver that failed, and the interrupt for a stop."""
    job, settings = session.job, session.settings
    claim(context.instance, context.run.run_id, settings, job.kind, **{SESSION_TAG: job.key})
    chosen = job.arguments({name: _text(name, value) for name, value in values.items()})
    arguments = [*chosen, "--supervised"]
    if by_itself(context.run.tags):
        arguments.append("--respect-stop")
    elif (record := context.instance.get_run_record_by_id(context.run.run_id)) is not None:
        # A stop that was requested after the launch counts. Dagster's time is in whole seconds, rounded down.
        arguments += ["--asked-at", f"{record.create_timestamp.timestamp() + 1:.3f}"]
    session.log.write(_mark(context, session))
    driver = Driver(session.command(arguments), {"RECOURSE_RUN_ID": context.run.run_id}, session.log)
    tell = partial(report_without_run, context.instance)
    reporter = Reporter(
        session.streams,
        settings.dagster,
        tell,
        context.log.error,
        unread=partial(unread, settings),
        recent=partial(recent, settings),
    )
    watch = _Watch(context, session, driver, reporter, os.getppid())
    gone: str | None = None
    code: int | None = None
    interrupt: BaseException | None = None
    try:
        pid = driver.start()
        context.log.info("driver %d runs %s; its log: %s", pid, ", ".join(job.streams), session.log.path)
        with watch._trouble_is_logged():
            not_being_made(context.instance, context.selected_asset_keys)
        code = watch.until_end()
    except Gone as error:
        gone = str(error)
    except (dg.DagsterExecutionInterruptedError, KeyboardInterrupt) as error:
        interrupt = error
    except _LongEnough:
        context.log.info("the session has lasted %s; keepalive starts the next one", settings.dagster.max_session)
    finally:
        # BaseException too: Dagster's interrupt is one. A second Stop must not cut the first one short.
        with uninterrupted():
            ended = driver.end(session.patience)
            with watch._trouble_is_logged():
                reporter.finish(watch.statuses())
                if interrupt is not None:
                    _say_who_ended_it(context, settings, watch.statuses())
                words = session.log.tail_from(_mark(context, session), TAIL)
                context.log.info("driver ended with exit code %s; its last words:\n%s", ended, words)
    if interrupt is not None:
        _stopped(context, session, interrupt, ended)
        return
    if gone is not None:
        again = " and keepalive starts it again" if isinstance(job.trigger, Continuous) else ""
        words = f"{gone}; the session was ended{again}"
        raise _failure(context, session, [words], code)
    if code:
        _fail(context, session, code, watch.statuses(), chosen)


def _writable(settings: Settings) -> bool:
    """False if a driver cannot write its status, because the disk is full: then the lack of one says nothing."""
    try:
        with tempfile.TemporaryFile(dir=settings.state) as file:
            file.write(bytes(65_536))
        return True
    except OSError:
        return False


def _say_who_ended_it(context: Context, settings: Settings, statuses: Mapping[str, Status | None]) -> None:
    """Note that a person asked for the end, in the status of each stream; `recourse up` going down is nobody's wish."""
    run = context.instance.get_run_by_id(context.run.run_id)
    asked = run is not None and run.status in (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED)
    if not asked or run is None or STOPPED_BY_TAG in run.tags:
        return
    for status in statuses.values():
        if status is not None and status.state == "stopped":
            status.ended_by = f"Terminate of run {run.run_id[:8]}"
            write_status(settings, status)


def _text(name: str, value: object) -> str:
    """A parameter as the session takes it: a number, true, false or text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, (str, int, float)):
        raise dg.Failure(f"parameter {name}: {value!r} is not a single value; write a number or a text")
    return str(value)


def _stopped(context: Context, session: SessionSpec, interrupt: BaseException, ended: int | None) -> None:
    """A stop on request ends the run with one line; any other interrupt is raised again for Dagster."""
    if ended == 0:
        words = "stopped on request: each stream ended at a batch border"
    else:
        words = f"stopped on request: the driver did not stop in {session.patience:.0f} s (exit code {ended})"
    end_stopped(context, interrupt, words)


def _fail(
    context: Context,
    session: SessionSpec,
    code: int,
    statuses: Mapping[str, Status | None],
    arguments: Sequence[str],
) -> None:
    log_text = session.log.tail_from(_mark(context, session), TAIL)
    reasons = of_streams(statuses.values()) or list(filter(None, [of_log(log_text)]))
    by_hand = list(arguments) != session.job.arguments()
    if code == LeaseBusy.exit_code:
        words = "another driver holds a stream of this session"
        context.instance.add_run_tags(context.run.run_id, {FAILURE_TAG: "lease_busy"})
    elif code in (PermanentError.exit_code, UsageError.exit_code):
        from orchestration.sessions.fingerprint import fingerprint

        words = "it fails again with these parameters" if by_hand else "it fails again until a person acts"
        mark = fingerprint(session.job, session.streams, session.settings, arguments)
        context.instance.add_run_tags(context.run.run_id, {FAILURE_TAG: "permanent", FINGERPRINT_TAG: mark})
    elif code == -signal.SIGKILL:
        words = "the driver was killed (-9, perhaps out of memory)"
    elif code < 0:
        words = f"the driver was ended by signal {-code}"
    else:
        words = f"the driver ended with exit code {code}"
    raise _failure(context, session, [*reasons, words], code)


def _failure(context: Context, session: SessionSpec, reasons: Sequence[str], code: int | None) -> dg.Failure:
    """The step's failure with all that is known. The run's failure is one line, the reason first."""
    if word := last_word(context.run.run_id):
        word.failed = one_line("; ".join(text.partition("\n  next: ")[0] for text in reasons))
    return dg.Failure("\n".join(reasons), _metadata(context, session, code), allow_retries=False)


def _mark(context: Context, session: SessionSpec) -> str:
    """The first line of a run's part of the log."""
    return run_logs.mark(context.run.run_id, session.job.key)


def _metadata(context: Context, session: SessionSpec, code: int | None) -> dict[str, dg.MetadataValue]:
    tail = session.log.tail_from(_mark(context, session), TAIL).replace("```", "'''")
    metadata: dict[str, dg.MetadataValue] = {
        "driver_log": dg.MetadataValue.path(str(session.log.path)),
        "log_tail": dg.MetadataValue.md(f"```\n{tail}\n```"),
    }
    if code is not None:
        metadata["exit_code"] = dg.MetadataValue.int(code)
    return metadata


def check_own_run(context: AnyContext) -> None:
    """Raise the interrupt if the run was stopped, or declared dead, in Dagster's storage alone."""
    run = context.instance.get_run_by_id(context.run.run_id)
    status = run.status if run else None
    ended = (dg.DagsterRunStatus.CANCELING, dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.FAILURE)
    if status in ended:
        raise dg.DagsterExecutionInterruptedError(f"the run is {status.value}")


def check_parents(parent: int) -> None:
    """Raise Gone if the code server, which was our parent when the run began, or `recourse up` is gone."""
    if os.getppid() != parent:
        raise Gone("the code server that this run belonged to is gone")
    if not parent_lives(os.environ.get(PARENT_VARIABLE, "")):
        raise Gone("recourse up, which this run belonged to, is gone")


def by_itself(tags: Mapping[str, str]) -> bool:
    """True if a sensor or a schedule launched the run, not a person; then streams stopped on purpose stay stopped."""
    return "dagster/sensor_name" in tags or "dagster/schedule_name" in tags


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM within the block, so that an orderly end is not cut short by another request."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
