"""The definitions of sessions: tables as assets, a job for each job of the bundle, the sensors that look after them.

Launching a job runs its session. The sensors collect facts, let `decisions` decide, and act on the decision; they only
read small files and Dagster's storage: none starts Spark or connects to Kafka.

(No postponed annotations here: Dagster looks at the type of a step's `context`.)
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import dagster as dg
import structlog
from dagster._check import CheckError
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from orchestration.bundle.job import Bundle, Continuous, CronSchedule, Job, Periodic, Timed
from orchestration.sessions.assets import VERSION, postgres_assets, table_assets, topic_assets, unassigned_assets
from orchestration.sessions.child_run import session_executor
from orchestration.sessions.configuration import FOUND, Configuration
from orchestration.sessions.decisions import (
    IN_PROGRESS,
    Alert,
    JobSeen,
    RunSeen,
    SessionSeen,
    StartSession,
    alert_of,
    gave_up,
    keepalive,
    newest_session,
    presumed_dead,
)
from orchestration.sessions.names import named, table_key
from orchestration.sessions.ownership import (
    FINGERPRINT_TAG,
    HEARTBEAT_TAG,
    TASKS_KIND,
    WORKER_TAG,
    is_running,
    job_tags,
)
from orchestration.sessions.retention import Owned, delete_events, delete_runs
from orchestration.sessions.runs import (
    declare_dead,
    end_doubled,
    end_lost,
    job_runs,
    runs_by_session,
    session_runs,
    tell_queued,
)
from orchestration.sessions.supervisor import Command, SessionSpec, fingerprint, run_session, session_tags
from orchestration.sessions.tasks import before, pool_of, retry_policy, task_assets
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.runtime.session_options import session_command
from streaming_jobs.settings import Settings
from streaming_jobs.state import supervisors
from streaming_jobs.state.health import HealthLimits, judge, look, recovery_words
from streaming_jobs.state.lease import Owner, holder
from streaming_jobs.state.requests import START, STOP
from streaming_jobs.state.status import Status, read_status
from streaming_jobs.stream import Stream

log = structlog.get_logger()

RETENTION_TAKES = 20.0
"""Seconds that one tick of retention may take: the code server has a minute for it. The next tick continues."""
_FAILURE = "dagster._core.definitions.events.Failure: "
"""The prefix that Dagster puts before the text of a failed step."""


def sessions(
    bundle: Bundle,
    topology: Topology,
    settings: Settings,
    command: Command = session_command,
    origin: Configuration = FOUND,
) -> list[SessionSpec]:
    """One session for each job with streams; raises ConfigurationError for an unknown one or one that two jobs run."""
    for error in bundle.stream_errors(topology.streams):
        raise error
    return [
        SessionSpec(job, tuple(topology[name] for name in job.streams), settings, command, origin)
        for job in bundle.jobs
        if job.session is not None
    ]


def definitions(
    specs: Sequence[SessionSpec],
    topology: Topology,
    settings: Settings,
    fault: Callable[[], ConfigurationError | None],
    others: Sequence[Job] = (),
    origin: Configuration = FOUND,
    executor: dg.ExecutorDefinition = session_executor,
) -> dg.Definitions:
    """All but the sensor of retention, which has to know what other areas define.

    `others` are the jobs without a session.
    """
    assets = {spec.job.key: session_assets(spec) for spec in specs}
    tasks = {job.key: task_assets(job, settings, (), _numbers(job.defaults), origin=origin) for job in others}
    for key, job in ((spec.job.key, spec.job) for spec in specs):
        tasks[key] = task_assets(job, settings, [*assets[key].keys], _numbers(job.defaults), origin=origin)
    make = partial(bundle_job, settings=settings, executor=executor)
    triggers = [(spec, spec.job.trigger) for spec in specs]
    running = settings.dagster.keepalive
    return dg.Definitions(
        assets=[
            *topic_assets(topology, settings),
            *postgres_assets(topology, settings),
            *assets.values(),
            *(asset for each in tasks.values() for asset in each),
            *unassigned_assets(topology, settings, specs),
        ],
        jobs=[
            *(make(spec.job, assets=[assets[spec.job.key], *tasks[spec.job.key]]) for spec in specs),
            *(make(job, assets=tasks[job.key]) for job in others),
        ],
        schedules=[
            *(session_schedule(spec, trigger) for spec, trigger in triggers if isinstance(trigger, Timed)),
            *(
                job_schedule(job, settings, job.trigger, partial(job_runs, settings=settings, job=job))
                for job in others
                if isinstance(job.trigger, Timed)
            ),
        ],
        sensors=[
            *(
                keepalive_sensor(spec, running=running and not trigger.paused)
                for spec, trigger in triggers
                if isinstance(trigger, Continuous)
            ),
            watchdog_sensor(specs, settings),
            run_failure_alert(specs, settings),
            stream_alert(list(topology.streams.values()), settings),
            job_yaml_sensor(fault, settings),
        ],
    )


def session_assets(session: SessionSpec) -> dg.AssetsDefinition:
    job = session.job
    task = job.session
    assert task is not None, "the job of a session has one"
    dagster = session.settings.dagster
    earlier = before(dagster, job, task, ())
    specs = [spec for stream in session.streams for spec in table_assets(stream, session.settings, job.key)]

    @dg.multi_asset(
        name=named(dagster, f"{job.key}_session"),
        specs=[spec.replace_attributes(deps=[*spec.deps, *earlier]) for spec in specs] if earlier else specs,
        can_subset=False,
        pool=pool_of(dagster, job),
        retry_policy=retry_policy(task),
        # Any: 5 and "5" are the same to the session, which says what it cannot use.
        config_schema={name: dg.Field(dg.Any, default_value=value) for name, value in _numbers(job.defaults).items()},
        description=f"Runs {', '.join(job.streams)} in one driver until it is stopped.",
    )
    def run(context: dg.AssetExecutionContext) -> Any:
        run_session(context, session, context.op_execution_context.op_config or {})
        yield from ()

    return run


def bundle_job(
    job: Job,
    settings: Settings,
    assets: Sequence[dg.AssetsDefinition],
    executor: dg.ExecutorDefinition = session_executor,
) -> UnresolvedAssetJobDefinition:
    """The Dagster job of a bundle's job; its parameters are the job's configuration."""
    tags = {**job.tags, **job_tags(settings, job.kind if job.session else TASKS_KIND)}
    if job.session:
        tags |= session_tags(job)
    elif job.timeout_seconds:
        tags[dg.MAX_RUNTIME_SECONDS_TAG] = str(job.timeout_seconds)
    config = {"ops": {asset.op.name: {"config": _numbers(job.defaults)} for asset in assets}}
    return dg.define_asset_job(
        named(settings.dagster, job.key),
        # A check would wait for the end of the stream, which never ends.
        selection=dg.AssetSelection.assets(*(key for asset in assets for key in asset.keys)).without_checks(),
        config=config if job.parameters else None,
        description=job.description or (f"Session of {', '.join(job.streams)}" if job.session else job.name),
        tags=tags,
        executor_def=executor,
        metadata={
            "name": job.name,
            **VERSION,
            "file": dg.MetadataValue.path(str(job.file)),
            **({"streams": ", ".join(job.streams)} if job.session else {}),
        },
    )


def session_schedule(session: SessionSpec, trigger: CronSchedule | Periodic) -> dg.ScheduleDefinition:
    """The schedule of a session's job."""
    return job_schedule(session.job, session.settings, trigger, partial(session_runs, session=session))


