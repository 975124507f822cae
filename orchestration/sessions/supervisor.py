"""A Dagster run is a session: the run worker starts the driver, watches it, reports, and ends it in every case.

The causes that end a session, and the run's status then (`child_run.py` has those of every run with a child):

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

import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import dagster as dg

from orchestration.bundle.job import Continuous, Job, Timed
from orchestration.sessions.bounded_log import BoundedLog
from orchestration.sessions.child_run import ChildRun, Ending, Gone
from orchestration.sessions.configuration import FOUND, Configuration
from orchestration.sessions.names import table_key
from orchestration.sessions.ownership import (
    FAILURE_TAG,
    FINGERPRINT_TAG,
    HEARTBEAT_TAG,
    SESSION_TAG,
    STOPPED_BY_TAG,
    claim,
)
from orchestration.sessions.reporting import (
    Reporter,
    failure_text,
    not_being_made,
    recent_events,
    unread_of,
)
from streaming_jobs.errors import LeaseBusy, PermanentError, RecourseError, UsageError
from streaming_jobs.platform.processes.child import ChildCommand, ChildProcess
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.runtime.session_options import session_command
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.status import ENDED, Status, read_status, write_status
from streaming_jobs.state.stream_folder import local_folder
from streaming_jobs.stream import Stream
from streaming_jobs.text.durations import format_duration

GRACE = 15.0
"""Seconds beyond the streams' own stop deadline before what is left of a driver is killed."""
REPORT_EVERY = 30.0
"""Seconds between two reports of a worker in Dagster's storage."""
FIRST_HEARTBEAT_WITHIN = 600.0
"""Seconds from a driver's start to its first status: a loaded machine needs long to import Spark."""
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)(?::.*)?")

Command = Callable[[Sequence[str]], list[str]]
Context = dg.AssetExecutionContext


@dataclass(frozen=True)
class SessionSpec:
    """The session of one job: its streams in one driver. `command` builds the driver's command line.

    `origin` is where the settings are from; the driver loads the same.
    """

    job: Job
    streams: tuple[Stream, ...]
    settings: Settings
    command: Command = session_command
    origin: Configuration = FOUND

    @property
    def tables(self) -> set[dg.AssetKey]:
        """The assets of the tables that its streams write."""
        return {table_key(self.settings.dagster, x.name) for stream in self.streams for x in stream.sinks.values()}

    @property
    def log(self) -> BoundedLog:
        return BoundedLog(self.settings.logs / f"session-{self.job.key}.log")

    @property
    def patience(self) -> float:
        """Seconds that a driver has to stop before it is killed."""
        deadlines = [self.settings.for_stream(s.name).stop_deadline for s in self.streams]
        return max(d.total_seconds() for d in deadlines) + GRACE


class _LongEnough(Exception):
    """The session has reached dagster.max_session, which keeps a run's log bounded and brings new code into use."""


@dataclass
class _SessionWatch:
    """Watches status files and age of one run's session, and reports."""

    session: SessionSpec
    run: ChildRun
    reporter: Reporter
    begun: float = field(default_factory=time.monotonic)
    check_deadline: Callable[[], None] = lambda: None
    reported_at: float = float("-inf")
    beat: float | None = None
    beat_seen_at: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Look once; raises Gone if the driver hangs, and _LongEnough."""
        self.check_deadline()
        self._check_age()
        self._check_heartbeat()
        with self.run.trouble_is_logged():
            self.reporter.report(self.statuses())
            self._report_to_storage()

    def statuses(self) -> dict[str, Status | None]:
        """The status files that this run's driver wrote."""
        statuses = {s.name: read_status(self.session.settings, s.name) for s in self.session.streams}
        return {name: s if s and s.run_id == self.run.context.run.run_id else None for name, s in statuses.items()}

    def _report_to_storage(self) -> None:
        """Where other code locations share the instance, its watchdog may be on another host than this worker."""
        if self.session.settings.dagster.own_instance or time.monotonic() - self.reported_at < REPORT_EVERY:
            return
        self.reported_at = time.monotonic()
        context = self.run.context
        context.instance.add_run_tags(context.run.run_id, {HEARTBEAT_TAG: f"{time.time():.0f}"})

    def _check_age(self) -> None:
        trigger, longest = self.session.job.trigger, self.session.settings.dagster.max_session
        if time.monotonic() - self.begun <= longest.total_seconds():
            return
        if isinstance(trigger, Continuous):
            raise _LongEnough
        if isinstance(trigger, Timed) and not self.session.job.timeout_seconds:
            raise Gone(f"it has lasted {format_duration(longest)} (dagster.max_session), and its job has no time limit")

    def _check_heartbeat(self) -> None:
        """Raise Gone if the driver hangs: its heartbeat has not changed for long, by the clock that cannot be set."""
        statuses = [status for status in self.statuses().values() if status is not None]
        at_work = [status.heartbeat for status in statuses if status.state not in ENDED]
        newest, now = max(at_work, default=None), time.monotonic()
        if newest != self.beat or (statuses and not at_work):  # it may wait for the end of a recovery, without a stream
            self.beat, self.beat_seen_at = newest, now
        stale_after = self.session.settings.dagster.stale_after.total_seconds()
        limit = FIRST_HEARTBEAT_WITHIN if newest is None else stale_after + self.session.patience
        if now - self.beat_seen_at <= limit or not _writable(self.session.settings):
            return
        pid = self.run.child.pid if self.run.child else None
        raise Gone(f"the driver hangs: process {pid} has written no heartbeat for {limit:.0f} s")


