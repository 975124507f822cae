"""The base of a slice: the version of the table that it is rebuilt from, and the records that go with that version.

The slice is made from the records that the stream has read up to that version, and from no later ones: those the stream
adds itself. Kafka's look-up by timestamp gives the lower bound: an event time is at most `max_ahead` after its record's
timestamp. Offsets that are needed and gone from Kafka, or that a recovery has skipped, make the slice impossible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from reprocessing.planning.history import in_lineage
from reprocessing.planning.sliceable import Sliceable
from streaming_jobs.declare.slices import SliceRange
from streaming_jobs.errors import OffsetsLost, PreflightRefused, TransientError, UsageError
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import StoredTable, newest
from streaming_jobs.sinks.tables import existing_table
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.text import commands


class SliceOpen(TransientError):
    """The stream has not closed the slice yet: it will still write rows of it by itself."""


@dataclass(frozen=True)
class Base:
    """A version of the table, the newest entry of the batches in it, and the offsets that the slice is made from."""

    table: StoredTable
    record: StreamRecord
    entry: LedgerEntry
    offsets: OffsetRange

    @property
    def version(self) -> int:
        """The table's version."""
        return self.table.version


def take_base(
    settings: Settings, made: Sliceable, chosen: SliceRange, topics: TopicReader, *, despite_accepted: bool = False
) -> Base:
    """The base as it is now; raises PreflightRefused, OffsetsLost or SliceOpen for a slice that cannot be made.

    `despite_accepted`: a slice may bring back what somebody else has changed, if that was accepted.
    """
    stream = made.stream
    topics = Archives(settings).added_to(topics, stream)
    record = stream_record.load(settings, stream.name)
    if record is None:
        raise UsageError(f"stream {stream.name} has never run", "there is nothing to rebuild")
    primary = _newest(existing_table(settings, stream.primary, stream.name), record)
    table = existing_table(settings, made.table, stream.name)  # opened after the primary: it has all of its batches
    own = _newest(table, record)
    if (accepted := record.accepts(table.name)) and not despite_accepted:
        raise PreflightRefused(
            f"version {', '.join(map(str, sorted(accepted)))} of table {table.name} was changed by somebody else and "
            "accepted: a slice is made from the topic, and brings rows back that were deleted or corrected there",
            "if that is right, say --despite-accepted",
        )
    table.check_one_commit()
    table.check_removable()
    reached = [each for each in (primary, own) if each is not None and each.batch >= 0 and each.offsets]
    if not reached:
        raise UsageError(f"stream {stream.name} has not finished a batch yet", "there is nothing to rebuild")
    entry = max(reached, key=lambda each: each.txn)
    if record.state_fingerprint:
        _refuse_open(settings, made, record, entry, chosen)
    return Base(table, record, entry, _offsets(made, chosen, record, entry, topics))


def column_kind(settings: Settings, made: Sliceable) -> str:
    """The type of the column of slices in the table; raises UsageError for one that it cannot have."""
    from streaming_jobs.declare.slices import COLUMN_TYPES

    table = existing_table(settings, made.table, made.stream.name)
    kinds = {field.name: field.dataType.typeName() for field in table.schema.fields}
    kind = kinds.get(made.slices.column, "missing")
    if kind not in COLUMN_TYPES:
        raise UsageError(
            f"the column of slices of table {table.name}, {made.slices.column}, is {kind}",
            "name a column of dates or timestamps",
        )
    return kind


def late_records(settings: Settings, record: StreamRecord, offsets: OffsetRange) -> int:
    """The records in these offsets that the stream dropped behind its watermark, by the ledger beside the state."""
    late = 0
    for day in ledger_file(settings, record.stream).days(record.stream):
        for line in (each for each in day if b'"late"' in each.text and in_lineage(record.generations, each.txn)):
            entry = line.read().entry
            ranges = (read for read in entry.offsets if read.topic == offsets.topic)
            if any(end > offsets.start.get(p, 0) for read in ranges for p, end in read.end.items()):
                late += entry.rows.get("late", 0)
    return late


def _newest(table: StoredTable, record: StreamRecord) -> LedgerEntry | None:
    """The stream's newest entry on a table as it was opened; refuses one that a recovery or another is changing.

    The stream may commit meanwhile: what the opened version does not have is not the slice's to make.
    """
    commit, foreign = newest((c for c in table.commits() if c.version <= table.version), record.stream)
    for other in foreign:
        if other.version not in record.accepts(table.name):
            raise PreflightRefused(
                f"version {other.version} of table {table.name} ({other.operation}) changed rows and was not written "
                f"by stream {record.stream}",
                f"undo it, or accept it: {commands.accept(record.stream, table.name, other.version)}",
            )
    entry = commit.entry if commit is not None else None
    if entry is None:
        return None
    if entry.kind == "fence" or entry.generation != record.generation:
        raise PreflightRefused(
            f"table {table.name} is in generation {entry.generation}, stream {record.stream} in {record.generation}: "
            f"a recovery is under way{f' (plan {entry.plan})' if entry.plan else ''}",
            f"finish it, or give it up: {commands.plans()}",
        )
    return entry