def job_schedule(
    job: Job,
    settings: Settings,
    trigger: CronSchedule | Periodic,
    runs: Callable[[dg.DagsterInstance], Sequence[RunSeen]],
) -> dg.ScheduleDefinition:
    """The schedule of a job; a tick while a run of the job is in progress is skipped, or queued if the job has a queue.

    Where cron cannot say the times, the schedule ticks more often and skips the rest.
    """

    @dg.schedule(
        name=named(settings.dagster, f"schedule_{job.key}"),
        job_name=named(settings.dagster, job.key),
        cron_schedule=trigger.cron,
        execution_timezone=trigger.timezone,
        default_status=dg.DefaultScheduleStatus["STOPPED" if trigger.paused else "RUNNING"],
        description=trigger.words,
    )
    def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        at = _tick_of(context)
        if at is not None and not trigger.runs_at(at):
            return dg.SkipReason(f"not now: {trigger.words}")
        for run in runs(context.instance):
            if run.status in IN_PROGRESS and (run.status == "QUEUED" or not job.queue):
                return dg.SkipReason(f"run {run.run_id[:8]} is {run.status.lower()}: a job has one run at a time")
        return dg.RunRequest()

    return tick


def _tick_of(context: dg.ScheduleEvaluationContext) -> datetime | None:
    """The tick's time; None for an evaluation that no tick asked for, which is always due."""
    with suppress(CheckError):
        return context.scheduled_execution_time
    return None


