"""The runs of a session in Dagster's storage: reading them, explaining a queued one, deleting one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import dagster as dg

from orchestration.sessions.decisions import IN_PROGRESS, RunSeen
from orchestration.sessions.reporting import table_key
from orchestration.sessions.supervisor import SessionSpec
from orchestration.sessions.tags import SESSION_TAG, WAITS_FOR_TAG

ASSET_JOB = "__ASSET_JOB"
"""The job that Dagster uses when assets are launched without naming one."""
BEGUN = [dg.DagsterRunStatus[status] for status in IN_PROGRESS if status != "QUEUED"]
UNFINISHED = [dg.DagsterRunStatus[status] for status in IN_PROGRESS]
NEWEST = 12
"""Number of a job's newest runs that keepalive reads."""


def session_runs(instance: dg.DagsterInstance, session: SessionSpec) -> list[RunSeen]:
    """The newest runs of a session, newest first, also those launched from an asset's page without a job."""
    records = list(instance.get_run_records(dg.RunsFilter(job_name=session.job.key), limit=NEWEST))
    # Runs that have begun are read too, however many duplicates were queued since.
    for statuses in (BEGUN, [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]):
        records += instance.get_run_records(dg.RunsFilter(job_name=session.job.key, statuses=statuses), limit=NEWEST)
    tables = {table_key(sink.name) for stream in session.streams for sink in stream.sinks.values()}
    others = list(instance.get_run_records(dg.RunsFilter(job_name=ASSET_JOB), limit=NEWEST))
    # Runs of checks have no job of their own either, and are many: they would push a session's run out of the newest.
    others += instance.get_run_records(dg.RunsFilter(job_name=ASSET_JOB, tags={SESSION_TAG: session.job.key}), NEWEST)
    others += instance.get_run_records(dg.RunsFilter(job_name=ASSET_JOB, statuses=UNFINISHED))
    records += [r for r in others if tables & set(r.dagster_run.asset_selection or ())]
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


def tell_queued(instance: dg.DagsterInstance, session: SessionSpec, runs: Sequence[RunSeen]) -> None:
    """Write once into the log of each queued run which run it waits for."""
    first = next((run for run in runs if run.status in IN_PROGRESS and run.status != "QUEUED"), None)
    if first is None:
        return
    for queued in runs:
        if queued.status != "QUEUED" or queued.tags.get(WAITS_FOR_TAG) == first.run_id:
            continue
        run = instance.get_run_by_id(queued.run_id)
        if run is None or run.status is not dg.DagsterRunStatus.QUEUED:
            continue
        instance.add_run_tags(run.run_id, {WAITS_FOR_TAG: first.run_id})
        instance.report_engine_event(
            f"waits in the queue: run {first.run_id[:8]} is the session of {', '.join(session.job.streams)}, and only "
            "one session runs at a time; this run begins when that one ends",
            run,
        )


def delete_run(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete a run and its events; Dagster's SQLite storage would leave the run's own file behind."""
    instance.delete_run(run_id)
    for suffix in (".db", ".db-wal", ".db-shm"):
        (Path(instance.root_directory) / "history" / "runs" / f"{run_id}{suffix}").unlink(missing_ok=True)
