"""The days of every table with slices as partitions of an asset, the job that rebuilds them, and its schedule.

    asset `slices/<table>`          a day is materialised when it was rebuilt; its deps name the table
    job `reprocess_slices`          all of them; a backfill of a range of days is one run (BackfillPolicy.single_run)
    schedule `reprocess_slices`     each noon (UTC) the newest day that the stream has closed; off at first
    `late.py`                       the days that lack late records: their job, schedule and check

A day is one of the table's own calendar (`Slices.zone`), so one set of partitions is enough for all time zones.

(No postponed annotations here: Dagster looks at the type of a step's `context`.)
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg

from orchestration.sessions.child_run import errors_fail_the_step, session_executor
from orchestration.sessions.names import asset_key, named, table_key
from orchestration.sessions.ownership import claim, job_tags
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.runtime.sliceable import Sliceable, sliceable, tables_with_slices
from streaming_jobs.settings import Settings

if TYPE_CHECKING:  # the code location is loaded often, and needs nothing of a rebuild
    from reprocessing.slices.rebuild import SliceReport

JOB = "reprocess_slices"
GROUP = "slices"
CRON = "0 12 * * *"
"""Noon in UTC: yesterday is over in every time zone."""

RebuildDays = Callable[[Settings, Sliceable, str, str, Callable[[str], None]], "SliceReport"]
"""Rebuilds the days from a first day up to, but not including, another."""


def definitions(
    settings: Settings, topology: Topology, executor: dg.ExecutorDefinition = session_executor
) -> dg.Definitions:
    """The definitions for all tables that declare slices; raises UsageError for slices that cannot be rebuilt."""
    streams = topology.streams.values()
    return definitions_of(
        settings,
        [sliceable(stream, table) for stream in streams for table in tables_with_slices(stream)],
        executor=executor,
    )


def definitions_of(
    settings: Settings,
    tables: Sequence[Sliceable],
    rebuild: RebuildDays | None = None,
    executor: dg.ExecutorDefinition = session_executor,
) -> dg.Definitions:
    """One asset per table, the job of all of them, and its schedule, which is off by default; none without tables."""
    if not tables:
        return dg.Definitions()
    keys, name = [slices_key(settings, sliced) for sliced in tables], named(settings.dagster, JOB)
    job = dg.define_asset_job(
        name,
        selection=dg.AssetSelection.assets(*keys).without_checks(),
        description=f"Rebuilds days of {', '.join(sliced.table.name for sliced in tables)} from their topics; the "
        "streams continue.",
        tags=job_tags(settings, GROUP),
        executor_def=executor,
    )

    @dg.schedule(
        name=name,
        job_name=name,
        cron_schedule=CRON,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description="Rebuilds the newest day that each stream has closed.",
    )
    def newest_days(context: dg.ScheduleEvaluationContext) -> Iterator[dg.RunRequest]:
        for sliced in tables:
            day = newest_closed_day(sliced, settings, context.scheduled_execution_time)
            if day >= date.fromisoformat(sliced.slices.first_day):
                yield dg.RunRequest(
                    run_key=f"{sliced.table.name}-{day}",
                    partition_key=day.isoformat(),
                    asset_selection=[slices_key(settings, sliced)],
                )

    days = dg.DailyPartitionsDefinition(start_date=min(sliced.slices.first_day for sliced in tables))
    assets = [_asset(settings, sliced, days, rebuild or rebuild_days) for sliced in tables]
    return dg.Definitions(assets=assets, jobs=[job], schedules=[newest_days])


def _asset(
    settings: Settings, sliced: Sliceable, days: dg.DailyPartitionsDefinition, rebuild: RebuildDays
) -> dg.AssetsDefinition:
    def rebuilt_days(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        claim(context.instance, context.run.run_id, settings, GROUP)
        first, last = context.partition_key_range
        after = (date.fromisoformat(last) + timedelta(days=1)).isoformat()
        with errors_fail_the_step():
            report = rebuild(settings, sliced, first, after, context.log.info)
        return dg.MaterializeResult(metadata=metadata(report))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)  # one run for a range of days: `backfill_policy`
        return dg.asset(
            key=slices_key(settings, sliced),
            deps=[table_key(settings.dagster, sliced.table.name)],
            partitions_def=days,
            backfill_policy=dg.BackfillPolicy.single_run(),
            pool=named(settings.dagster, f"slices_{sliced.stream.name}"),
            group_name=named(settings.dagster, GROUP),
            kinds={"spark"},
            description=f"Days of table {sliced.table.name} that were rebuilt from topic {sliced.topic.name}, beside "
            f"the running stream. Days are those of {sliced.slices.zone}, by {sliced.slices.column}.",
            tags={"recourse/stream": sliced.stream.name},
        )(rebuilt_days)


def slices_key(settings: Settings, sliced: Sliceable) -> dg.AssetKey:
    return asset_key(settings.dagster, GROUP, sliced.table.name)


def newest_closed_day(sliced: Sliceable, settings: Settings, now: datetime) -> date:
    """The newest day of the table's calendar that lies behind the watermark of a stream without lag."""
    lateness = settings.for_stream(sliced.stream.name).lateness
    delay = lateness if lateness is not None else sliced.topic.delay or timedelta(0)
    passed = now - delay - sliced.slices.distance
    return passed.astimezone(sliced.slices.calendar).date() - timedelta(days=1)


def metadata(report: "SliceReport") -> dict[str, Any]:
    return {
        "slice": report.words,
        "outcome": report.outcome,
        **report.figures,
        "late_records": report.late,
        "offsets": report.records,
        "seconds": report.seconds,
        **({"table_version": report.version} if report.version is not None else {}),
    }


def rebuild_days(
    settings: Settings, sliced: Sliceable, first: str, after: str, tell: Callable[[str], None]
) -> "SliceReport":
    """Rebuild days in this process, with a Spark session of their own."""
    from orchestration.slices.runner import rebuild_slice
    from streaming_jobs.platform.broker import bootstrap_servers

    address = bootstrap_servers(settings)
    return rebuild_slice(settings, address, sliced.stream, sliced.table.name, first, after, tell=tell)
