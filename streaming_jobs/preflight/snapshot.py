"""The state of a stream at one moment, as `take_snapshot` reads it: record, checkpoint, tables and topics."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from streaming_jobs.catalog.archive import is_archive
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import OffsetsLost, PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import Archived, TopicOffsets
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import Commit, Role, newest
from streaming_jobs.sinks.tables import all_tables, open_table, store_of
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state import stream_record, topic_records
from streaming_jobs.state.checkpoint import Checkpoint, CheckpointDamaged
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.state.topic_records import VoidRange
from streaming_jobs.stream import KafkaTopic, Stream, StreamSource
from streaming_jobs.table_sources.topics import versions_of
from streaming_jobs.text import commands


@dataclass(frozen=True)
class TableSnapshot:
    """One sink's table: `entry` is the stream's newest ledger entry, `foreign` later commits of others.

    If the table's log no longer reaches back to that entry, `entry` comes from the ledger file beside the state.
    """

    name: str
    role: Role
    table_id: str | None
    owner: str | None
    txn: Txn | None
    entry: LedgerEntry | None = None
    foreign: tuple[Commit, ...] = ()
    log_reaches_entry: bool = True


@dataclass(frozen=True)
class TopicSnapshot:
    """One source topic as the broker describes it now; `topic_id` is None if it does not exist.

    With an archive, `earliest` is the first offset that can be read, there or in Kafka. A table that the stream reads
    is a topic too (`kind`); its offsets are versions, and `continues` is as in `OffsetBounds`. With `content_gone` the
    planned batch reads the table's content at a version, and that can no longer be read. A `compacted` topic keeps only
    the newest record of each key. `void_since` are the void ranges that were declared after the stream's last batch.
    """

    name: str
    topic_id: str | None
    earliest: Mapping[int, int] = field(default_factory=dict)
    latest: Mapping[int, int] = field(default_factory=dict)
    retention_ms: int = -1
    archived: Archived | None = None
    continues: Mapping[int, int] = field(default_factory=dict)
    kind: Literal["topic", "table"] = "topic"
    content_gone: int | None = None
    compacted: bool = False
    void_since: tuple[VoidRange, ...] = ()


@dataclass(frozen=True)
class ShardsSnapshot:
    """The newest batch of each shard of a topic, for one number of shards; `topic` has their markers.

    `marked`: the marker of the sink speaks of them.
    """

    topic: str
    newest: Mapping[int, LedgerEntry | None]
    marked: bool = True


@dataclass(frozen=True)
class TopicSinkSnapshot:
    """One topic that the stream writes: `info` is None if it does not exist, `marker` is its newest batch's entry.

    `marker_info` is the topic of the marker, None without one. `name` is the sink's name in ledger entries. `shards`
    are the marker's shards, and the shards of the declared number, if the number differs.
    """

    name: str
    topic: str
    info: TopicInfo | None
    exactly_once: bool
    acks: str = "all"
    marker_topic: str = ""
    marker: LedgerEntry | None = None
    marker_info: TopicInfo | None = None
    shards: tuple[ShardsSnapshot, ...] = ()
    declared_shards: int = 0

    @property
    def written_id(self) -> str | None:
        """The id of the topic that the newest batch was written to; None if it wrote nothing to it."""
        written = self.marker.written if self.marker is not None else ()
        return next((each.topic_id for each in written if each.topic == self.topic and each.topic_id), None)

    @property
    def marker_topics(self) -> str:
        """The topics that say which batches the topic has, in words."""
        names = [self.marker_topic, *(shards.topic for shards in self.shards)]
        return f"marker topic{'s' * (len(names) > 1)} {', '.join(names)}"


@dataclass(frozen=True)
class PostgresSnapshot:
    """One table of PostgreSQL that the stream writes: the entry of its newest batch, and the stream that it is of.

    Both are None without a row in the ledger. `name` is the sink's name in ledger entries.
    """

    name: str
    table: str
    exists: bool
    marker: LedgerEntry | None
    owner: str | None


@dataclass(frozen=True)
class ExternalSnapshot:
    """The stream's sinks outside of the store of its tables."""

    topics: tuple[TopicSinkSnapshot, ...] = ()
    postgres: tuple[PostgresSnapshot, ...] = ()


