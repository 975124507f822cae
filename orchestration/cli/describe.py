"""`recourse streams describe`: the topology as text, JSON, Mermaid flowchart or picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestration.cli.options import AnyStreams, invocation
from orchestration.cli.text import Output, OutputOption, say, show

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from streaming_jobs.declare.table import DeclaredTable
    from streaming_jobs.stream import Stream


def describe(
    context: typer.Context,
    names: AnyStreams = None,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print it as a Mermaid flowchart.")] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it as an SVG file.", show_default=False)
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Print the topology: sources, stream, sinks; the writers of its sources, and the readers of its sinks."""
    from streaming_jobs.catalog.graph import Graph, draw
    from streaming_jobs.catalog.graph import describe as text
    from streaming_jobs.catalog.graph import mermaid as flowchart
    from streaming_jobs.storage.files import write_atomic

    topology = invocation(context).topology
    selected = topology.select(names or [])
    graph = Graph.of(selected)
    if svg is not None:
        write_atomic(svg.absolute(), draw(graph))
        say(f"the topology is in {svg}")
    elif mermaid:
        print(flowchart(graph), end="")
    else:
        show(output, [_description(stream) for stream in selected], lambda: print(text(topology, names or []), end=""))


def _description(stream: Stream) -> dict[str, Any]:
    from streaming_jobs.stream import KafkaTopic

    return {
        "stream": stream.name,
        "description": stream.description,
        "owners": list(stream.owners),
        "sources": [
            {
                "topic" if isinstance(source, KafkaTopic) else "table": source.name,
                "parameter": parameter,
                "event_time": source.time_column,
                "lateness": source.lateness,
                "max_ahead": source.max_ahead if source.event_time else None,
                **({"tombstones": source.tombstones} if isinstance(source, KafkaTopic) else {}),
                "columns": _columns(source.records.schema if isinstance(source, KafkaTopic) else source.columns),
            }
            for parameter, source in stream.sources.items()
        ],
        "lookups": [
            {"table": each.name, "parameter": parameter, "path": each.path, "columns": _columns(each.columns)}
            for parameter, each in stream.lookups.items()
        ],
        "sinks": [
            {
                **_table(table),
                "role": "primary" if table is stream.primary else "secondary",
                "partition_by": list(table.partition_by),
                "rules": [
                    {"name": rule.name, "on_fail": rule.on_fail, "broken_if": rule.words}
                    for rule in stream.rules_of(table.name).rules
                ],
                "quarantine": stream.quarantines.get(table.name),
                "late": stream.late_tables.get(table.name),
            }
            for table in stream.sinks.values()
        ],
        "topic_sinks": [
            {"topic": sink.name, **sink.options, "columns": _columns(sink.topic.value.schema)}
            for sink in stream.topic_sinks.values()
        ],
        "postgres_tables": [_table(table) for table in stream.postgres_tables.values()],
        "dead_letters": stream.dead_letters,
        "errors": asdict(stream.errors),
    }


def _table(table: DeclaredTable) -> dict[str, Any]:
    from streaming_jobs.declare.table import emits

    return {
        "table": table.name,
        "mode": table.mode,
        "emit": emits(table),
        "keys": list(table.keys),
        "order_by": list(table.order_by),
        "delete_when": table.delete_when,
        "deletes": table.deletes.name if table.deletes is not None else None,
        "columns": _columns(table.schema) if table.schema is not None else None,
    }


def _columns(schema: StructType) -> list[dict[str, Any]]:
    return [{"name": f.name, "type": f.dataType.simpleString(), "nullable": f.nullable} for f in schema.fields]
