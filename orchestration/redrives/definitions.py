"""The job `redrive`: what a stream has set aside goes through the code of today, launched from the launchpad.

    run config    the stream, dead letters or a quarantine, and which of them (`recourse deadletters replay`)
    schedule      `redrive`, off at first: each night the dead letters and the quarantines of every stream that can be

(No postponed annotations here: Dagster looks at the types of a step.)
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from orchestration.bundle.job import Bundle
from orchestration.sessions.child_run import errors_fail_the_step, session_executor
from orchestration.sessions.names import named
from orchestration.sessions.ownership import claim, job_tags
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.stream import Stream

if TYPE_CHECKING:  # the code location is loaded often, and needs nothing of a redrive
    from reprocessing.redrive.redrive import RedriveReport
    from streaming_jobs.sinks.redriven import Kind

JOB, STEP = "redrive", "redrive_records"
CRON = "30 3 * * *"


class RedriveConfig(dg.Config):
    stream: str = Field(description="The stream whose records are redriven.")
    quarantine: bool = Field(default=False, description="The records of quarantined rows instead of dead letters.")
    table: str = Field(default="", description="The table whose quarantine it is, if several have one.")
    older_than: str = Field(default="", description="Records of before that long ago, such as 2 hours.")
    newer_than: str = Field(default="", description="Records of since that long ago.")
    reason: str = Field(default="", description="Dead letters of this reason, such as malformed_json.")
    rule: str = Field(default="", description="Quarantined rows that break this rule.")
    error: str = Field(default="", description="With this text in reason or detail.")
    offsets: list[str] = Field(default=[], description="TOPIC, TOPIC/PARTITION or TOPIC/0:100-199; any of them.")
    dry_run: bool = Field(default=False, description="Only show what would become of each.")


Redrive = Callable[[Settings, Stream, RedriveConfig, Callable[[str], None]], "RedriveReport"]


def definitions(
    settings: Settings,
    topology: Topology,
    bundle: Bundle,
    executor: dg.ExecutorDefinition = session_executor,
    redrive: Redrive | None = None,
) -> dg.Definitions:
    """The job and its schedule, if there are streams; raises ConfigurationError if a job of the bundle has its name."""
    bundle.refuse([JOB, STEP], "the job of redrives")
    if not topology.streams:
        return dg.Definitions()
    name = named(settings.dagster, JOB)

    @dg.op(
        name=named(settings.dagster, STEP),
        description="Runs the records through decoder, function and rules of today, and adds their rows once.",
    )
    def redrive_records(context: dg.OpExecutionContext, config: RedriveConfig) -> dg.Output[str]:
        claim(context.instance, context.run_id, settings, JOB)
        with errors_fail_the_step():
            report = (redrive or run_redrive)(settings, topology[config.stream], config, context.log.info)
        return dg.Output(report.outcome, metadata=metadata(report))

    @dg.job(
        name=name,
        description="Sends what a stream has set aside through the code of today; the streams continue. Streams: "
        + ", ".join(topology.streams),
        tags=job_tags(settings, JOB),
        executor_def=executor,
    )
    def job() -> None:
        redrive_records()

    @dg.schedule(
        name=name,
        job=job,
        cron_schedule=CRON,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description="Redrives what every stream has set aside, where that is possible.",
    )
    def each_night(context: dg.ScheduleEvaluationContext) -> Iterator[dg.RunRequest]:
        for values in nightly(settings, topology):
            config = dg.RunConfig(ops={named(settings.dagster, STEP): RedriveConfig(**values)})
            key = f"{context.scheduled_execution_time:%Y-%m-%d}-{values['stream']}-{values.get('table', '')}"
            yield dg.RunRequest(run_key=key, run_config=config)

    return dg.Definitions(jobs=[job], schedules=[each_night])


def nightly(settings: Settings, topology: Topology) -> Iterator[dict[str, Any]]:
    """Yields a night's configurations: dead letters and quarantines of streams that have run and can be redriven."""
    from reprocessing.redrive.redrive import checked

    def can_be(stream: Stream, kind: "Kind", table: str | None = None) -> bool:
        try:
            checked(settings, stream, kind, table=table)
        except UsageError:
            return False
        return True

    for stream in topology.streams.values():
        if can_be(stream, "dead letters"):
            yield {"stream": stream.name}
        for table in stream.quarantines:
            if can_be(stream, "quarantine", table):
                yield {"stream": stream.name, "quarantine": True, "table": table}


def metadata(report: "RedriveReport") -> dict[str, Any]:
    return {
        "stream": report.stream,
        "table": report.table,
        "outcome": report.outcome,
        "records": len(report.redriven),
        **{f"records_{outcome.replace(' ', '_')}": count for outcome, count in report.counts.items()},
        **{f"rows_{table}": count for table, count in report.rows.items()},
        "slices": len(report.slices),
        "left": len(report.left),
        "more": report.more,
        "seconds": report.seconds,
        **({"redrive": report.id} if report.id is not None else {}),
    }


def run_redrive(
    settings: Settings, stream: Stream, config: RedriveConfig, tell: Callable[[str], None]
) -> "RedriveReport":
    """Redrive in this process, with a Spark session of its own."""
    from orchestration.redrives.runner import redrive_records
    from reprocessing.redrive.selection import choice
    from streaming_jobs.platform.broker import bootstrap_servers

    chosen = choice(config.older_than, config.newer_than, config.reason, config.rule, config.error, config.offsets)
    return redrive_records(
        settings,
        bootstrap_servers(settings),
        stream,
        "quarantine" if config.quarantine else "dead letters",
        chosen,
        table=config.table or None,
        dry_run=config.dry_run,
        tell=tell,
    )