def run_session(context: Context, session: SessionSpec, values: Mapping[str, object]) -> None:
    """Run one session to its end; raises Failure for a driver that failed, and the interrupt for a stop."""
    job, settings, run_id = session.job, session.settings, context.run.run_id
    claim(context.instance, run_id, settings, job.kind, **session_tags(job))
    parameters = job.arguments({name: _text(name, value) for name, value in values.items()})
    arguments = [*parameters, "--supervised"]
    if by_itself(context.run.tags):
        arguments.append("--respect-stop")
    elif (record := context.instance.get_run_record_by_id(run_id)) is not None:
        # A stop that was requested after the launch counts. Dagster's time is in whole seconds, rounded down.
        arguments += ["--asked-at", f"{record.create_timestamp.timestamp() + 1:.3f}"]
    run = ChildRun(context, session.log, mark(run_id, job.key), session.patience)
    reporter = Reporter(
        session.streams,
        settings.dagster,
        context.instance.report_runless_asset_event,
        context.log.error,
        unread=partial(unread_of, settings),
        recent=partial(recent_events, settings),
    )
    task = job.session
    limit = task.timeout_seconds if task is not None else 0
    watch = _SessionWatch(session, run, reporter, check_deadline=run.deadline(limit))

    def start() -> ChildProcess:
        environment = {**os.environ, **session.origin.environment(), "RECOURSE_RUN_ID": run_id}
        with session.log.open() as output:
            command = ChildCommand(session.command(arguments), environment, stdin=subprocess.PIPE)
            driver = command.start(output)
        context.log.info("driver %d runs %s; its log: %s", driver.pid, ", ".join(job.streams), session.log.path)
        with run.trouble_is_logged():
            not_being_made(context.instance, context.selected_asset_keys)
        return driver

    def at_end(ending: Ending) -> None:
        with run.trouble_is_logged():
            reporter.finish(watch.statuses())
            if ending.interrupt is not None:
                _note_who_ended_it(context, settings, watch.statuses())
            context.log.info("driver ended with exit code %s; its last words:\n%s", ending.code, run.tail())

    try:
        ending = run.to_end(start, watch.look, at_end)
    except _LongEnough:
        context.log.info("the session has lasted %s; keepalive starts the next one", settings.dagster.max_session)
        return
    if ending.interrupt is not None:
        how = "each stream ended at a batch border"
        if ending.code != 0:
            how = f"the driver did not stop in {session.patience:.0f} s (exit code {ending.code})"
        run.stopped(ending.interrupt, f"stopped on request: {how}")
    elif ending.gone:
        again = " and keepalive starts it again" if isinstance(job.trigger, Continuous) else ""
        retry = task is not None and not ending.orphaned and (task.retry_on_timeout or not ending.timed_out)
        raise _failure(run, [f"{ending.gone}; the session was ended{again}"], None, retry=retry)
    elif ending.code:
        failed = [failure_text(status) for status in watch.statuses().values() if status and status.state == "failed"]
        reasons = failed or list(filter(None, [reason_in(run.tail())]))
        text, final = _classify(context, session, ending, parameters)
        raise _failure(run, [*reasons, text], ending.code, retry=not final)


