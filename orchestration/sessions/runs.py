"""The runs of this code location in Dagster's storage: reading them, explaining a queued one, failing a lost one.

A run is ours by its tags (`ownership.py`), never by the name of its job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import dagster as dg
import structlog
from dagster._core.storage.dagster_run import RunRecord

from orchestration.bundle.job import Continuous, Job
from orchestration.sessions.decisions import IN_PROGRESS, RunSeen
from orchestration.sessions.names import named
from orchestration.sessions.ownership import (
    KIND_TAG,
    LOCATION_TAG,
    SESSION_KINDS,
    SESSION_TAG,
    WAITS_FOR_TAG,
    WORKER_TAG,
    is_running,
    location_id,
)
from orchestration.sessions.supervisor import SessionSpec
from streaming_jobs.settings import Settings

log = structlog.get_logger()

ASSET_JOB = "__ASSET_JOB"
"""The job that Dagster uses when assets are launched without naming one."""
BEGUN = [dg.DagsterRunStatus[status] for status in IN_PROGRESS if status != "QUEUED"]
UNFINISHED = [dg.DagsterRunStatus[status] for status in IN_PROGRESS]
ENDED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
NEWEST = 12
"""Number of a job's newest runs that keepalive reads."""


def session_runs(instance: dg.DagsterInstance, session: SessionSpec) -> list[RunSeen]:
    """The newest runs of a session, newest first, also those launched from a table's page without a job."""
    in_progress = _in_progress(instance, [session])[session.job.key]
    return _newest_first([*in_progress, *_ended(instance, session)])


def job_runs(instance: dg.DagsterInstance, settings: Settings, job: Job) -> list[RunSeen]:
    """The unfinished runs of a job without a session, newest first."""
    ours = dg.RunsFilter(
        job_name=named(settings.dagster, job.key), tags={LOCATION_TAG: location_id(settings)}, statuses=UNFINISHED
    )
    return _newest_first(instance.get_run_records(ours))


def runs_by_session(instance: dg.DagsterInstance, sessions: Sequence[SessionSpec]) -> dict[str, list[RunSeen]]:
    """The runs of each session by its job, newest first; ended runs only if no run is in progress.

    One query reads all runs in progress: the sensors that need every session would otherwise query once per job.
    """
    in_progress = _in_progress(instance, sessions)
    runs = {}
    for session in sessions:
        found = in_progress[session.job.key]
        begun = any(record.dagster_run.status in BEGUN for record in found)
        runs[session.job.key] = _newest_first(found if begun else [*found, *_ended(instance, session)])
    return runs


def _in_progress(instance: dg.DagsterInstance, sessions: Sequence[SessionSpec]) -> dict[str, list[RunRecord]]:
    found: dict[str, list[RunRecord]] = {session.job.key: [] for session in sessions}
    if not sessions:
        return found
    ours = {LOCATION_TAG: location_id(sessions[0].settings)}
    for record in instance.get_run_records(dg.RunsFilter(tags=ours, statuses=UNFINISHED)):
        if (key := record.dagster_run.tags.get(SESSION_TAG)) in found:
            found[key].append(record)
    # Before it has begun, only its tables show that a run launched from a table's page is a session.
    for record in instance.get_run_records(dg.RunsFilter(job_name=ASSET_JOB, statuses=UNFINISHED)):
        selected = set(record.dagster_run.asset_selection or ())
        for session in sessions if LOCATION_TAG not in record.dagster_run.tags else ():
            if selected & session.tables:
                found[session.job.key].append(record)
    return found


def _ended(instance: dg.DagsterInstance, session: SessionSpec) -> Sequence[RunRecord]:
    """The newest runs that have ended; if all of these were cancelled, also the newest that were not."""
    ours = {LOCATION_TAG: location_id(session.settings), SESSION_TAG: session.job.key}
    records = list(instance.get_run_records(dg.RunsFilter(tags=ours, statuses=ENDED), limit=NEWEST))
    if records and all(record.dagster_run.status is dg.DagsterRunStatus.CANCELED for record in records):
        lasted = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]
        records += instance.get_run_records(dg.RunsFilter(tags=ours, statuses=lasted), limit=NEWEST)
    return records


