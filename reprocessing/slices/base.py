"""What a slice is rebuilt on: a version of the table, and the records that the stream has read up to it.

Read `take_base`. It reads files alone, and refuses what cannot be rebuilt before Spark starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from reprocessing.plan.history import in_lineage
from reprocessing.plan.journal import refuse_under_way
from streaming_jobs.declare.slices import COLUMN_TYPES, SliceRange
from streaming_jobs.errors import OffsetsLost, PreflightRefused, TransientError, UsageError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime.sliceable import Sliceable
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import StoredTable, newest
from streaming_jobs.sinks.tables import existing_table, open_table, quarantines
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.state import stream_record
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import quarantine_name
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.text import commands


class SliceOpen(TransientError):
    """The stream has not closed the slice yet, and will still write rows of it."""


class OffsetsSkipped(PreflightRefused):
    """A recovery of the stream has skipped records that the slice would be made from."""


@dataclass(frozen=True)
class SliceBase:
    """A version of the table, the newest entry of the batches in it, and the offsets that the slice is made from.

    `quarantine` has the rows of these batches too; None if there is none yet.
    """

    table: StoredTable
    quarantine: StoredTable | None
    record: StreamRecord
    entry: LedgerEntry
    offsets: OffsetRange


def take_base(
    settings: Settings, made: Sliceable, chosen: SliceRange, topics: TopicReader, *, despite_accepted: bool = False
) -> SliceBase:
    """The base as it is now; raises PreflightRefused, OffsetsLost or SliceOpen for a slice that cannot be made.

    `despite_accepted`: a slice may revert an accepted change of another writer.
    """
    stream = made.stream
    topics = Archives(settings).added_to(topics, stream)
    record = stream_record.load(settings, stream.name)
    if record is None:
        raise UsageError(f"stream {stream.name} has never run", "there is nothing to rebuild")
    primary = newest_entry(existing_table(settings, stream.primary, stream.name), record)
    table = existing_table(settings, made.table, stream.name)  # opened after the primary: it has all of its batches
    own = newest_entry(table, record)
    aside = quarantines(stream).get(table.name)
    if aside is None and any(bound.name == quarantine_name(table.name) for bound in record.tables):
        raise PreflightRefused(
            f"table {table.name} has a quarantine, and no rule of today sets rows aside: a row would be in both",
            f'keep a rule that sets nothing aside, Holds("true", on_fail="quarantine"), and start stream {stream.name}',
        )
    quarantine = None if aside is None else open_table(settings, aside, stream.name)  # its batches come first
    if quarantine is not None:
        newest_entry(quarantine, record)
    for each in (table, quarantine):
        if each is not None and (accepted := record.accepts(each.name)) and not despite_accepted:
            versions = ", ".join(map(str, sorted(accepted)))
            raise PreflightRefused(
                f"version {versions} of table {each.name} was changed by somebody else and accepted: a slice is made "
                "from the topic, and brings rows back that were deleted or corrected there",
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
    return SliceBase(table, quarantine, record, entry, _offsets(made, chosen, record, entry, topics))


def column_kind(settings: Settings, made: Sliceable) -> str:
    """The type of the column of slices in the table; raises UsageError for one that it cannot have."""
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


def newest_entry(table: StoredTable, record: StreamRecord) -> LedgerEntry | None:
    """The stream's newest entry on a table as it was opened; refuses a table that a recovery or another writer changes.

    The stream may commit meanwhile: what the opened version does not have is not the caller's to change.
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
    if entry is not None:
        refuse_under_way(table.name, entry, record.generation)
        if entry.generation != record.generation:
            raise PreflightRefused(
                f"table {table.name} is in generation {entry.generation}, stream {record.stream} in "
                f"{record.generation}: one of them was put back from a copy",
                "put table and state back from the same copy",
            )
    return entry


def passed_watermark(settings: Settings, record: StreamRecord) -> datetime:
    """The watermark of the last batch that Spark has committed: slices before it are closed."""
    checkpoint = StreamFolder.of(settings, record.stream).checkpoint(record.generation)
    return _watermark_of(checkpoint, checkpoint.last_committed)


def _watermark_of(checkpoint: Checkpoint, batch: int | None) -> datetime:
    ms = 0 if batch is None else int(checkpoint.metadata(batch).get("batchWatermarkMs", 0))
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def _refuse_open(
    settings: Settings, made: Sliceable, record: StreamRecord, entry: LedgerEntry, chosen: SliceRange
) -> None:
    """Raise SliceOpen if a window of the slice may still be open: the watermark has to be past its last window."""
    checkpoint = StreamFolder.of(settings, made.stream.name).checkpoint(record.generation)
    # The generation of a recovery that skipped ahead has no plan of its first position.
    batch = entry.batch if entry.kind == "batch" else checkpoint.last_committed
    passed = _watermark_of(checkpoint, batch)
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
            f"topic {name} is no longer the topic that stream {stream} has read", "put the topic back from a copy"
        )
    held = topics.offsets(name)
    found = _found(made, chosen, topics)
    restarted = any(generation.restarts for generation in record.generations)
    start: dict[int, int] = {}
    for partition, end in read.end.items():
        begun, earliest = bound.start.get(partition, 0), held.earliest.get(partition, 0)
        first = found.get(partition, begun)
        if restarted and first < begun:
            raise OffsetsSkipped(
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
            raise OffsetsSkipped(
                f"a recovery of stream {record.stream} has skipped offsets {void['from']} to {int(void['to']) - 1} of "
                f"topic {topic}, partition {partition}, which the slice would be made from",
                "rebuild a slice of other records, or the whole table with a recovery that reads them",
            )