@dataclass(frozen=True)
class CheckpointSnapshot:
    """The checkpoint: last planned and last committed batch, the ends of both, the start of the planned one."""

    planned: int | None = None
    committed: int | None = None
    ends: Mapping[int, TopicOffsets] = field(default_factory=dict)
    starts: Mapping[int, TopicOffsets] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamSnapshot:
    """All input of `check_start`; `folders` are the stream's state folder and its tables."""

    stream: str
    record: StreamRecord | None
    checkpoint: CheckpointSnapshot
    tables: tuple[TableSnapshot, ...]
    topics: tuple[TopicSnapshot, ...]
    folders: tuple[Path, ...] = ()
    topic_sinks: tuple[TopicSinkSnapshot, ...] = ()
    postgres_tables: tuple[PostgresSnapshot, ...] = ()
    external_known: bool = False
    """False if the stream's sinks outside of the store of its tables were not examined, as in a replay."""

    @property
    def start_over(self) -> str:
        """The last resort, as the next step of an error."""
        return start_over(self.stream, self.folders)

    def write_again(self, sink: TopicSinkSnapshot) -> str:
        """The ways to write all records of a topic once more, with their cost: its markers have to go with it."""
        return (
            f"declare a new stream with a new output topic; or delete topic {sink.topic} and its "
            f"{sink.marker_topics} together, create {sink.topic} again, and {self.start_over}. In both cases the "
            f"records that are in {sink.topic} now are written again"
        )


def start_over(stream: str, folders: Sequence[Path] = ()) -> str:
    """The instruction to start a stream over, with its cost; `folders` are its state and its tables."""
    places = " ".join(shlex.quote(str(folder)) for folder in folders) or "its state folder and its tables"
    return (
        f"start the stream over: move {places} away (readers lose these rows until the topic is read again) and run "
        f"`{commands.run(stream)}`"
    )


def restore_checkpoint(stream: str, folders: Sequence[Path] = ()) -> str:
    """The instruction to restore a checkpoint that cannot be trusted, as the next step of an error."""
    return (
        "put the checkpoint folder back from the newest copy, taken together with the tables; without one, "
        f"{start_over(stream, folders)}"
    )


# Reading a stream's snapshot for preflight: checkpoint, tables and topics as they are now. Needs no JVM.

_DAMAGED: tuple[type[Exception], ...] = (PreflightRefused, ValueError, TypeError, AttributeError, KeyError)
"""Exceptions that a damaged log of a table raises, in any store."""


def take_snapshot(settings: Settings, stream: Stream, topics: TopicReader) -> StreamSnapshot:
    """The stream's snapshot, as it is now.

    Raises PreflightRefused for a damaged checkpoint or table, BrokerUnreachable without a broker.
    """
    try:
        record = stream_record.load(settings, stream.name)
        checkpoint = StreamFolder.of(settings, stream.name).checkpoint(record.generation if record else 1)
        checkpoint.check()
        at = _checkpoint(checkpoint)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(error.found, restore_checkpoint(stream.name, folders(settings, stream))) from error
    return StreamSnapshot(
        stream=stream.name,
        record=record,
        checkpoint=at,
        folders=folders(settings, stream),
        tables=tuple(_tables(settings, stream)),
        topics=tuple(
            replace(
                found,
                content_gone=_content_gone(settings, stream, found.name, at),
                void_since=_void_since(settings, stream, found),
            )
            for found in (_topic(topics, source) for source in stream.sources.values())
        ),
    )


def folders(settings: Settings, stream: Stream) -> tuple[Path, ...]:
    """The folders of the stream's state and tables."""
    places = (settings.tables / declared.name for declared, _ in all_tables(stream))
    state = StreamFolder.of(settings, stream.name).path
    return tuple(each for each in (state, *places) if isinstance(each, Path))


def ledger_file(settings: Settings, stream: str) -> LedgerFile:
    return LedgerFile(StreamFolder.of(settings, stream).ledger, settings.table.ledger_retention)


