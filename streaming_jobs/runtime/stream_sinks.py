"""The sinks of a stream for its batches: made or widened to what its function returns, then opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import structlog

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.columns import SOURCE_COLUMN, checked_columns, checked_keys, checked_order
from streaming_jobs.declare.names import cluster_of
from streaming_jobs.declare.postgres_table import PostgresTable
from streaming_jobs.declare.postgres_table import check_columns as postgres_columns
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import BrokerUnreachable, ConfigurationError, OutputMismatch
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.extras import require
from streaming_jobs.preflight.snapshot import ExternalSnapshot, PostgresSnapshot, ShardsSnapshot, TopicSinkSnapshot
from streaming_jobs.runtime.batch_entries import written
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.settings import Settings, StreamSettings
from streaming_jobs.sinks.base import Companion, Sink, SinkSet, Upkeep, WriteLease
from streaming_jobs.sinks.batches import BatchesSink
from streaming_jobs.sinks.kafka.clients import ClientLost
from streaming_jobs.sinks.kafka.markers import (
    TopicMaker,
    ensure_marker_topic,
    marker_topic,
    read_marker,
    transactional_id,
)
from streaming_jobs.sinks.kafka.output import TopicOutput
from streaming_jobs.sinks.kafka.rows import KnownTopics, TopicLookup, check_columns
from streaming_jobs.sinks.kafka.sharded import ShardedWriter
from streaming_jobs.sinks.kafka.shards import read_shards, shards_topic
from streaming_jobs.sinks.kafka.staged import StagedWriter
from streaming_jobs.sinks.kafka.writer import Clients, Discarded, PlainWriter, Writer
from streaming_jobs.sinks.schemas import (
    BATCHES,
    DEAD_LETTERS,
    LATE_RECORDS,
    POSITION_FIELD,
    TOPICS,
    deletes_of,
    is_position,
    quarantine_of,
)
from streaming_jobs.sinks.stored import StoredTable, no_readers
from streaming_jobs.sinks.tables import all_tables, open_table, store_of
from streaming_jobs.sources.connection import Connection, SessionSchemas, read_client_file
from streaming_jobs.state.stream_folder import local_folder
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.readers import TableReaders
from streaming_jobs.text import commands
from streaming_jobs.text.durations import parse_duration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from streaming_jobs.sinks.postgres.output import PostgresOutput
    from streaming_jobs.sinks.postgres.rows import DiscardedTable


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


def column_changes(settings: Settings, stream: Stream, outputs: Mapping[str, DataFrame]) -> Iterator[str]:
    """Yields what a start with these outputs changes in the columns of the tables, in words."""
    for name, sink in stream.sinks.items():
        if name not in outputs or (table := open_table(settings, sink, stream.name)) is None:
            continue
        known = [field.name for field in table.schema.fields if not is_position(field)]
        output = [field.name for field in _schema(stream, sink.name, outputs).fields if not is_position(field)]
        for column in (column for column in output if column not in known):
            yield f"column {column} of table {sink.name} is new: null in the rows that are there"
        for column in (column for column in known if column not in output):
            yield f"column {column} of table {sink.name} is no longer written: it stays, null in the rows to come"


def sinks_of(
    stream: Stream, tables: Mapping[str, StoredTable], settings: StreamSettings, external: Sequence[Sink] = ()
) -> SinkSet:
    """The tables as the sinks of the stream's batches; `external` sinks are open already."""
    outputs: list[Sink] = []
    deletes, quarantined, late = [], [], []
    for declared in stream.sinks.values():
        remembered = tables[declared.deletes.name] if declared.deletes else None
        aside = tables[stream.quarantines[declared.name]] if declared.name in stream.quarantines else None
        rules = stream.rules_of(declared.name)
        outputs.append(
            tables[declared.name].for_batches(settings, rules=rules, quarantine=aside, deletes_table=remembered)
        )
        if remembered is not None:
            deletes.append(Companion(remembered.for_batches(settings), declared.name, "deletes"))
        if aside is not None:
            quarantined.append(Companion(aside.for_batches(settings), declared.name, "quarantine"))
        if declared.name in stream.late_tables:
            kept = tables[stream.late_tables[declared.name]]
            late.append(Companion(kept.for_batches(settings), declared.name, "late"))
    letters = tables[stream.dead_letters].for_batches(settings)
    primary, *secondary = outputs
    if stream.batches_only:
        primary = BatchesSink(tables[stream.primary.name], lambda txn: written(external, txn))
    return SinkSet(primary, secondary, letters, (*deletes, *quarantined, *late), external, stream.batches_only)


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
        tables[declared.name].upkeep(
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
    """The columns of a table: the function's columns, and the columns that Recourse adds."""
    if table == stream.dead_letters:
        return DEAD_LETTERS
    if table in stream.late_tables.values():
        return LATE_RECORDS
    if stream.batches_only and table == stream.primary.name:
        return BATCHES
    for sink in stream.sinks.values():
        if sink.deletes is not None and sink.deletes.name == table:
            output = _schema(stream, sink.name, outputs)
            checked_order(sink.name, sink.order_by, output)
            return deletes_of(sink, output)
        if stream.quarantines.get(sink.name) == table:
            return quarantine_of(sink.name, _schema(stream, sink.name, outputs))
    sink, frame = next((sink, outputs[name]) for name, sink in stream.sinks.items() if sink.name == table)
    return _columns(stream, sink, frame)


def _columns(stream: Stream, sink: DeclaredTable, frame: DataFrame) -> StructType:
    """The function's columns for a table; with an order and `_source`, the position of each row's record too."""
    from pyspark.sql.types import StructType

    output = StructType([f for f in frame.schema.fields if f.name != SOURCE_COLUMN])
    checked_columns(sink.name, output.fieldNames())
    if sink.order_by and SOURCE_COLUMN in frame.columns:
        if len(stream.sources) > TOPICS:
            raise ConfigurationError(
                f"stream {stream.name} orders table {sink.name} by the positions of {len(stream.sources)} topics, and "
                f"{TOPICS} can be distinguished",
                "leave _source out of the output, so that rows of equal order replace each other as they arrive",
            )
        output = StructType([*output.fields, POSITION_FIELD])
    return output


# The topics and the tables of PostgreSQL that a stream writes: opened as sinks of its batches, or discarded where a
# replay must not write them.

log = structlog.get_logger()


@dataclass(frozen=True)
class SinkOpening:
    """A start of a stream, as far as its external sinks know it; `outputs` are the function's frames by sink.

    `lease` is None where no other driver can be: in a trial, and in tests.
    """

    settings: Settings
    stream: Stream
    generation: int
    connection: Connection
    outputs: Mapping[str, DataFrame] = field(default_factory=dict)
    lease: WriteLease | None = None


class ExternalSinks(Protocol):
    def open(self, start: SinkOpening) -> Sequence[Sink]:
        """The stream's topics and tables of PostgreSQL as sinks, in their order; other writers are fenced from now on.

        Raises OutputMismatch for an output that does not fit, Fenced, ConfigurationError, and errors of the servers.
        """

    def look(self, settings: Settings, stream: Stream, connection: Connection) -> ExternalSnapshot | None:
        """The sinks as they are, for preflight; None if they do not matter."""

    def close(self) -> None:
        """Let go of all clients."""


@dataclass
class ConnectedSinks:
    """The sinks themselves. Opening fences the writers of every earlier start of the stream."""

    _open: dict[str, list[TopicOutput | PostgresOutput]] = field(default_factory=dict, init=False)

    def open(self, start: SinkOpening) -> Sequence[Sink]:
        """Open each sink in the generation."""
        settings, stream, connection = start.settings, start.stream, start.connection
        self._leave(stream.name)
        outputs = self._open.setdefault(stream.name, [])
        for sink in stream.topic_sinks.values():
            output = _output(settings, stream, sink, connection, _writer(settings, stream, sink, connection))
            outputs.append(output)
            if sink.exactly_once:
                name = marker_topic(settings.topic_sink.prefix, stream.name, sink.name)
                ensure_marker_topic(cast("TopicMaker", connection.topics), name, output.topics[sink.name])
            if sink.shards:
                name = shards_topic(settings.topic_sink.prefix, stream.name, sink.name, sink.shards)
                ensure_marker_topic(cast("TopicMaker", connection.topics), name, output.topics[sink.name], sink.shards)
            output.writer.open(start.generation)
            output.remove_leftovers()
            _say(stream, sink, output)
        for name, declared in stream.postgres_tables.items():
            table = _postgres_output(start, name, declared)
            outputs.append(table)
            table.open()
        return outputs

    def look(self, settings: Settings, stream: Stream, connection: Connection) -> ExternalSnapshot | None:
        """Describe each topic and read its marker, and read the ledger of each table of PostgreSQL.

        Raises BrokerUnreachable and DatabaseUnavailable if that takes too long.
        """
        topics = tuple(_snapshot(settings, stream, sink, connection) for sink in stream.topic_sinks.values())
        return ExternalSnapshot(topics, tuple(_looked_at(settings, stream)))

    def close(self) -> None:
        for name in list(self._open):
            self._leave(name)

    def _leave(self, stream: str) -> None:
        for output in self._open.pop(stream, []):
            output.close()


class DiscardedSinks:
    """Sinks that judge every row and write none: for replays beside the running stream."""

    def open(self, start: SinkOpening) -> Sequence[Sink]:
        """Sinks without a producer or a database."""
        settings, stream, connection = start.settings, start.stream, start.connection
        outputs = [_output(settings, stream, s, connection, self.writer(s)) for s in stream.topic_sinks.values()]
        for output in outputs:
            output.writer.open(start.generation)
        return [*outputs, *(self.table(start, name, declared) for name, declared in stream.postgres_tables.items())]

    def table(self, start: SinkOpening, name: str, declared: PostgresTable) -> DiscardedTable:
        """What takes the rows of a table of PostgreSQL."""
        from streaming_jobs.sinks.postgres.rows import DiscardedTable

        schema = _columns(start.stream, declared, start.outputs[name])
        return DiscardedTable(declared, schema, _waiting(start.settings, start.stream))

    def writer(self, sink: KafkaSink) -> Writer:  # noqa: ARG002 - of those that keep what is written
        """What takes the records of a topic."""
        return Discarded()

    def look(self, settings: Settings, stream: Stream, connection: Connection) -> ExternalSnapshot | None:
        """None: nothing is written."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class StagedSinks(DiscardedSinks):
    """Sinks that keep the records of topics in files, in a folder for each topic, and write no topic."""

    folder: Path

    def writer(self, sink: KafkaSink) -> StagedWriter:
        return StagedWriter(self.folder / sink.name, sink.exactly_once)


def check_external(stream: Stream, outputs: Mapping[str, DataFrame]) -> None:
    """Raise OutputMismatch or UsageError for an output that does not fit its topic, or no table of PostgreSQL."""
    for name, sink in stream.topic_sinks.items():
        check_columns(sink, outputs[name])
    for name, table in stream.postgres_tables.items():
        _check_table(table, _columns(stream, table, outputs[name]))


def _check_table(table: PostgresTable, output: StructType) -> None:
    postgres_columns(table.name, output)
    checked_keys(table.name, output, table.keys)
    checked_order(table.name, table.order_by, output)
    there = output.fieldNames()
    if missing := [key for key in table.keys if key not in there]:
        raise OutputMismatch(
            f"the output for the PostgreSQL table {table.name} lacks {', '.join(missing)} of its keys",
            "return the columns of the keys",
        )
    if table.schema is None:
        return
    wanted = {field.name: field.dataType.simpleString() for field in table.schema.fields}
    found = {f.name: f.dataType.simpleString() for f in output.fields if not is_position(f)}
    if wanted != found:
        words = [
            f"{name} {wanted.get(name, '(none)')}, not {found.get(name, '(none)')}"
            for name in {**wanted, **found}
            if wanted.get(name) != found.get(name)
        ]
        raise OutputMismatch(
            f"the output for the PostgreSQL table {table.name} differs from its schema: {'; '.join(words)}",
            "correct the schema or the function",
        )


def _postgres_output(start: SinkOpening, name: str, declared: PostgresTable) -> PostgresOutput:
    require("postgres-sink", f"table {declared.name} of stream {start.stream.name}")
    from streaming_jobs.sinks.postgres.output import PostgresOutput

    stream = start.stream.name
    return PostgresOutput(
        declared,
        _columns(start.stream, declared, start.outputs[name]),
        _waiting(start.settings, start.stream),
        stream,
        start.generation,
        start.settings.postgres,
        start.lease,
        before_commit=lambda batch: crash_point("transaction_open", stream, batch),
    )


def _looked_at(settings: Settings, stream: Stream) -> Iterator[PostgresSnapshot]:
    if not stream.postgres_tables:
        return
    require("postgres-sink", f"stream {stream.name}")
    from streaming_jobs.sinks.postgres.ledger import look

    for declared in stream.postgres_tables.values():
        exists, row = look(settings.postgres, stream.name, declared.name)
        entry, owner = (None, None) if row is None else (row.entry, row.stream)
        yield PostgresSnapshot(declared.ledger_name, declared.name, exists, entry, owner)


def _snapshot(settings: Settings, stream: Stream, sink: KafkaSink, connection: Connection) -> TopicSinkSnapshot:
    info, own = connection.topics.describe(sink.name), settings.topic_sink
    if not sink.exactly_once:
        return TopicSinkSnapshot(sink.ledger_name, sink.name, info, exactly_once=False, acks=own.acks)
    name, marker = marker_topic(own.prefix, stream.name, sink.name), None
    shards: tuple[ShardsSnapshot, ...] = ()
    marker_info = connection.topics.describe(name)
    try:
        if marker_info is not None:
            config, _ = read_client_file(connection.client, sink.name)
            key = transactional_id(own.prefix, stream.name, sink.name)
            marker = read_marker(config, name, key, settings.kafka.of(sink.name).timeout)
        shards = tuple(_shards(settings, stream, sink, connection, marked=0 if marker is None else marker.shards))
    except ClientLost as lost:
        raise BrokerUnreachable(
            f"the marker of topic {sink.name} cannot be read: {lost}", f"check the broker (`{commands.doctor()}`)"
        ) from lost
    entry = None if marker is None else marker.entry
    return TopicSinkSnapshot(
        sink.ledger_name,
        sink.name,
        info,
        exactly_once=True,
        marker_topic=name,
        marker=entry,
        marker_info=marker_info,
        shards=shards,
        declared_shards=sink.shards or 0,
    )


def _shards(
    settings: Settings, stream: Stream, sink: KafkaSink, connection: Connection, *, marked: int
) -> Iterator[ShardsSnapshot]:
    """The marker's shards, and the shards of the declared number, if they have markers."""
    own = settings.topic_sink
    for count in sorted({marked, sink.shards or 0} - {0}):
        name = shards_topic(own.prefix, stream.name, sink.name, count)
        there, newest = connection.topics.describe(name), dict[int, LedgerEntry | None].fromkeys(range(count))
        if there is not None:
            config, _ = read_client_file(connection.client, sink.name)
            newest = dict(read_shards(config, stream.name, sink.name, own, count))
        if there is not None or count == marked:
            yield ShardsSnapshot(name, newest, marked=count == marked)


def _output(settings: Settings, stream: Stream, sink: KafkaSink, connection: Connection, writer: Writer) -> TopicOutput:
    lookup = cast("TopicLookup", connection.topics)
    declared = sink.bound(SessionSchemas(connection.client))
    if declared is not sink:
        declared.topic.value.writer()  # type: ignore[attr-defined]  # refuses a schema that is not registered
    return TopicOutput(
        declared=declared,
        stream=stream.name,
        settings=settings.topic_sink,
        writer=writer,
        topics=KnownTopics(lookup, settings.topic_sink, _forbidden(settings, stream, sink), cluster_of(sink.name)),
        folder=_waiting(settings, stream),
    )


def _waiting(settings: Settings, stream: Stream) -> Path:
    """The folder in which large batches for topics wait: of the primary table, or, if that is on a store, of state."""
    table = settings.tables / stream.primary.name
    return table if isinstance(table, Path) else local_folder(settings) / stream.name


def _forbidden(settings: Settings, stream: Stream, sink: KafkaSink) -> dict[str, str]:
    """The topics that rows of a sink may not name, each with the reason; empty if its rows name none."""
    if sink.route is None:
        return {}
    written = Topology.load(settings.flows).topics_written | {s.name: stream.name for s in stream.topic_sinks.values()}
    owners = {topic: owner for topic, owner in written.items() if topic != sink.name}
    writers = {
        topic: "is written by another sink of the stream" if owner == stream.name else f"is written by stream {owner}"
        for topic, owner in owners.items()
    }
    return writers | {topic.name: "is read by the stream" for topic in stream.topics}


def _writer(settings: Settings, stream: Stream, sink: KafkaSink, connection: Connection) -> Writer:
    config, _ = read_client_file(connection.client, sink.name)
    name, clients = sink.ledger_name, Clients(config)
    if not sink.exactly_once:
        return PlainWriter(stream.name, name, sink.name, settings.topic_sink, clients)
    writer = ShardedWriter(stream.name, name, sink.name, settings.topic_sink, clients)
    writer.shards, writer.client = sink.shards or 0, connection.client
    writer.code = loaded_code(stream, settings.flows)
    writer.before_commit = lambda batch: crash_point("transaction_open", stream.name, batch)
    return writer


def _say(stream: Stream, sink: KafkaSink, output: TopicOutput) -> None:
    info = output.topics[sink.name]
    if info is not None:
        log.info(
            "topic opened",
            stream=stream.name,
            topic=sink.name,
            delivery=sink.delivery,
            shards=sink.shards or 0,
            acks="all" if sink.exactly_once else output.settings.acks,
            replicas=info.replicas,
            min_insync_replicas=info.min_insync_replicas,
            max_message_bytes=info.max_message_bytes,
        )
