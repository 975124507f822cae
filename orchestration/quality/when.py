"""When suites are run: each `quality.every`, never doubled.

A schedule ticks about as often, and starts one run of the job for all suites that are due: table checks such as
freshness fail when nothing happens, so a suite is run whether its table was written or not. A suite that waits in the
queue or runs is left alone, which Dagster's storage shows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.storage.asset_check_execution_record import (
    AssetCheckExecutionRecord,
    AssetCheckExecutionRecordStatus,
)
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES

JOB, OP = "quality", "run_suites"
"""The job of suites, and its op."""
PLANNED = AssetCheckExecutionRecordStatus.PLANNED
EARLY = 0.9
"""Times `every`: a suite that was run so long ago is due (ticks vary by seconds)."""


def cron_of(every: timedelta) -> str:
    """A cron expression for the interval, or the next shorter one that divides an hour or a day; a minute at least."""
    minutes = max(1, int(every.total_seconds() // 60))
    if minutes < 60:
        step = max(n for n in range(1, 31) if 60 % n == 0 and n <= minutes)
        return "* * * * *" if step == 1 else f"*/{step} * * * *"
    step = max(n for n in range(1, 25) if 24 % n == 0 and n <= max(1, minutes // 60))
    return {1: "0 * * * *", 24: "0 0 * * *"}.get(step, f"0 */{step} * * *")


def schedule(
    keys: Sequence[dg.AssetCheckKey], every: timedelta, tables: Path, tags: Mapping[str, str]
) -> dg.ScheduleDefinition:
    """The schedule; `tables` is the folder of the tables, `tags` are those of runs of the job."""

    @dg.schedule(
        name=f"schedule_{JOB}",
        job_name=JOB,
        cron_schedule=cron_of(every),
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Runs the suites that have not been run for quality.every; skips those that wait or run.",
    )
    def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        due = due_checks(context.instance, keys, every, tables, tags, time.time())
        if not due:
            return dg.SkipReason("every suite has been run lately, or waits, or runs, or has no table yet")
        return dg.RunRequest(run_config=run_config([key.name for key in due]))

    return tick


def run_config(suites: Sequence[str]) -> dict[str, object]:
    """The configuration of a run of these suites."""
    return {"ops": {OP: {"config": {"suites": list(suites)}}}}


def suites_of(run: dg.DagsterRun, keys: Iterable[dg.AssetCheckKey]) -> set[str]:
    """The suites that a run of the job evaluates; none of another run, whose checks are in its plan."""
    if run.job_name != JOB:
        return set()
    config: Mapping[str, Any] = run.run_config
    chosen = config.get("ops", {}).get(OP, {}).get("config", {}).get("suites")
    return set(chosen) if chosen else {key.name for key in keys}


def due_checks(
    instance: dg.DagsterInstance,
    keys: Sequence[dg.AssetCheckKey],
    every: timedelta,
    tables: Path,
    tags: Mapping[str, str],
    now: float,
) -> list[dg.AssetCheckKey]:
    """The checks that have not been executed for `every` and are not waiting or running; `now` is since 1970.

    One that was never executed waits until its stream has made the table: the first minutes of a home are no failure.
    """
    known = instance.event_log_storage.get_latest_asset_check_execution_by_key(list(keys))
    unfinished = _unfinished(instance, known.values())
    at_work = instance.get_runs(dg.RunsFilter(tags=dict(tags), statuses=NOT_FINISHED_STATUSES))
    running = set[str]().union(*(suites_of(run, keys) for run in at_work))

    def is_due(key: dg.AssetCheckKey) -> bool:
        if key.name in running:
            return False
        if (record := known.get(key)) is None:
            return (tables / key.asset_key.to_user_string() / "_delta_log").is_dir()
        return record.run_id not in unfinished and now - record.create_timestamp >= EARLY * every.total_seconds()

    return [key for key in keys if is_due(key)]


def _unfinished(instance: dg.DagsterInstance, records: Iterable[AssetCheckExecutionRecord]) -> set[str]:
    """Of the runs that have not given their result: those that wait or run, sessions excepted.

    A session that was launched from a table's page has the table's checks in its plan, for when it ends.
    """
    planned = {record.run_id for record in records if record.status is PLANNED}
    runs = instance.get_runs(dg.RunsFilter(run_ids=list(planned))) if planned else []
    return {run.run_id for run in runs if not run.is_finished and not run.asset_selection}