def _refuse_open(
    settings: Settings, made: Sliceable, record: StreamRecord, entry: LedgerEntry, chosen: SliceRange
) -> None:
    """Raise SliceOpen if a window of the slice may still be open: the watermark has to be past its last window."""
    checkpoint = StreamFolder.of(settings, made.stream.name).checkpoint(record.generation)
    passed = datetime(1970, 1, 1, tzinfo=UTC)
    # The generation of a recovery that skipped ahead has no plan of its first position.
    batch = entry.batch if entry.kind == "batch" else checkpoint.last_committed
    if batch is not None:
        passed += timedelta(milliseconds=int(checkpoint.metadata(batch).get("batchWatermarkMs", 0)))
    if passed < chosen.end + made.slices.distance:
        raise SliceOpen(
            f"the slice {chosen.words} of table {made.table.name} is still open: the watermark of stream "
            f"{made.stream.name} is {passed:%Y-%m-%d %H:%M:%S}Z, the last window of the slice may end at "
            f"{chosen.end + made.slices.distance:%Y-%m-%d %H:%M:%S}Z",
            "the stream writes its rows by itself; rebuild it later, or let the command wait: --wait-closed '1 hour'",
        )


def _offsets(
    made: Sliceable, chosen: SliceRange, record: StreamRecord, entry: LedgerEntry, topics: TopicReader
) -> OffsetRange:
    name, stream = made.topic.name, made.stream.name
    read = next((each for each in entry.offsets if each.topic == name), None)
    bound = record.topic(name)
    info = topics.describe(name)
    if read is None or bound is None:
        raise PreflightRefused(f"the ledger of stream {stream} does not name topic {name}", "start the stream once")
    if info is None or info.id != bound.topic_id:
        raise OffsetsLost(
            f"topic {name} is not the one any more that stream {stream} has read", "put the topic back from a copy"
        )
    held = topics.offsets(name)
    found = _found(made, chosen, topics)
    restarted = any(generation.restarts for generation in record.generations)
    start: dict[int, int] = {}
    for partition, end in read.end.items():
        begun, earliest = bound.start.get(partition, 0), held.earliest.get(partition, 0)
        first = found.get(partition, begun)
        if restarted and first < begun:
            raise PreflightRefused(
                f"a recovery of stream {stream} has begun anew at offset {begun} of topic {name}, partition "
                f"{partition}, and the slice needs offset {first}",
                "rebuild a slice of later records, or the whole table",
            )
        start[partition] = min(max(first, begun), end)
        if begun < earliest and start[partition] <= earliest and start[partition] < end:
            raise OffsetsLost(
                f"the slice needs records from offset {start[partition]} of topic {name}, partition {partition}, on, "
                f"or from before: offsets {begun} to {earliest - 1} are gone",
                "bring them back from a copy of the topic; the table's rows stay as they are",
            )
    _refuse_void(record, name, start, read.end)
    return OffsetRange(name, bound.topic_id, start, dict(read.end))


def _found(made: Sliceable, chosen: SliceRange, topics: TopicReader) -> Mapping[int, int]:
    """By partition the first offset that a record of the slice may have; empty where nothing bounds it."""
    if not made.required or made.event_time != made.topic.time_column or made.topic.ahead is None:
        return {}
    at = chosen.begin - made.slices.distance - made.topic.ahead
    return topics.offsets_for_time(made.topic.name, int(at.timestamp() * 1000))


def _refuse_void(record: StreamRecord, topic: str, start: Mapping[int, int], end: Mapping[int, int]) -> None:
    for void in record.void_ranges:
        partition = int(void["partition"])
        if void["topic"] != topic or partition not in end:
            continue
        if int(void["from"]) < end[partition] and int(void["to"]) > start[partition]:
            raise PreflightRefused(
                f"a recovery of stream {record.stream} has skipped offsets {void['from']} to {int(void['to']) - 1} of "
                f"topic {topic}, partition {partition}, which the slice would be made from",
                "rebuild a slice of other records, or the whole table with a recovery that reads them",
            )


def entry_of(base: Base, name: str, chosen: SliceRange, code: CodeVersion, rows: Mapping[str, int]) -> LedgerEntry:
    """The ledger entry of the slice's commit."""
    return LedgerEntry(
        kind="slice",
        stream=base.record.stream,
        table=base.table.name,
        generation=base.record.generation,
        batch=base.entry.batch,
        offsets=(base.offsets,),
        rows=rows,
        code=code,
        plan=name,
        note=chosen.words,
    )
