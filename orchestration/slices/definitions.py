"""The days of every table with slices as partitions of an asset, the job that rebuilds them, and its schedule.

    asset `slices/<table>`          a day is materialised when it was rebuilt; its deps name the table
    job `reprocess_slices`          all of them; a backfill of a range of days is one run (BackfillPolicy.single_run)
    schedule `reprocess_slices`     each noon (UTC) the newest day that the stream has closed; off at first

A day is one of the table's own calendar (`Slices.zone`), so one set of partitions is enough for all time zones.

(No postponed annotations here: Dagster looks at the type of a step's `context`.)
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg

from orchestration.sessions.ownership import claim, job_tags
from orchestration.sessions.reporting import table_key
from reprocessing.plan.sliceable import Sliceable, sliceable, tables_with_slices
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import PermanentError, RecourseError, UsageError
from streaming_jobs.settings import Settings

if TYPE_CHECKING:  # the code location is loaded often, and needs nothing of a rebuild
    from reprocessing.slices.rebuild import SliceReport

JOB = "reprocess_slices"
GROUP = "slices"
CRON = "0 12 * * *"
"""Noon in UTC: yesterday is over in every time zone."""

RebuildDays = Callable[[Settings, Sliceable, str, str, Callable[[str], None]], "SliceReport"]
"""Rebuild the days from one to another, which is the first one after them."""


def definitions(settings: Settings, topology: Topology) -> dg.Definitions:
    """Those of all tables that declare slices; raises UsageError for slices that cannot be rebuilt."""
    streams = topology.streams.values()
    return definitions_of(
        settings, [sliceable(stream, table) for stream in streams for table in tables_with_slices(stream)]
    )


def definitions_of(
    settings: Settings, tables: Sequence[Sliceable], rebuild: RebuildDays | None = None
) -> dg.Definitions:
    """One asset per table, the job of all of them, and its schedule, which is off by default; none without tables."""
    if not tables:
        return dg.Definitions()
    keys = [slices_key(made) for made in tables]
    job = dg.define_asset_job(
        JOB,
        selection=dg.AssetSelection.assets(*keys).without_checks(),
        description=f"Rebuilds days of {', '.join(made.table.name for made in tables)} from their topics; the streams "
        "go on.",
        tags=job_tags(settings, GROUP),
    )

    @dg.schedule(
        name=JOB,
        job_name=JOB,
        cron_schedule=CRON,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description="Rebuilds the newest day that each stream has closed.",
    )
    def newest_days(context: dg.ScheduleEvaluationContext) -> Iterator[dg.RunRequest]:
        for made in tables:
            day = newest_closed_day(made, settings, context.scheduled_execution_time)
            if day >= date.fromisoformat(made.slices.first_day):
                yield dg.RunRequest(
                    run_key=f"{made.table.name}-{day}",
                    partition_key=day.isoformat(),
                    asset_selection=[slices_key(made)],
                )

    days = dg.DailyPartitionsDefinition(start_date=min(made.slices.first_day for made in tables))
    assets = [_asset(settings, made, days, rebuild or rebuild_days) for made in tables]
    return dg.Definitions(assets=assets, jobs=[job], schedules=[newest_days])


def _asset(
    settings: Settings, made: Sliceable, days: dg.DailyPartitionsDefinition, rebuild: RebuildDays
) -> dg.AssetsDefinition:
    def rebuilt_days(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        claim(context.instance, context.run.run_id, settings, GROUP)
        first, last = context.partition_key_range
        after = (date.fromisoformat(last) + timedelta(days=1)).isoformat()
        try:
            report = rebuild(settings, made, first, after, context.log.info)
        except RecourseError as error:
            retry = not isinstance(error, PermanentError | UsageError)
            raise dg.Failure(description=str(error), allow_retries=retry) from error
        return dg.MaterializeResult(metadata=metadata(report))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.BetaWarning)  # one run for a range of days: `backfill_policy`
        return dg.asset(
            key=slices_key(made),
            deps=[table_key(made.table.name)],
            partitions_def=days,
            backfill_policy=dg.BackfillPolicy.single_run(),
            pool=f"slices_{made.stream.name}",
            group_name=GROUP,
            kinds={"spark"},
            description=f"Days of table {made.table.name} that were rebuilt from topic {made.topic.name}, beside the "
            f"running stream. Days are those of {made.slices.zone}, by {made.slices.column}.",
            tags={"recourse/stream": made.stream.name},
        )(rebuilt_days)


def slices_key(made: Sliceable) -> dg.AssetKey:
    return dg.AssetKey([GROUP, made.table.name])


def newest_closed_day(made: Sliceable, settings: Settings, now: datetime) -> date:
    """The newest day of the table's calendar that a stream which keeps up has closed: its watermark is past its end."""
    own = settings.for_stream(made.stream.name).lateness
    delay = own if own is not None else made.topic.delay or timedelta(0)
    passed = now - delay - made.slices.distance
    return passed.astimezone(made.slices.calendar).date() - timedelta(days=1)


def metadata(report: "SliceReport") -> dict[str, Any]:
    from reprocessing.slices.rebuild import difference_rows

    return {
        "slice": report.words,
        "outcome": report.outcome,
        **{name.replace(" ", "_"): count for name, count in difference_rows(report)},
        "late_records": report.late,
        "offsets": report.records,
        "seconds": report.seconds,
        **({"table_version": report.version} if report.version is not None else {}),
    }


def rebuild_days(
    settings: Settings, made: Sliceable, first: str, after: str, tell: Callable[[str], None]
) -> "SliceReport":
    """Rebuild days in this process, with a Spark session that ends with it."""
    from orchestration.slices.runner import rebuild_slice
    from streaming_jobs.platform.broker import bootstrap_servers

    address = bootstrap_servers(settings)
    return rebuild_slice(settings, address, made.stream, made.table.name, first, after, tell=tell)
