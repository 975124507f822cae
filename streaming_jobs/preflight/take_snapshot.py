"""Reading a stream's snapshot for preflight: checkpoint, tables and topics as they are now. Needs no JVM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from streaming_jobs.archives.declaration import is_archive
from streaming_jobs.declared_table import DeclaredTable
from streaming_jobs.errors import OffsetsLost, PreflightRefused
from streaming_jobs.ledger import LedgerEntry
from streaming_jobs.preflight.snapshot import (
    CheckpointSnapshot,
    StreamSnapshot,
    TableSnapshot,
    TopicSnapshot,
    restore_checkpoint,
    start_over,
)
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import Role, newest
from streaming_jobs.sinks.tables import all_tables, open_table, store_of
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state import stream_record, topic_records
from streaming_jobs.state.checkpoint import Checkpoint, CheckpointDamaged
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.topic_records import VoidRange
from streaming_jobs.stream import KafkaTopic, Stream, StreamSource
from streaming_jobs.table_sources.table_topics import versions_of

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
    """The stream's state folder and its tables."""
    return (
        StreamFolder.of(settings, stream.name).path,
        *(settings.tables / declared.name for declared, _ in all_tables(stream)),
    )


def ledger_file(settings: Settings, stream: str) -> LedgerFile:
    """The stream's ledger beside its state."""
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

    A stream that a recovery takes along has batches of the replay after the ranges.
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
