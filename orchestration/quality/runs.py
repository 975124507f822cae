"""Runs of suites and of recoveries in Dagster's storage: ending those whose process is gone, deleting old ones."""

from __future__ import annotations

from datetime import datetime

import dagster as dg
import structlog

from orchestration.sessions.decisions import IN_PROGRESS
from orchestration.sessions.runs import delete_run
from orchestration.sessions.supervisor import is_running
from orchestration.sessions.tags import KIND_TAG, QUALITY_KIND, RECOVERY_KIND, WORKER_TAG

log = structlog.get_logger()

DELETE_AT_ONCE = 20
"""Old runs deleted in one tick of the retention sensor: more than begin between two ticks."""
_OURS = {KIND_TAG: [QUALITY_KIND, RECOVERY_KIND]}
_BEGUN = [dg.DagsterRunStatus[status] for status in IN_PROGRESS if status != "QUEUED"]
_FINISHED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]


def end_lost(instance: dg.DagsterInstance) -> list[str]:
    """Fail the runs whose process is gone: a run of suites would stop all others, a recovery seem to be at work."""
    ended = []
    for run in instance.get_runs(dg.RunsFilter(tags=_OURS, statuses=_BEGUN)):
        worker = run.tags.get(WORKER_TAG)
        if worker is not None and is_running(worker) is False:
            reason = f"its process {worker} is gone"
            log.error("run declared dead", run=run.run_id, found=reason)
            instance.report_run_failed(run, f"Recourse's watchdog: {reason}")
            ended.append(f"{run.run_id[:8]}: {reason}")
    return ended


def delete_finished(instance: dg.DagsterInstance, limit: datetime) -> int:
    """Delete runs that ended before `limit`, some at a time; returns how many were deleted."""
    old = dg.RunsFilter(tags=_OURS, statuses=_FINISHED, updated_before=limit)
    runs = instance.get_runs(old, limit=DELETE_AT_ONCE, ascending=True)
    for run in runs:
        delete_run(instance, run.run_id)
    return len(runs)
