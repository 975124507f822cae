"""Keepalive, watchdog and alerts: sensors that collect facts, let `decisions` decide, and act on the decision.

All of them only read small files and Dagster's storage; none starts Spark or connects to Kafka.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

import dagster as dg
import structlog

from orchestration.bundle.last_good import Fault
from orchestration.sessions.decisions import (
    IN_PROGRESS,
    JobSeen,
    RunSeen,
    SessionSeen,
    Start,
    StreamSeen,
    alert_of,
    gave_up,
    keepalive,
    newest_session,
    presumed_dead,
)
from orchestration.sessions.fingerprint import fingerprint
from orchestration.sessions.ownership import is_running
from orchestration.sessions.reporting import table_key
from orchestration.sessions.retention import Owned, delete_events, delete_runs
from orchestration.sessions.runs import end_doubled, end_lost, runs_by_session, session_runs, tell_queued
from orchestration.sessions.supervisor import SessionSpec
from orchestration.sessions.tags import FINGERPRINT_TAG, HEARTBEAT_TAG, WORKER_TAG
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.settings import Settings
from streaming_jobs.state import start_request, stop_request, supervisors
from streaming_jobs.state.health import Limits, judge, look, recovery_words
from streaming_jobs.state.lease import Owner, holder
from streaming_jobs.state.status import Status, read_status
from streaming_jobs.stream import Stream

log = structlog.get_logger()

RETENTION_TAKES = 20.0
"""Seconds that one tick of retention may take: the code server has a minute for it. The next tick goes on."""
_FAILURE = "dagster._core.definitions.events.Failure: "
"""The prefix that Dagster puts before the text of a failed step."""


def keepalive_sensor(session: SessionSpec, *, running: bool) -> dg.SensorDefinition:
    """The desired state of a continuous job: a session runs, unless it was stopped on purpose or gave up."""
    job = session.job

    @dg.sensor(
        name=f"keepalive_{job.key}",
        job_name=job.key,
        minimum_interval_seconds=10,
        default_status=_default(running),
        description=f"Starts the session of {job.key} when none runs; waits longer after each failure in a row, "
        "leaves a stopped one stopped, and gives up on a failure that needs a person. Off: nothing is started.",
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        runs = session_runs(context.instance, session)
        stopped = frozenset(n for n in job.streams if stop_request.asked(session.settings, n))
        held = {} if runs and runs[0].status in IN_PROGRESS else _holders(session)
        seen = JobSeen(
            runs=runs,
            streams=job.streams,
            stopped_on_purpose=stopped,
            held_by={name: who for name, who in held.items() if name not in stopped},
            fingerprint=_fingerprint(session, runs),
            recovering=_recovering(session),
            asked_to_start=_asked_to_start(session, stopped),
        )
        verdict = keepalive(seen, time.time())
        starts, words = not getattr(verdict, "for_good", False), getattr(verdict, "reason", "starts a session")
        supervisors.note(session.settings, job.key, job.streams, words, starts=starts)
        if isinstance(verdict, Start):
            return dg.RunRequest(run_key=verdict.run_key)
        return dg.SkipReason(verdict.words)

    return tick


def watchdog_sensor(sessions: Sequence[SessionSpec], settings: Settings) -> dg.SensorDefinition:
    """Ends runs that Dagster shows in progress although no process of theirs is left (dagster issue #4319)."""

    @dg.sensor(
        name="watchdog",
        minimum_interval_seconds=15,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Fails a session's run when its worker is gone, no driver holds its streams and no heartbeat "
        "comes. Writes into a queued run's log which run it waits for.",
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        ended, start_timeout = [], context.instance.run_monitoring_start_timeout_seconds
        by_session = runs_by_session(context.instance, sessions)
        for session in sessions:
            runs = by_session[session.job.key]
            ended += end_doubled(context.instance, session, runs)
            tell_queued(context.instance, session, runs)
            for run in runs:
                if run.status in IN_PROGRESS and (reason := _presumed_dead(session, run, start_timeout)):
                    _end(context.instance, run, reason)
                    ended.append(f"{run.run_id[:8]}: {reason}")
        ended += end_lost(context.instance, settings)
        return dg.SkipReason("; ".join(ended) or "every run in progress has a worker or a driver")

    return tick


def run_failure_alert(sessions: Sequence[SessionSpec]) -> dg.SensorDefinition:
    """Reports in the log, and on the tables' pages, that a session's run failed."""
    by_job = {session.job.key: session for session in sessions}

    @dg.run_failure_sensor(
        name="session_failure",
        minimum_interval_seconds=15,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Reports a session that failed: an error in the log, and an observation `alert` of its tables.",
    )
    def tick(context: dg.RunFailureSensorContext) -> None:
        run = context.dagster_run
        session = by_job.get(run.job_name) or _session_of(run, sessions)
        if session is None:
            return
        steps = context.get_step_failure_events()
        message = next((e.step_failure_data.error_display_string for e in steps), context.failure_event.message or "")
        text = message.strip().split("\n\nStack Trace")[0].removeprefix(_FAILURE)[:2000]
        log.error("session failed", job=session.job.key, run=run.run_id, found=text)
        for stream in session.streams:
            for table in stream.sinks.values():
                context.instance.report_runless_asset_event(_alert(table.name, text, run.run_id))

    return tick


def stream_alert(streams: Sequence[Stream], settings: Settings) -> dg.SensorDefinition:
    """Reports once that a stream failed while its session continues, or that its driver has gone silent."""

    @dg.sensor(
        name="stream_failure",
        minimum_interval_seconds=15,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Reports a stream that failed or fell silent while its session continues.",
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        reported: dict[str, str] = json.loads(context.cursor or "{}")
        alerts = {s.name: alert_of(_stream(settings, s.name)) for s in streams}
        events: list[dg.AssetObservation] = []
        for stream in streams:
            alert = alerts[stream.name]
            if alert is None or reported.get(stream.name) == alert.key:
                continue
            log.error("stream alert", stream=stream.name, found=alert.text)
            events += [_alert(table.name, alert.text, None) for table in stream.sinks.values()]
        current = {name: alert.key for name, alert in alerts.items() if alert}
        return dg.SensorResult(
            asset_events=events,
            cursor=json.dumps(current, sort_keys=True),
            skip_reason=None if events else dg.SkipReason("nothing new"),
        )

    return tick


def job_yaml_sensor(fault: Callable[[], Fault | None]) -> dg.SensorDefinition:
    """Fails its ticks while the job YAML on disk cannot be used, so that the use of the last good one shows red."""

    @dg.sensor(
        name="job_yaml",
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Reads databricks.yml and what it includes; fails with file and line where it cannot be used. Jobs "
        "and sensors are then those of the last version that could be used.",
    )
    def tick(_: dg.SensorEvaluationContext) -> dg.SkipReason:
        if (problem := fault()) is not None:
            raise ConfigurationError(problem.found, problem.next_step)
        return dg.SkipReason("the job YAML can be used; changes in it take effect when the code location is reloaded")

    return tick


def retention_sensor(sessions: Sequence[SessionSpec], settings: Settings, owned: Owned) -> dg.SensorDefinition:
    """Deletes runs of this location that ended long ago, and in its own instance old events without a run.

    The run by which a job is judged stays, and the newest events.
    """

    @dg.sensor(
        name="retention",
        minimum_interval_seconds=600,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Deletes finished runs of this code location that are older than the setting dagster.keep_runs; in "
        "an instance of its own (dagster.own_instance) also figures, verdicts and alerts of its tables.",
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        instance, deadline = context.instance, time.monotonic() + RETENTION_TAKES
        limit = datetime.now(UTC) - settings.dagster.keep_runs
        newest = (newest_session(session_runs(instance, session)) for session in sessions)
        runs = delete_runs(instance, settings, limit, {run.run_id for run in newest if run}, deadline)
        events = delete_events(instance, settings, owned, limit, deadline)
        rest = "; the time of a tick is over, the rest follows" if time.monotonic() > deadline else ""
        return dg.SkipReason(f"{runs} old runs deleted, and {events} old events without a run{rest}")

    return tick


def _presumed_dead(session: SessionSpec, run: RunSeen, start_timeout: float) -> str | None:
    settings = session.settings
    worker = run.tags.get(WORKER_TAG)
    statuses = {name: read_status(settings, name) for name in session.job.streams}
    held = any(_may_be_of(run, status, holder(settings, name)) for name, status in statuses.items())
    beats = [status.heartbeat for status in statuses.values() if status and status.run_id == run.run_id]
    reported = run.tags.get(HEARTBEAT_TAG)
    seen = SessionSeen(
        run,
        is_running(worker) if worker else None,
        held,
        max(beats, default=None),
        elsewhere=not settings.dagster.own_instance,
        reported=float(reported) if reported else None,
    )
    return presumed_dead(
        seen,
        time.time(),
        stale_after=settings.dagster.stale_after.total_seconds(),
        patience=session.patience,
        start_timeout=start_timeout,
    )


def _may_be_of(run: RunSeen, status: Status | None, owner: Owner | None) -> bool:
    """True if the holder of a stream may be the run's driver: not a recovery, and not the session of another run."""
    if owner is None or owner.purpose != "session":
        return False
    return status is None or status.pid != owner.pid or status.run_id == run.run_id


def _end(instance: dg.DagsterInstance, seen: RunSeen, reason: str) -> None:
    run = instance.get_run_by_id(seen.run_id)
    if run is None or run.is_finished:
        return
    log.error("run declared dead", run=seen.run_id, found=reason)
    if seen.status == "CANCELING":
        instance.report_run_canceled(run, f"Recourse's watchdog: {reason}")
    else:
        instance.report_run_failed(run, f"Recourse's watchdog: {reason}")


def _recovering(session: SessionSpec) -> dict[str, str]:
    """The streams that a recovery has stopped: its plan, since when, and whether a process works on it."""
    settings = session.settings
    names = [name for name in session.job.streams if stop_request.for_recovery(settings, name)]
    return {name: words for name in names if (words := recovery_words(look(settings, name)))}


def _holders(session: SessionSpec) -> dict[str, str]:
    owners = {name: holder(session.settings, name) for name in session.job.streams}
    return {name: f"process {owner.pid} ({owner.purpose})" for name, owner in owners.items() if owner}


def _asked_to_start(session: SessionSpec, stopped: frozenset[str]) -> float | None:
    """The time of the newest start request of the session's streams that are not stopped."""
    requests = [start_request.request(session.settings, n) for n in session.job.streams if n not in stopped]
    return max((request.since for request in requests if request is not None), default=None)


def _fingerprint(session: SessionSpec, runs: Sequence[RunSeen]) -> str:
    """The present fingerprint, from the settings as they are now; empty where the newest run did not give up."""
    newest = newest_session(runs)
    then = newest.tags.get(FINGERPRINT_TAG, "") if newest else ""
    if newest is None or not gave_up(newest, then):
        return ""
    try:
        return fingerprint(session.job, session.streams, Settings.load(), session.job.arguments())
    except ConfigurationError:  # the next session would refuse it as well
        return then


def _stream(settings: Settings, name: str) -> StreamSeen:
    seen = look(settings, name)
    silent = (r.text for r in judge(seen, Limits.of(settings, name)).reasons if r.word == "silent")
    status = seen.status or Status(name)
    return StreamSeen(name, status.state, status.started_at, next(silent, ""), status.error)


def _session_of(run: dg.DagsterRun, sessions: Iterable[SessionSpec]) -> SessionSpec | None:
    selected = set(run.asset_selection or ())
    return next((s for s in sessions if selected & {table_key(x.primary.name) for x in s.streams}), None)


def _alert(table: str, text: str, run_id: str | None) -> dg.AssetObservation:
    metadata: dict[str, dg.MetadataValue] = {"alert": dg.MetadataValue.text(text)}
    if run_id:
        metadata["run"] = dg.MetadataValue.dagster_run(run_id)
    return dg.AssetObservation(asset_key=table_key(table), metadata=metadata)


def _default(running: bool) -> dg.DefaultSensorStatus:
    return dg.DefaultSensorStatus.RUNNING if running else dg.DefaultSensorStatus.STOPPED
