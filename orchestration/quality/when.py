"""When suites are run: soon after their table was written, and in any case each `quality.every`, never doubled.

Two things start runs, and each suite is run about once in `quality.every`:

    condition   a tick of the clock, if the table was materialised since the suite's last run
    schedule    at each tick: suites that have not been run for `quality.every`, because nothing was written, or because
                the stream runs without Dagster: table checks such as freshness fail when nothing happens. A table that
                is being written is left to the condition, unless that is late

`AutomationCondition.eager()` would start a run for each materialisation, so each minute; Great Expectations alone takes
five seconds of CPU to import. Neither starts a suite that waits in the queue or runs: both read Dagster's storage.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.storage.asset_check_execution_record import (
    AssetCheckExecutionRecord,
    AssetCheckExecutionRecordStatus,
)

PLANNED = AssetCheckExecutionRecordStatus.PLANNED
EARLY, LATE = 0.9, 1.5
"""Times `every`: a suite that was run so long ago is due (ticks vary by seconds), also while its table is written."""


def cron_of(every: timedelta) -> str:
    """A cron expression for the interval, or the next shorter one that divides an hour or a day; a minute at least."""
    minutes = max(1, int(every.total_seconds() // 60))
    if minutes < 60:
        step = max(n for n in range(1, 31) if 60 % n == 0 and n <= minutes)
        return "* * * * *" if step == 1 else f"*/{step} * * * *"
    step = max(n for n in range(1, 25) if 24 % n == 0 and n <= max(1, minutes // 60))
    return {1: "0 * * * *", 24: "0 0 * * *"}.get(step, f"0 */{step} * * *")


def when_written(every: timedelta) -> dg.AutomationCondition[Any]:
    """Run a check at a tick of the clock if its table was materialised since its last run, unless it waits or runs.

    `AutomationCondition.on_cron` asks for a materialisation after the tick: one that is noticed together with the next
    tick does not count, and with ticks each minute none may ever count.
    """
    cron = cron_of(every)
    tick: dg.AutomationCondition[Any] = dg.AutomationCondition.cron_tick_passed(cron)
    written: dg.AutomationCondition[Any] = dg.AutomationCondition.any_deps_updated()
    condition = tick.since_last_handled() & written.since_last_handled() & ~dg.AutomationCondition.in_progress()
    return condition.with_label(f"since its last run the clock ({cron}) has ticked and its table was written")


def on_write(keys: Sequence[dg.AssetCheckKey], tags: dict[str, str]) -> dg.AutomationConditionSensorDefinition:
    """The sensor that evaluates the checks' conditions; Dagster's daemon does so without the code server."""
    return dg.AutomationConditionSensorDefinition(
        "quality_when_written",
        target=dg.AssetSelection.checks(*keys),
        run_tags=tags,
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Runs a suite soon after its table was written, at most once in quality.every.",
    )


def schedule(job: str, keys: Sequence[dg.AssetCheckKey], every: timedelta, tables: Path) -> dg.ScheduleDefinition:
    """The schedule that runs what nothing else has run for `every`; `tables` is the folder of the tables."""

    @dg.schedule(
        name=f"schedule_{job}",
        job_name=job,
        cron_schedule=cron_of(every),
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Runs the suites that have not been run for quality.every; skips those that wait or run.",
    )
    def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        due = due_checks(context.instance, keys, every, tables, time.time())
        if not due:
            return dg.SkipReason("every suite has been run lately, or waits, or runs, or has no table yet")
        return dg.RunRequest(asset_check_keys=due)

    return tick


def due_checks(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey], every: timedelta, tables: Path, now: float
) -> list[dg.AssetCheckKey]:
    """The checks that have not been executed for `every` and are not waiting or running; `now` is since 1970.

    One that was never executed waits until its stream has made the table: the first minutes of a home are no failure.
    """
    known = instance.event_log_storage.get_latest_asset_check_execution_by_key(list(keys))
    unfinished = _unfinished(instance, known.values())
    seconds = every.total_seconds()
    written = _written_since(instance, keys, now - seconds)

    def is_due(key: dg.AssetCheckKey) -> bool:
        if (record := known.get(key)) is None:
            return (tables / key.asset_key.to_user_string() / "_delta_log").is_dir()
        patience = seconds * (LATE if key.asset_key in written else EARLY)
        return record.run_id not in unfinished and now - record.create_timestamp >= patience

    return [key for key in keys if is_due(key)]


def _written_since(instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey], moment: float) -> set[dg.AssetKey]:
    """The tables that were materialised since."""
    records = instance.get_asset_records(list({key.asset_key for key in keys}))
    newest = {record.asset_entry.asset_key: record.asset_entry.last_materialization for record in records}
    return {key for key, event in newest.items() if event is not None and event.timestamp >= moment}


def _unfinished(instance: dg.DagsterInstance, records: Iterable[AssetCheckExecutionRecord]) -> set[str]:
    """Of the runs that have not given their result: those that wait or run, sessions excepted.

    A session that was launched from a table's page has the table's checks in its plan, for when it ends.
    """
    planned = {record.run_id for record in records if record.status is PLANNED}
    runs = instance.get_runs(dg.RunsFilter(run_ids=list(planned))) if planned else []
    return {run.run_id for run in runs if not run.is_finished and not run.asset_selection}
