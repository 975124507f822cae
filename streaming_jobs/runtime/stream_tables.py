"""The tables of a stream for its batches: made or widened to what its function returns, then opened as sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from streaming_jobs.columns import SOURCE_COLUMN, checked_columns, checked_order
from streaming_jobs.durations import parse_duration
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.runtime.batch_counts import written
from streaming_jobs.settings import Settings, StreamSettings
from streaming_jobs.sinks.base import Sink, SinkSet, Upkeep
from streaming_jobs.sinks.schemas import (
    BATCHES,
    DEAD_LETTERS,
    POSITION_FIELD,
    TOPICS,
    quarantine_of,
    remembered_deletes,
)
from streaming_jobs.sinks.stored import StoredTable, no_readers
from streaming_jobs.sinks.tables import all_tables, store_of
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.readers import TableReaders

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


def make_tables(
    settings: Settings, stream: Stream, outputs: Mapping[str, DataFrame], generation: int
) -> dict[str, StoredTable]:
    """Every table of the stream by its name, made or widened; `outputs` are the function's frames by sink.

    Raises OutputMismatch, ConfigurationError and UsageError for an output that its table cannot hold.
    """
    return {
        declared.name: store_of(declared).ensure(
            settings, declared, stream.name, _schema(stream, declared.name, outputs), generation=generation
        )
        for declared, _ in all_tables(stream)
    }


def check_tables(settings: Settings, stream: Stream, outputs: Mapping[str, DataFrame]) -> None:
    """Raise what `make_tables` would raise for these outputs; makes and changes nothing."""
    for declared, _ in all_tables(stream):
        store_of(declared).check_output(settings, declared, stream.name, _schema(stream, declared.name, outputs))


def sinks_of(
    stream: Stream, tables: Mapping[str, StoredTable], settings: StreamSettings, topics: Sequence[Sink] = ()
) -> SinkSet:
    """The tables as the sinks of the stream's batches; `topics` are open already."""
    outputs, deletes, quarantines = [], {}, {}
    for declared in stream.sinks.values():
        store, remembered = store_of(declared), tables[declared.deletes.name] if declared.deletes else None
        aside = tables[stream.quarantines[declared.name]] if declared.name in stream.quarantines else None
        rules = stream.rules_of(declared.name)
        outputs.append(store.sink(tables[declared.name], settings, remembered, rules=rules, quarantine=aside))
        if remembered is not None:
            deletes[declared.name] = store.sink(remembered, settings)
        if aside is not None:
            quarantines[declared.name] = store.sink(aside, settings)
    letters = store_of(stream.primary).dead_letter_sink(tables[stream.dead_letters], settings)
    primary, *secondary = outputs
    if stream.topics_only:
        batches = tables[stream.primary.name]
        primary = store_of(stream.primary).batches_sink(batches, settings, lambda txn: written(topics, txn))
    return SinkSet(primary, secondary, letters, deletes, quarantines, topics, stream.topics_only)


def upkeep_of(
    stream: Stream, tables: Mapping[str, StoredTable], settings: Settings, generation: int, *, replay: bool = False
) -> list[Upkeep]:
    """The upkeep of every table.

    What streams that read a table still need stays. The staging tables of a `replay` have no readers; those of tables
    that have some are not compacted, so that a publish can tell the rows of new records from the others.
    """
    readers = {
        declared.name: TableReaders.of(settings, declared.name, tables[declared.name].table_id)
        for declared, _ in all_tables(stream)
    }
    forgets = {table.name: parse_duration(table.deletes_kept) for table in stream.deletes}
    return [
        store_of(declared).upkeep(
            tables[declared.name],
            settings.table.model_copy(update={"compact_after_files": 0})
            if replay and readers[declared.name].names
            else settings.table,
            generation=generation,
            forgets=forgets.get(declared.name),
            unread=no_readers if replay else readers[declared.name].needs,
        )
        for declared, _ in all_tables(stream)
    ]


def _schema(stream: Stream, table: str, outputs: Mapping[str, DataFrame]) -> StructType:
    """The columns of a table: what the function returns for it, and those that Recourse adds."""
    from pyspark.sql.types import StructType

    if table == stream.dead_letters:
        return DEAD_LETTERS
    if stream.topics_only and table == stream.primary.name:
        return BATCHES
    for sink in stream.sinks.values():
        if sink.deletes is not None and sink.deletes.name == table:
            output = _schema(stream, sink.name, outputs)
            checked_order(sink.name, sink.order_by, output)
            return remembered_deletes(sink, output)
        if stream.quarantines.get(sink.name) == table:
            return quarantine_of(sink.name, _schema(stream, sink.name, outputs))
    sink, frame = next((sink, outputs[name]) for name, sink in stream.sinks.items() if sink.name == table)
    output = StructType([f for f in frame.schema.fields if f.name != SOURCE_COLUMN])
    checked_columns(table, output.fieldNames())
    if sink.order_by and SOURCE_COLUMN in frame.columns:
        if len(stream.sources) > TOPICS:
            raise ConfigurationError(
                f"stream {stream.name} orders table {table} by the positions of {len(stream.sources)} topics, and "
                f"{TOPICS} can be distinguished",
                "leave _source out of the output, so that rows of equal order replace each other as they arrive",
            )
        output = StructType([*output.fields, POSITION_FIELD])
    return output
