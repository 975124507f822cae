"""The assets of streams: the topics and tables that they read and write, with columns, owners and groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dagster as dg

from orchestration.sessions.names import POSTGRES, named, postgres_key, table_key, topic_key
from orchestration.sessions.supervisor import SessionSpec
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.lookup import Lookup
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.settings import Settings
from streaming_jobs.stream import KafkaTopic, Stream

TOPIC_GROUP = "kafka"
TABLE_GROUP = "tables_of_others"
VERSION = {"recourse": version("recourse-streams")}
"""The package's version, in the metadata of tables and jobs: Dagster shows none of a code location."""
NO_JOB_GROUP = "without_a_job"


def topic_assets(topology: Topology, settings: Settings) -> list[dg.AssetSpec]:
    """Every topic, and every table that is read and that no stream writes, as assets that no step makes.

    A topic that a stream writes depends on the stream's sources.
    """
    writers = {sink.name: stream for stream in topology.streams.values() for sink in stream.topic_sinks.values()}
    written = {sink.name: sink.topic for stream in writers.values() for sink in stream.topic_sinks.values()}
    tables: dict[str, DeltaSource | Lookup] = {**topology.tables_looked_up, **topology.tables_read}
    return [
        dg.AssetSpec(
            topic_key(settings.dagster, topic.name),
            deps=_read_keys(settings, writers[topic.name]) if topic.name in writers else [],
            group_name=named(settings.dagster, TOPIC_GROUP),
            kinds={"kafka"},
            description=topic.description or f"Kafka topic {topic.name}",
            owners=owners(topic.owners),
            tags={"recourse/stream": writers[topic.name].name} if topic.name in writers else {},
            metadata=_topic_metadata(topic),
        )
        for topic in {**written, **topology.topics}.values()
    ] + [
        dg.AssetSpec(
            table_key(settings.dagster, table.name),
            group_name=named(settings.dagster, TABLE_GROUP),
            kinds={"deltalake"},
            description=table.description or f"Delta table {table.name}, which no stream here writes",
            owners=owners(table.owners),
            metadata={"dagster/column_schema": column_schema(table.columns)},
        )
        for table in tables.values()
        if topology.writer(table.name) is None
    ]


def _read_keys(settings: Settings, stream: Stream) -> list[dg.AssetKey]:
    """The assets that a stream reads: topics, tables as sources, and tables that it looks up."""
    tables = [*(table.name for table in stream.tables_read), *(lookup.name for lookup in stream.lookups.values())]
    return [
        *(topic_key(settings.dagster, topic.name) for topic in stream.topics),
        *(table_key(settings.dagster, name) for name in tables),
    ]


def postgres_assets(topology: Topology, settings: Settings) -> list[dg.AssetSpec]:
    """Every table of PostgreSQL that a stream writes, as an asset that depends on the stream's sources."""
    return [
        dg.AssetSpec(
            postgres_key(settings.dagster, table.name),
            deps=_read_keys(settings, stream),
            group_name=named(settings.dagster, POSTGRES),
            kinds={"postgres"},
            description=table.description or stream.description or f"Written by stream {stream.name}",
            owners=owners(table.owners or stream.owners),
            tags={"recourse/stream": stream.name, "recourse/mode": table.mode},
            metadata={"dagster/column_schema": column_schema(table.schema)} if table.schema is not None else {},
        )
        for stream in topology.streams.values()
        for table in stream.postgres_tables.values()
    ]


def unassigned_assets(topology: Topology, settings: Settings, known: Iterable[SessionSpec]) -> list[dg.AssetSpec]:
    """Tables of streams that no job runs: shown, but not started from here."""
    assigned = {stream.name for session in known for stream in session.streams}
    rest = [stream for stream in topology.streams.values() if stream.name not in assigned]
    return [spec for stream in rest for spec in table_assets(stream, settings, NO_JOB_GROUP)]


def table_assets(stream: Stream, settings: Settings, group: str) -> list[dg.AssetSpec]:
    """The stream's tables; quarantines, late records and dead letters come last, in a separate group."""
    from streaming_jobs.sinks.tables import dead_letters, late_tables, quarantines, store_of

    letters = dead_letters(stream)
    beside = [*quarantines(stream).values(), *late_tables(stream).values(), letters]
    group = named(settings.dagster, group)
    shown = {letters.name: f"Records that stream {stream.name} could not decode, with the reason."}
    return [
        dg.AssetSpec(
            table_key(settings.dagster, table.name),
            deps=_read_keys(settings, stream),
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


def table_keys(topology: Topology, settings: Settings) -> dict[str, list[dg.AssetKey]]:
    """The assets of each stream's tables, as in `table_assets`."""
    key = partial(table_key, settings.dagster)
    return {
        stream.name: [
            *(key(sink.name) for sink in stream.sinks.values()),
            *map(key, (*stream.quarantines.values(), *stream.late_tables.values(), stream.dead_letters)),
        ]
        for stream in topology.streams.values()
    }


def owners(names: Iterable[str]) -> list[str]:
    return [name if "@" in name or name.startswith("team:") else f"team:{name}" for name in names]


def _topic_metadata(topic: KafkaTopic) -> dict[str, Any]:
    found: dict[str, Any] = {"dagster/column_schema": column_schema(topic.records.schema), "topic": topic.name}
    if topic.event_time:
        found |= {"event_time": topic.time_column, "lateness": topic.lateness}
    return found


def _table_metadata(table: DeclaredTable, settings: Settings) -> Mapping[str, Any]:
    path = settings.tables / table.name
    found: dict[str, Any] = {
        "dagster/table_name": table.name,
        "dagster/uri": path.as_uri() if isinstance(path, Path) else path.url,
        **VERSION,
    }
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