def _numbers(values: Mapping[str, str]) -> dict[str, int | float | str]:
    """Parameters as the launchpad shows them: what is a number as a number, the rest as text."""
    return {name: _number(value) for name, value in values.items()}


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            number = kind(text)
            if str(number) == text and text not in ("nan", "inf", "-inf"):
                return number
    return text


def keepalive_sensor(session: SessionSpec, *, running: bool) -> dg.SensorDefinition:
    """The desired state of a continuous job: a session runs, unless it was stopped on purpose or gave up."""
    job, dagster = session.job, session.settings.dagster

    @dg.sensor(
        name=named(dagster, f"keepalive_{job.key}"),
        job_name=named(dagster, job.key),
        minimum_interval_seconds=10,
        default_status=dg.DefaultSensorStatus["RUNNING" if running else "STOPPED"],
        description=f"Starts the session of {job.key} when none runs; waits longer after each failure in a row, "
        "leaves a stopped one stopped, and gives up on a failure that needs a person. Off: nothing is started.",
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        runs = session_runs(context.instance, session)
        stopped = frozenset(n for n in job.streams if STOP.asked(session.settings, n))
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
        decision = keepalive(seen, time.time())
        supervisors.note(session.settings, job.key, job.streams, decision.reason, starts=not decision.for_good)
        if isinstance(decision, StartSession):
            return dg.RunRequest(run_key=decision.run_key)
        return dg.SkipReason(decision.words)

    return tick


def watchdog_sensor(sessions: Sequence[SessionSpec], settings: Settings) -> dg.SensorDefinition:
    """Ends runs that Dagster shows in progress although no process of theirs is left (dagster issue #4319)."""

    @dg.sensor(
        name=named(settings.dagster, "watchdog"),
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
                    ended += declare_dead(context.instance, run.run_id, reason)
        ended += end_lost(context.instance, settings)
        return dg.SkipReason("; ".join(ended) or "every run in progress has a worker or a driver")

    return tick


def run_failure_alert(sessions: Sequence[SessionSpec], settings: Settings) -> dg.SensorDefinition:
    """Reports in the log, and on the tables' pages, that a session's run failed."""
    by_job = {named(settings.dagster, session.job.key): session for session in sessions}

    @dg.run_failure_sensor(
        name=named(settings.dagster, "session_failure"),
        minimum_interval_seconds=15,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Reports a session that failed: an error in the log, and an observation `alert` of its tables.",
    )
    def tick(context: dg.RunFailureSensorContext) -> dg.SkipReason | None:
        run = context.dagster_run
        session = by_job.get(run.job_name) or _session_of(run, sessions)
        if session is None:
            # Without a result, Dagster would write into the log of that run, which may be of others.
            return dg.SkipReason(f"run {run.run_id[:8]} is no session")
        steps = context.get_step_failure_events()
        message = next((e.step_failure_data.error_display_string for e in steps), context.failure_event.message or "")
        text = message.strip().split("\n\nStack Trace")[0].removeprefix(_FAILURE)[:2000]
        log.error("session failed", job=session.job.key, run=run.run_id, found=text)
        for stream in session.streams:
            for table in stream.sinks.values():
                context.instance.report_runless_asset_event(_alert(settings, table.name, text, run.run_id))
        return None

    return tick


def stream_alert(streams: Sequence[Stream], settings: Settings) -> dg.SensorDefinition:
    """Reports once that a stream failed while its session continues, or that its driver has gone silent."""

    @dg.sensor(
        name=named(settings.dagster, "stream_failure"),
        minimum_interval_seconds=15,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Reports a stream that failed or fell silent while its session continues.",
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        reported: dict[str, str] = json.loads(context.cursor or "{}")
        alerts = {s.name: _stream_alert(settings, s.name) for s in streams}
        events: list[dg.AssetObservation] = []
        for stream in streams:
            alert = alerts[stream.name]
            if alert is None or reported.get(stream.name) == alert.key:
                continue
            log.error("stream alert", stream=stream.name, found=alert.text)
            events += [_alert(settings, table.name, alert.text, None) for table in stream.sinks.values()]
        current = {name: alert.key for name, alert in alerts.items() if alert}
        return dg.SensorResult(
            asset_events=events,
            cursor=json.dumps(current, sort_keys=True),
            skip_reason=None if events else dg.SkipReason("nothing new"),
        )

    return tick


def job_yaml_sensor(fault: Callable[[], ConfigurationError | None], settings: Settings) -> dg.SensorDefinition:
    """Fails its ticks while the job YAML on disk cannot be used, so that the use of the last good one shows red."""

    @dg.sensor(
        name=named(settings.dagster, "job_yaml"),
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
        name=named(settings.dagster, "retention"),
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


def _recovering(session: SessionSpec) -> dict[str, str]:
    """The streams that a recovery has stopped: its plan, since when, and whether a process works on it."""
    settings = session.settings
    names = [name for name in session.job.streams if STOP.for_recovery(settings, name)]
    return {name: words for name in names if (words := recovery_words(look(settings, name)))}


def _holders(session: SessionSpec) -> dict[str, str]:
    owners = {name: holder(session.settings, name) for name in session.job.streams}
    return {name: f"process {owner.pid} ({owner.purpose})" for name, owner in owners.items() if owner}


def _asked_to_start(session: SessionSpec, stopped: frozenset[str]) -> float | None:
    """The time of the newest start request of the session's streams that are not stopped."""
    requests = [START.request(session.settings, n) for n in session.job.streams if n not in stopped]
    return max((request.since for request in requests if request is not None), default=None)


def _fingerprint(session: SessionSpec, runs: Sequence[RunSeen]) -> str:
    """The present fingerprint, from the settings as they are now; empty where the newest run did not give up."""
    newest = newest_session(runs)
    then = newest.tags.get(FINGERPRINT_TAG, "") if newest else ""
    if newest is None or not gave_up(newest, then):
        return ""
    try:
        return fingerprint(session.job, session.streams, session.origin.load().settings, session.job.arguments())
    except ConfigurationError:  # the next session would refuse it as well
        return then


def _stream_alert(settings: Settings, name: str) -> Alert | None:
    seen = look(settings, name)
    silent = (r.text for r in judge(seen, HealthLimits.of(settings, name)).reasons if r.word == "silent")
    return alert_of(seen.status or Status(name), next(silent, ""))


def _session_of(run: dg.DagsterRun, sessions: Iterable[SessionSpec]) -> SessionSpec | None:
    selected = set(run.asset_selection or ())
    return next((session for session in sessions if selected & session.tables), None)


def _alert(settings: Settings, table: str, text: str, run_id: str | None) -> dg.AssetObservation:
    metadata: dict[str, dg.MetadataValue] = {"alert": dg.MetadataValue.text(text)}
    if run_id:
        metadata["run"] = dg.MetadataValue.dagster_run(run_id)
    return dg.AssetObservation(asset_key=table_key(settings.dagster, table), metadata=metadata)