def session_tags(job: Job) -> dict[str, str]:
    """The tags of a session's run, also of one launched from a table's page: its job, and its time limit.

    The limit of the instance is meant for runs that end: 0, no limit, replaces it for a continuous job.
    """
    limited = job.timeout_seconds or isinstance(job.trigger, Continuous)
    return {SESSION_TAG: job.key, **({dg.MAX_RUNTIME_SECONDS_TAG: str(job.timeout_seconds)} if limited else {})}


def mark(run_id: str, job: str) -> str:
    return f"--- run {run_id} of {job}"


def _writable(settings: Settings) -> bool:
    """False if a driver cannot write its status, because the disk is full: then the lack of one says nothing."""
    try:
        with tempfile.TemporaryFile(dir=local_folder(settings)) as file:
            file.write(bytes(65_536))
        return True
    except OSError:
        return False


def _note_who_ended_it(context: Context, settings: Settings, statuses: Mapping[str, Status | None]) -> None:
    """Record in each stream's status that a person requested the end; the end of `recourse up` is no such request."""
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


def _classify(context: Context, session: SessionSpec, ending: Ending, parameters: Sequence[str]) -> tuple[str, bool]:
    """Tag a run whose driver failed with what keepalive has to know; the same in words, and whether it is for good."""
    if ending.code == LeaseBusy.exit_code:
        tags, text = {FAILURE_TAG: "lease_busy"}, "another driver holds a stream of this session"
    elif ending.code in (PermanentError.exit_code, UsageError.exit_code):
        cause = fingerprint(session.job, session.streams, session.settings, parameters)
        tags = {FAILURE_TAG: "permanent", FINGERPRINT_TAG: cause}
        by_hand = list(parameters) != session.job.arguments()
        text = "it fails again with these parameters" if by_hand else "it fails again until a person acts"
    else:
        return ending.in_words("the driver"), False
    context.instance.add_run_tags(context.run.run_id, tags)
    return text, ending.code != LeaseBusy.exit_code


def _failure(run: ChildRun, reasons: Sequence[str], code: int | None, *, retry: bool) -> dg.Failure:
    """The step's failure with all that is known. The run's failure is one line, the reason first.

    `retry`: the task's retries, if it has any, may be used.
    """
    run.ends_with(reasons)
    exit_code = {} if code is None else {"exit_code": dg.MetadataValue.int(code)}
    return dg.Failure("\n".join(reasons), {**run.log_metadata("driver_log"), **exit_code}, allow_retries=retry)


def reason_in(log: str) -> str:
    """The driver's own reason in its log: its line `session failed`, or its last exception; empty if there is none."""
    for line in reversed(log.split("\n")):
        fields = {key: _unquoted(value) for key, value in _FIELD.findall(line)}
        if fields.get("event") == "session failed":
            reason = f"{fields.get('code', '')} {fields.get('found', '')}".strip()
            return f"{reason}\n  next: {fields['next']}" if fields.get("next") else reason
        if _EXCEPTION.fullmatch(line):
            return line
    return ""


def _unquoted(value: str) -> str:
    if not value.startswith('"'):
        return value
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], value[1:-1])


def by_itself(tags: Mapping[str, str]) -> bool:
    """True if a sensor or a schedule launched the run, not a person; then streams stopped on purpose stay stopped."""
    return "dagster/sensor_name" in tags or "dagster/schedule_name" in tags


def fingerprint(job: Job, streams: Sequence[Stream], settings: Settings, arguments: Sequence[str]) -> str:
    """All that a permanent failure depends on (job, parameters, settings, code, accepted commits) as 16 hex digits.

    Secrets are not included, so a new password needs a manual launch.

    `arguments` belong to the failed session: if it had other parameters, the defaults may still work.
    """
    parts: list[str] = [repr(job), json.dumps(list(arguments)), settings.model_dump_json()]
    for stream in streams:
        code = code_version(stream, settings.flows)
        parts.append(f"{stream.name} {code.hash} {code.package} {_decisions(settings, stream)}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _decisions(settings: Settings, stream: Stream) -> str:
    """The stream's generation, and the foreign commits that a person has accepted (`streams accept`)."""
    try:
        record = stream_record.load(settings, stream.name)
    except RecourseError as error:  # a damaged record is a part of what failed
        return error.found
    if record is None:
        return ""
    return json.dumps([record.generation, [asdict(a) for a in record.accepted]])
