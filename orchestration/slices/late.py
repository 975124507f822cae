"""The days of tables that lack late records in Dagster: the job that rebuilds them, its schedule, and a check.

    job `rebuild_late`        the closed days of one stream's tables, a bounded number; launched from the launchpad, too
    schedule `rebuild_late`   each hour, of every stream with such days; off at first
    check `late_records`      of each table that keeps late records: yellow while days lack some

(No postponed annotations here: Dagster looks at the types of a step.)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, get_args

import dagster as dg
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES
from pydantic import Field

from orchestration.bundle.job import Bundle
from orchestration.sessions.child_run import errors_fail_the_step, session_executor
from orchestration.sessions.names import named, table_key
from orchestration.sessions.ownership import claim, job_tags
from orchestration.sessions.reporting import shown
from orchestration.sessions.verdicts import CheckVerdict, CheckVerdicts, checks_from_files
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.runtime.sliceable import Sliceable, sliceable
from streaming_jobs.settings import Settings
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:  # the code location is loaded often, and needs nothing of a rebuild
    from reprocessing.slices.late import LateReport

JOB, STEP = "rebuild_late", "rebuild_late_days"
CRON = "15 * * * *"
CHECK, LOOK_EVERY = "late_records", 300.0
"""The check, and the seconds for which a look at the files holds."""


class LateConfig(dg.Config):
    stream: str = Field(description="The stream whose late records are missing in days of its tables.")
    max_days: int = Field(default=31, ge=1, description="Days of each table that the run rebuilds at most.")


RebuildLate = Callable[[Settings, Stream, int, Callable[[str], None]], "list[LateReport]"]


def definitions(
    settings: Settings,
    topology: Topology,
    bundle: Bundle,
    executor: dg.ExecutorDefinition = session_executor,
    rebuild: RebuildLate | None = None,
) -> dg.Definitions:
    """The definitions, if a table keeps late records; raises ConfigurationError if a job of the bundle has the name."""
    bundle.refuse([JOB, STEP], "the job of late records")
    streams = {name: stream for name, stream in topology.streams.items() if stream.late_tables}
    if not streams:
        return dg.Definitions()
    name = named(settings.dagster, JOB)

    @dg.op(
        name=named(settings.dagster, STEP),
        description="Rebuilds the slices of closed days that lack late records; the stream continues.",
    )
    def rebuild_late_days(context: dg.OpExecutionContext, config: LateConfig) -> dg.Output[str]:
        claim(context.instance, context.run_id, settings, JOB)
        with errors_fail_the_step():
            reports = (rebuild or run_rebuild)(settings, topology[config.stream], config.max_days, context.log.info)
        slices = sum(len(report.slices) for report in reports)
        return dg.Output(f"{counted(slices, 'slice')} rebuilt", metadata=metadata(reports))

    @dg.job(
        name=name,
        description="Rebuilds the days of a stream's tables that lack late records. Streams: " + ", ".join(streams),
        tags=job_tags(settings, JOB),
        executor_def=executor,
    )
    def job() -> None:
        rebuild_late_days()

    @dg.schedule(
        name=name,
        job=job,
        cron_schedule=CRON,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description="Rebuilds the closed days that lack late records, of each table the oldest first.",
    )
    def hourly(context: dg.ScheduleEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
        if context.instance.get_runs_count(dg.RunsFilter(job_name=name, statuses=list(NOT_FINISHED_STATUSES))):
            yield dg.SkipReason(f"job {name} is still at work")
            return
        for stream in streams.values():
            if any(to_rebuild(settings, made) for made in kept(stream)):
                config = dg.RunConfig(ops={named(settings.dagster, STEP): LateConfig(stream=stream.name)})
                key = f"{context.scheduled_execution_time:%Y-%m-%dT%H}-{stream.name}"
                yield dg.RunRequest(run_key=key, run_config=config)

    tables = [made for stream in streams.values() for made in kept(stream)]
    return dg.Definitions.merge(dg.Definitions(jobs=[job], schedules=[hourly]), _checks(settings, tables))


def kept(stream: Stream) -> list[Sliceable]:
    return [sliceable(stream, table) for table in stream.late_tables]


def to_rebuild(settings: Settings, made: Sliceable) -> bool:
    from reprocessing.slices.late import late_days

    return any(day.state == "to rebuild" for day in late_days(settings, made))


def metadata(reports: "Sequence[LateReport]") -> dict[str, int]:
    """By table the slices that were rebuilt, their corrected and new rows, and the days that are left."""
    found: dict[str, int] = {}
    for report in reports:
        table, counts = report.table, [each.difference.counts for each in report.slices]
        found |= {
            f"{table}_slices": len(report.slices),
            f"{table}_rows_corrected": sum(each.corrected for each in counts),
            f"{table}_rows_new": sum(each.new for each in counts),
            f"{table}_days_left": len(report.days("to rebuild")),
            f"{table}_days_open": len(report.days("open")),
            f"{table}_days_lost": len(report.days("lost")),
        }
    return found


def run_rebuild(settings: Settings, stream: Stream, most: int, tell: Callable[[str], None]) -> "list[LateReport]":
    """Rebuild in this process, with a Spark session of its own."""
    from orchestration.slices.runner import rebuild_late_days
    from reprocessing.slices.rebuild import Waits
    from streaming_jobs.platform.broker import bootstrap_servers

    address = bootstrap_servers(settings)
    return rebuild_late_days(settings, address, kept(stream), most=most, waits=Waits(), tell=tell)


def _checks(settings: Settings, tables: Sequence[Sliceable]) -> dg.Definitions:
    by_key = {dg.AssetCheckKey(table_key(settings.dagster, made.table.name), CHECK): made for made in tables}
    known: dict[dg.AssetCheckKey, CheckVerdict] = {}
    looked_at = 0.0

    def look(_: dg.DagsterInstance, now: float) -> CheckVerdicts:
        nonlocal looked_at
        if not known or not 0 <= now - looked_at < LOOK_EVERY:
            known.update({key: verdict(settings, made) for key, made in by_key.items()})
            looked_at = now
        return known

    about = "Yellow while days of the table lack records that came too late for their windows."
    return checks_from_files(
        CHECK,
        dict.fromkeys(by_key, about),
        settings,
        look,
        sensor=CHECK,
        sensor_description=f"Evaluates the check `{CHECK}` of tables that keep late records, from their files.",
        all_well="no table lacks late records",
    )


def verdict(settings: Settings, made: Sliceable) -> CheckVerdict:
    """The verdict on a table that keeps late records: a warning while windows of its days lack some."""
    from reprocessing.slices.late import State, late_days

    days, name = late_days(settings, made), made.table.name
    if not days:
        return CheckVerdict(True, dg.AssetCheckSeverity.WARN, "complete", f"no day of {name} lacks late records")
    numbers = {f"days_{state.replace(' ', '_')}": sum(day.state == state for day in days) for state in get_args(State)}
    figures = {
        **numbers,
        "late_records": sum(day.records for day in days),
        "first_day": days[0].day.isoformat(),
        "last_day": days[-1].day.isoformat(),
    }
    text = (
        f"{counted(len(days), 'day')} of {name} from {days[0].day} to {days[-1].day} "
        f"{'lacks' if len(days) == 1 else 'lack'} late records; {commands.rebuild_late(made.stream.name)}"
    )
    return CheckVerdict(False, dg.AssetCheckSeverity.WARN, f"{len(days)} days", text, shown(figures))
