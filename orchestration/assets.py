"""Topics and tables as assets, and one Dagster job for each job of the bundle: launching it runs its session.

(No postponed annotations here: Dagster looks at the type of a step's `context`.)
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from orchestration.bundle.fields import place
from orchestration.bundle.job import Bundle, Job, Schedule
from orchestration.sessions.decisions import IN_PROGRESS
from orchestration.sessions.ownership import job_tags
from orchestration.sessions.reporting import table_key, topic_key
from orchestration.sessions.supervisor import Command, SessionSpec, run_session
from orchestration.sessions.tags import SESSION_TAG
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.runtime.session_options import session_command
from streaming_jobs.settings import Settings
from streaming_jobs.stream import KafkaTopic, Stream, StreamSource

TOPIC_GROUP = "kafka"
TABLE_GROUP = "tables_of_others"
VERSION = {"recourse": version("recourse-streams")}
"""The package's version, in the metadata of tables and jobs: Dagster shows none of a code location."""
NO_JOB_GROUP = "without_a_job"


def sessions(
    bundle: Bundle, topology: Topology, settings: Settings, command: Command = session_command
) -> list[SessionSpec]:
    """One session a job; raises ConfigurationError for an unknown stream or one that two jobs run."""
    owner: dict[str, Job] = {}
    found = []
    for job in bundle.jobs:
        where = f"resources.jobs.{job.key}"
        for name in job.streams:
            if name not in topology.streams:
                known = ", ".join(topology.streams) or "none"
                raise ConfigurationError(
                    f"{place(job.file, where)}: {where}: no stream is named '{name}'",
                    f"the streams are: {known}; correct the job, or add its module to the setting `flows`",
                )
            if name in owner:
                raise ConfigurationError(
                    f"{place(job.file, where)}: {where}: stream {name} is run by job {owner[name].key} too",
                    "one driver per stream: leave it to one of the two",
                )
            owner[name] = job
        found.append(SessionSpec(job, tuple(topology[name] for name in job.streams), settings, command))
    return found


def topic_assets(topology: Topology) -> list[dg.AssetSpec]:
    """Every topic, and every table that is read and that no stream writes, as assets that no step makes.

    A topic that a stream writes comes from what the stream reads.
    """
    writers = {sink.name: stream for stream in topology.streams.values() for sink in stream.topic_sinks.values()}
    written = {sink.name: sink.topic for stream in writers.values() for sink in stream.topic_sinks.values()}
    return [
        dg.AssetSpec(
            topic_key(topic.name),
            deps=[source_key(source) for source in writers[topic.name].sources.values()]
            if topic.name in writers
            else [],
            group_name=TOPIC_GROUP,
            kinds={"kafka"},
            description=topic.description or f"Kafka topic {topic.name}",
            owners=owners(topic.owners),
            tags={"recourse/stream": writers[topic.name].name} if topic.name in writers else {},
            metadata=_topic_metadata(topic),
        )
        for topic in {**written, **topology.topics}.values()
    ] + [
        dg.AssetSpec(
            table_key(table.name),
            group_name=TABLE_GROUP,
            kinds={"deltalake"},
            description=table.description or f"Delta table {table.name}, which no stream here writes",
            owners=owners(table.owners),
            metadata={"dagster/column_schema": column_schema(table.columns)},
        )
        for table in topology.tables_read.values()
        if topology.writer(table.name) is None
    ]


def source_key(source: StreamSource) -> dg.AssetKey:
    """The asset that a stream reads: a topic, or the table of another stream."""
    return topic_key(source.name) if isinstance(source, KafkaTopic) else table_key(source.name)


def unassigned_assets(topology: Topology, settings: Settings, known: Iterable[SessionSpec]) -> list[dg.AssetSpec]:
    """Tables of streams that no job runs: shown, but not started from here."""
    assigned = {stream.name for session in known for stream in session.streams}
    rest = [stream for stream in topology.streams.values() if stream.name not in assigned]
    return [spec for stream in rest for spec in table_assets(stream, settings, NO_JOB_GROUP)]


def table_assets(stream: Stream, settings: Settings, group: str) -> list[dg.AssetSpec]:
    """The stream's tables; quarantines and dead letters come last, in a group of their own."""
    from streaming_jobs.sinks.tables import quarantines, store_of

    letters = store_of(stream.primary).dead_letters(stream.dead_letters, stream.name)
    beside = [*quarantines(stream).values(), letters]
    shown = {letters.name: f"Records that stream {stream.name} could not decode, with the reason."}
    return [
        dg.AssetSpec(
            table_key(table.name),
            deps=[source_key(source) for source in stream.sources.values()],
            group_name=f"{group}_dead_letters" if table in beside else group,
            kinds={"spark", store_of(table).kind},
            description=shown.get(table.name)
            or table.description
            or stream.description
            or f"Written by stream {stream.name}",
            owners=owners(table.owners or stream.owners),
            tags={"recourse/stream": stream.name, "recourse/mode": table.mode},
            metadata=_table_metadata(table, settings),
            # A session that wrote nothing materialises nothing.
            skippable=True,
        )
        for table in (*stream.sinks.values(), *beside)
    ]


