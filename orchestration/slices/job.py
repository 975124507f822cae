"""The days of every table with slices as partitions of an asset, the job that rebuilds them, and its schedule.

    asset `slices/<table>`          a day is materialised when it was rebuilt; its deps name the table
    job `reprocess_slices`          all of them; a backfill of a range of days is one run (BackfillPolicy.single_run)
    schedule `reprocess_slices`     each noon (UTC) the newest day that the stream has closed; off at first

A day is one of the table's own calendar (`Slices.zone`), so one set of partitions is enough for all time zones.

(No postponed annotations here: Dagster looks at the type of a step's `context`.)
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from orchestration.sessions.ownership import claim, job_tags
from orchestration.sessions.reporting import table_key
from reprocessing.planning.sliceable import Sliceable, sliceable, tables_with_slices
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


@dataclass(frozen=True)
class SliceDefinitions:
    """The definitions for the tables that declare slices; none of any kind without such tables."""

    settings: Settings
    tables: Sequence[Sliceable]
    rebuild: RebuildDays

    @classmethod
    def of(cls, settings: Settings, topology: Topology, rebuild: RebuildDays | None = None) -> "SliceDefinitions":
        """Those of all declared streams; raises UsageError for slices that cannot be rebuilt."""
        found = [
            sliceable(stream, table) for stream in topology.streams.values() for table in tables_with_slices(stream)
        ]
        return cls(settings, found, rebuild or rebuild_days)

    @property
    def partitions(self) -> dg.DailyPartitionsDefinition:
        """Every day from the first one that a table declares."""
        return dg.DailyPartitionsDefinition(start_date=min(made.slices.first_day for made in self.tables))

    def assets(self) -> list[dg.AssetsDefinition]:
        """One asset per table."""
        return [self._asset(made) for made in self.tables]

    def jobs(self) -> list[UnresolvedAssetJobDefinition]:
        """The job of all of them."""
        if not self.tables:
            return []
        names = ", ".join(made.table.name for made in self.tables)
        return [
            dg.define_asset_job(
                JOB,
                selection=dg.AssetSelection.assets(*(slices_key(made) for made in self.tables)).without_checks(),
                description=f"Rebuilds days of {names} from their topics; the streams go on.",
                tags=job_tags(self.settings, GROUP),
            )
        ]

    def schedules(self) -> list[dg.ScheduleDefinition]:
        """The schedule, which is off by default."""
        if not self.tables:
            return []

        @dg.schedule(
            name=JOB,
            job_name=JOB,
            cron_schedule=CRON,
            execution_timezone="UTC",
            default_status=dg.DefaultScheduleStatus.STOPPED,
            description="Rebuilds the newest day that each stream has closed.",
        )
        def newest_days(context: dg.ScheduleEvaluationContext) -> Iterator[dg.RunRequest]:
            for made in self.tables:
                day = newest_closed_day(made, self.settings, context.scheduled_execution_time)
                if day >= date.fromisoformat(made.slices.first_day):
                    yield dg.RunRequest(
                        run_key=f"{made.table.name}-{day}",
                        partition_key=day.isoformat(),
                        asset_selection=[slices_key(made)],
                    )

        return [newest_days]

    def _asset(self, made: Sliceable) -> dg.AssetsDefinition:
        name = made.table.name

        def rebuilt_days(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
            claim(context.instance, context.run.run_id, self.settings, GROUP)
            first, last = context.partition_key_range
            after = (date.fromisoformat(last) + timedelta(days=1)).isoformat()
            try:
                report = self.rebuild(self.settings, made, first, after, context.log.info)
            except RecourseError as error:
                retry = not isinstance(error, PermanentError | UsageError)
                raise dg.Failure(description=str(error), allow_retries=retry) from error
            return dg.MaterializeResult(metadata=metadata(report))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dg.BetaWarning)  # one run for a range of days: `backfill_policy`
            return dg.asset(
                key=slices_key(made),
                deps=[table_key(name)],
                partitions_def=self.partitions,
                backfill_policy=dg.BackfillPolicy.single_run(),
                pool=f"slices_{made.stream.name}",
                group_name=GROUP,
                kinds={"spark"},
                description=f"Days of table {name} that were rebuilt from topic {made.topic.name}, beside the running "
                f"stream. Days are those of {made.slices.zone}, by {made.slices.column}.",
                tags={"recourse/stream": made.stream.name},
            )(rebuilt_days)


def slices_key(made: Sliceable) -> dg.AssetKey:
    """The asset of a table's days."""
    return dg.AssetKey([GROUP, made.table.name])


def newest_closed_day(made: Sliceable, settings: Settings, now: datetime) -> date:
    """The newest day of the table's calendar that a stream which keeps up has closed: its watermark is past its end."""
    own = settings.for_stream(made.stream.name).lateness
    delay = own if own is not None else made.topic.delay or timedelta(0)
    passed = now - delay - made.slices.distance
    return passed.astimezone(made.slices.calendar).date() - timedelta(days=1)


def metadata(report: "SliceReport") -> dict[str, Any]:
    """The figures of a rebuild as Dagster shows and plots them."""
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