def is_compacted(info: TopicInfo) -> bool:
    """True if the log cleaner of a topic removes records that have a later one with the same key."""
    return "compact" in info.cleanup_policy


def _checkpoint(checkpoint: Checkpoint) -> CheckpointSnapshot:
    planned, committed = checkpoint.last_planned, checkpoint.last_committed
    known = {batch for batch in (planned, committed) if batch is not None}
    return CheckpointSnapshot(
        planned=planned,
        committed=committed,
        ends={batch: checkpoint.end(batch) for batch in known},
        starts={planned: checkpoint.start(planned)} if planned is not None else {},
    )


def _tables(settings: Settings, stream: Stream) -> Iterable[TableSnapshot]:
    recorded = ledger_file(settings, stream.name).newest(stream.name)
    for declared, role in all_tables(stream):
        store = store_of(declared)
        try:
            yield _table(settings, stream.name, declared, role, recorded)
        except (*_DAMAGED, *store.faults) as error:
            raise PreflightRefused(
                f"the log of table {declared.name} cannot be read: {str(getattr(error, 'found', error))[:300]}",
                f"put {store.log_place(settings, declared)} back from a copy; or "
                f"{start_over(stream.name, folders(settings, stream))}",
            ) from error


def _table(
    settings: Settings,
    stream: str,
    declared: DeclaredTable,
    role: Role,
    recorded: tuple[LedgerEntry, Mapping[str, int]] | None,
) -> TableSnapshot:
    table = open_table(settings, declared, stream)
    if table is None:
        return TableSnapshot(declared.name, role, None, None, None)
    position = table.position
    commit, foreign = newest(table.commits(), stream)
    entry: LedgerEntry | None = commit.entry if commit else None
    reaches = True
    if commit is None:
        since = recorded[1].get(declared.name, -1) if recorded else -1
        foreign = [c for c in foreign if c.version > since]
        oldest = min((c.version for c in table.commits()), default=table.version + 1)
        reaches = oldest <= since + 1
        if recorded and role == "primary":
            entry = recorded[0]
    return TableSnapshot(
        name=declared.name,
        role=role,
        table_id=table.table_id,
        owner=table.owner,
        txn=position,
        entry=entry,
        foreign=tuple(foreign),
        log_reaches_entry=reaches,
    )


def _content_gone(settings: Settings, stream: Stream, name: str, at: CheckpointSnapshot) -> int | None:
    """The version of a table whose content the planned batch reads, if it is gone; None if it reads none, or can."""
    if at.planned is None or at.planned == at.committed or name not in {table.name for table in stream.tables_read}:
        return None
    start, end = (each[at.planned].get(name, {}).get(0, 0) for each in (at.starts, at.ends))
    versions = versions_of(settings, stream, name)
    if start > 0 or end == 0 or versions.newest() is None:
        return None
    try:
        files = versions.content(end - 1).files
    except OffsetsLost:
        return end - 1
    return end - 1 if any(versions.on_disk(file.path) is None for file in files) else None


def _void_since(settings: Settings, stream: Stream, topic: TopicSnapshot) -> tuple[VoidRange, ...]:
    """The ranges of a topic that hold and were declared after the stream's last batch; an archive reads void records.

    A downstream stream of a recovery has batches of the replay after the ranges.
    """
    record = None if topic.kind == "table" or is_archive(stream) else topic_records.load(settings, topic.name)
    if record is None or record.topic_id != topic.topic_id:
        return ()
    last = ledger_file(settings, stream.name).after(stream.name, None, at_most=1)
    return tuple(
        each for each in record.holding_ranges() if last and each.at > last[0].at and stream.name not in each.left
    )


def _topic(topics: TopicReader, source: StreamSource) -> TopicSnapshot:
    name = source.name
    kind: Literal["topic", "table"] = "topic" if isinstance(source, KafkaTopic) else "table"
    info = topics.describe(name)
    if info is None:
        return TopicSnapshot(name, None, kind=kind)
    offsets = topics.offsets(name)
    return TopicSnapshot(
        name,
        info.id,
        offsets.earliest,
        offsets.latest,
        info.retention_ms,
        offsets.archived,
        offsets.continues,
        kind,
        compacted=is_compacted(info),
    )