def table_keys(topology: Topology) -> dict[str, list[dg.AssetKey]]:
    """The assets of each stream's tables, by stream."""
    from streaming_jobs.sinks.tables import quarantines

    return {
        stream.name: [
            table_key(name)
            for name in (
                *(sink.name for sink in stream.sinks.values()),
                *(table.name for table in quarantines(stream).values()),
                stream.dead_letters,
            )
        ]
        for stream in topology.streams.values()
    }


def session_assets(session: SessionSpec) -> dg.AssetsDefinition:
    """All tables of a job's streams as one step: the session that writes them."""
    job = session.job

    @dg.multi_asset(
        name=f"{job.key}_session",
        specs=[spec for stream in session.streams for spec in table_assets(stream, session.settings, job.key)],
        can_subset=False,
        pool=f"session_{job.key}",
        # Any: 5 and "5" are the same to the session, which says what it cannot use.
        config_schema={name: dg.Field(dg.Any, default_value=value) for name, value in _numbers(job.defaults).items()},
        description=f"Runs {', '.join(job.streams)} in one driver until it is stopped.",
    )
    def run(context: dg.AssetExecutionContext) -> Any:
        run_session(context, session, context.op_execution_context.op_config or {})
        yield from ()

    return run


def session_job(session: SessionSpec, assets: dg.AssetsDefinition) -> UnresolvedAssetJobDefinition:
    """The Dagster job of a bundle's job; its parameters are the job's configuration."""
    job = session.job
    tags = {**job.tags, **job_tags(session.settings, job.kind), SESSION_TAG: job.key}
    if job.timeout_seconds:
        tags["dagster/max_runtime"] = str(job.timeout_seconds)
    return dg.define_asset_job(
        job.key,
        # A check would wait for the stream's end, which does not come.
        selection=dg.AssetSelection.assets(*assets.keys).without_checks(),
        config={"ops": {assets.op.name: {"config": _numbers(job.defaults)}}} if job.parameters else None,
        description=job.description or f"Session of {', '.join(job.streams)}",
        tags=tags,
        metadata={
            "name": job.name,
            **VERSION,
            "file": dg.MetadataValue.path(str(job.file)),
            "streams": ", ".join(job.streams),
        },
    )


def session_schedule(session: SessionSpec, trigger: Schedule) -> dg.ScheduleDefinition:
    """The schedule of a job; a tick while a run of the job is in progress is skipped, as on Databricks."""
    from orchestration.sessions.runs import session_runs

    @dg.schedule(
        name=f"schedule_{session.job.key}",
        job_name=session.job.key,
        cron_schedule=trigger.cron,
        execution_timezone=trigger.timezone,
        default_status=dg.DefaultScheduleStatus["STOPPED" if trigger.paused else "RUNNING"],
        description=f"Quartz: {trigger.quartz}",
    )
    def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        for run in session_runs(context.instance, session):
            if run.status in IN_PROGRESS:
                return dg.SkipReason(f"run {run.run_id[:8]} is {run.status.lower()}: a job has one run at a time")
        return dg.RunRequest()

    return tick


def _numbers(values: Mapping[str, str]) -> dict[str, int | float | str]:
    """Parameters as the launchpad shows them: what is a number as a number, the rest as text."""
    return {name: _number(value) for name, value in values.items()}


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            number = kind(text)
            if str(number) == text and text not in ("nan", "inf", "-inf"):
                return number
    return text


def owners(names: Iterable[str]) -> list[str]:
    """Owners as Dagster wants them: an e-mail address as it is, anything else as a team."""
    return [name if "@" in name or name.startswith("team:") else f"team:{name}" for name in names]


def _topic_metadata(topic: KafkaTopic) -> dict[str, Any]:
    found: dict[str, Any] = {"dagster/column_schema": column_schema(topic.records.schema), "topic": topic.name}
    if topic.event_time:
        found |= {"event_time": topic.time_column, "lateness": topic.lateness}
    return found


def _table_metadata(table: DeclaredTable, settings: Settings) -> Mapping[str, Any]:
    path = settings.tables / table.name
    found: dict[str, Any] = {"dagster/table_name": table.name, "dagster/uri": path.as_uri(), **VERSION}
    if table.schema is not None:
        found["dagster/column_schema"] = column_schema(table.schema, table.keys)
    if table.keys:
        found["keys"] = ", ".join(table.keys)
    if table.partition_by:
        found["partitioned_by"] = ", ".join(table.partition_by)
    return found


def column_schema(schema: Any, keys: Iterable[str] = ()) -> dg.TableSchema:
    """A Spark schema as Dagster shows it, with comments; keys and required fields are not nullable."""
    required = set(keys)
    return dg.TableSchema(
        [
            dg.TableColumn(
                field.name,
                field.dataType.simpleString(),
                description=field.metadata.get("comment"),
                constraints=dg.TableColumnConstraints(nullable=field.nullable and field.name not in required),
            )
            for field in schema.fields
        ]
    )
