"""The graph of streams: which stream reads what another one writes, through a table or through a topic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from streaming_jobs.declared_table import DeclaredTable
from streaming_jobs.delta_source import DeltaSource
from streaming_jobs.errors import UsageError
from streaming_jobs.spelling import instead
from streaming_jobs.stream import DeltaTable, Stream

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def refuse_cycles(streams: Iterable[Stream]) -> None:
    """Raise UsageError if a stream reads, directly or through others, what it writes; the error names the cycle."""
    every = list(streams)
    into = {stream.name: list(_feeds(stream, every)) for stream in every}
    done: set[str] = set()

    def visit(name: str, path: list[tuple[str, str]]) -> None:
        for through, reader in into[name]:
            begun = [index for index, (each, _) in enumerate(path) if each == reader]
            if begun or reader == name:
                cycle = [*path[begun[0] if begun else len(path) :], (name, through)]
                steps = " -> ".join(f"{each} -> {place}" for each, place in cycle)
                raise UsageError(
                    f"streams read what they write: {steps} -> {reader}",
                    "let one of them read another topic or table, or make the two streams one",
                )
            if reader not in done:
                visit(reader, [*path, (name, through)])
        done.add(name)

    for stream in every:
        if stream.name not in done:
            visit(stream.name, [])


def way(writer: str, reader: str, streams: Iterable[Stream]) -> list[str] | None:
    """The tables and topics through which one stream reads what another one writes, in order; None if it does not."""
    every = {stream.name: stream for stream in streams}
    ways: dict[str, list[str]] = {writer: []}
    waiting = [writer]
    for name in waiting:
        for through, other in _feeds(every[name], every.values()):
            if other not in ways:
                ways[other] = [*ways[name], through]
                waiting.append(other)
    return ways.get(reader) or None


def _feeds(stream: Stream, others: Iterable[Stream]) -> Iterable[tuple[str, str]]:
    """Yields what the stream writes and another one reads: (table or topic, name of the reader)."""
    topics = {sink.name for sink in stream.topic_sinks.values()}
    for other in others:
        for table in other.tables_read:
            if table.name in stream.table_names:
                yield f"table {table.name}", other.name
        for topic in other.topics:
            if topic.name in topics:
                yield f"topic {topic.name}", other.name


def with_columns(stream: Stream, streams: Mapping[str, Stream], writers: Mapping[str, str]) -> Stream:
    """The stream, with the columns of the tables that it reads; raises UsageError for a table that it cannot read."""
    _refuse_without_order(stream)
    sources = {
        parameter: _checked(stream.name, source, streams.get(writers.get(source.name, "")))
        if isinstance(source, DeltaSource)
        else source
        for parameter, source in stream.sources.items()
    }
    same = all(sources[parameter] is source for parameter, source in stream.sources.items())
    return stream if same else replace(stream, sources=sources)


def _refuse_without_order(stream: Stream) -> None:
    """Raise UsageError for an upsert table without `order_by` of a stream that reads a table.

    The content of a table comes in the order of its files, which after a compaction is not that of the writes.
    """
    for sink in stream.sinks.values() if stream.tables_read else ():
        if sink.keys and not sink.order_by:
            table = stream.tables_read[0].name
            raise UsageError(
                f"stream {stream.name} reads table {table} and writes upsert table {sink.name} without order_by: the "
                "rows may come in another order than they were written, so old values could win",
                "name the column that says which row is newer (for totals, their count): DeltaTable(..., order_by=...)",
            )


def _checked(reader: str, source: DeltaSource, writer: Stream | None) -> DeltaSource:
    if writer is None:
        if source.schema is None:
            raise UsageError(
                f"stream {reader} reads table {source.name}, which no stream writes, and its columns are not declared",
                "correct the name, or give the source its schema: DeltaSource(..., schema=...)",
            )
        return source
    table = _written(source.name, writer)
    if table is not None and (table.keys or not isinstance(table, DeltaTable)):
        why = f"is an upsert table (keys {', '.join(table.keys)}): its commits rewrite rows" if table.keys else ""
        raise UsageError(
            f"stream {reader} cannot read table {source.name}, which {why or 'is no Delta table'}",
            f"let {reader} read what {writer.name} reads, or let {writer.name} also write a table without keys",
        )
    if source.name in (each.name for each in writer.deletes):
        raise UsageError(
            f"stream {reader} cannot read table {source.name}: its commits rewrite rows",
            f"read what {writer.name} reads",
        )
    declared = None if table is None else table.schema
    if source.schema is None:
        if declared is None:
            raise UsageError(
                f"stream {reader} reads table {source.name}, whose columns stream {writer.name} does not declare",
                "give that table a schema, or the source: DeltaSource(..., schema=...)",
            )
        return replace(source, schema=declared)
    if declared is not None:
        _same_types(reader, source.name, source.schema, declared)
    return source


def _written(name: str, writer: Stream) -> DeclaredTable | None:
    """The sink of that name; None for the writer's other tables."""
    return next((sink for sink in writer.sinks.values() if sink.name == name), None)


def _same_types(reader: str, table: str, wanted: StructType, declared: StructType) -> None:
    kinds = {field.name: field.dataType for field in declared.fields}
    for field in wanted.fields:
        if field.name not in kinds:
            raise UsageError(
                f"stream {reader} reads column {field.name} of table {table}, which has none of that name",
                instead(field.name, kinds),
            )
        if kinds[field.name].jsonValue() != field.dataType.jsonValue():
            raise UsageError(
                f"stream {reader} reads column {field.name} of table {table} as {field.dataType.simpleString()}, and "
                f"its writer declares {kinds[field.name].simpleString()}",
                "leave the source's schema out, or give the column the writer's type",
            )