def _newest_first(records: Iterable[RunRecord]) -> list[RunSeen]:
    runs = [
        RunSeen(
            run_id=r.dagster_run.run_id,
            status=r.dagster_run.status.value,
            created=r.create_timestamp.timestamp(),
            started=r.start_time,
            ended=r.end_time,
            updated=r.update_timestamp.timestamp(),
            tags=r.dagster_run.tags,
        )
        for r in {r.dagster_run.run_id: r for r in records}.values()
    ]
    return sorted(runs, key=lambda run: run.created, reverse=True)


def end_lost(instance: dg.DagsterInstance, settings: Settings) -> list[str]:
    """End runs other than sessions whose process is gone: a lost run of suites would block all later ones."""
    ended = []
    for run in instance.get_runs(dg.RunsFilter(tags={LOCATION_TAG: location_id(settings)}, statuses=BEGUN)):
        worker = run.tags.get(WORKER_TAG)
        if run.tags.get(KIND_TAG) not in SESSION_KINDS and worker is not None and is_running(worker) is False:
            ended += declare_dead(instance, run.run_id, f"its process {worker} is gone")
    return ended


def declare_dead(instance: dg.DagsterInstance, run_id: str, reason: str) -> list[str]:
    """End a run of which nothing lives: canceled if that was asked for, else failed; what was ended, in words."""
    run = instance.get_run_by_id(run_id)
    if run is None or run.is_finished:
        return []
    log.error("run declared dead", run=run_id, found=reason)
    canceling = run.status is dg.DagsterRunStatus.CANCELING
    report = instance.report_run_canceled if canceling else instance.report_run_failed
    report(run, f"Recourse's watchdog: {reason}")
    return [f"{run_id[:8]}: {reason}"]


def _still_queued(instance: dg.DagsterInstance, runs: Iterable[RunSeen]) -> Iterator[dg.DagsterRun]:
    for seen in runs:
        run = instance.get_run_by_id(seen.run_id) if seen.status == "QUEUED" else None
        if run is not None and run.status is dg.DagsterRunStatus.QUEUED:
            yield run


def end_doubled(instance: dg.DagsterInstance, session: SessionSpec, runs: Sequence[RunSeen]) -> list[str]:
    """Cancel queued runs that were launched from a table's page while the session runs: they would wait for ever.

    A launch of the job itself stays in the queue: it follows the session that a person then stops.
    """
    first = next((run for run in runs if run.status == "STARTED"), None)
    if first is None or not isinstance(session.job.trigger, Continuous):
        return []
    ended = []
    for run in _still_queued(instance, runs):
        if run.job_name != ASSET_JOB:
            continue
        words = (
            f"run {first.run_id[:8]} is the session of {', '.join(session.job.streams)}, and does not end: "
            "this run would wait for ever. To start the session anew, terminate that run"
        )
        instance.report_run_canceled(run, words)
        ended.append(f"{run.run_id[:8]}: {words}")
    return ended


def tell_queued(instance: dg.DagsterInstance, session: SessionSpec, runs: Sequence[RunSeen]) -> None:
    """Write once into the log of each queued run which run it waits for."""
    first = next((run for run in runs if run.status in IN_PROGRESS and run.status != "QUEUED"), None)
    if first is None:
        return
    for run in _still_queued(instance, [run for run in runs if run.tags.get(WAITS_FOR_TAG) != first.run_id]):
        instance.add_run_tags(run.run_id, {WAITS_FOR_TAG: first.run_id})
        instance.report_engine_event(
            f"waits in the queue: run {first.run_id[:8]} is the session of {', '.join(session.job.streams)}, and only "
            "one session runs at a time; this run begins when that one ends",
            run,
        )
