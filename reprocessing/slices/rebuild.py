"""The rebuild of one slice, from the records to the commit. Read `rebuild`; it works in this order.

1. The base: the table's version, and the records that the stream has read up to that version; the stream adds later
   records itself. Kafka's look-up by timestamp gives the lower bound: an event time is at most `max_ahead` after its
   record's timestamp. If needed offsets are gone from Kafka, or a recovery has skipped them, the slice is impossible.
2. The stream's own function on a batch read of these records; its rows are staged beside the table.
3. The difference from the rows that are there. If there is none, or it is a dry run, it ends here.
4. The change waits as a file beside the stream's state. The stream's driver commits it at its next batch border; if no
   driver runs, this process takes the stream's lease and commits it itself.
5. If the table was compacted meanwhile, the slice is rebuilt on the newest version, a few times.

A kill at any moment leaves the table with the old slice or with the new one; the next rebuild removes staged files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from reprocessing.plan.history import in_lineage
from reprocessing.plan.journal import refuse_under_way
from reprocessing.replay.commit_wait import committed_or_withdrawn
from reprocessing.replay.difference import Difference, compare
from streaming_jobs.declare.slices import COLUMN_TYPES, SliceRange, slice_range
from streaming_jobs.errors import CommitRefused, LeaseBusy, OffsetsLost, PreflightRefused, TransientError, UsageError
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.platform.failures import classify, function_raised
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.preflight.truncated_files import repair
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.crash_points import crash_point
from streaming_jobs.runtime.slice_commits import carry_out
from streaming_jobs.runtime.sliceable import Sliceable, check_plan
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.sliced import Rebuilt, StagedSlice, sliced
from streaming_jobs.sinks.stored import StoredTable, newest
from streaming_jobs.sinks.tables import existing_table, open_tables
from streaming_jobs.sources.base import Aside, TopicReader
from streaming_jobs.sources.connection import client_file, remove_client_file
from streaming_jobs.state import stream_record
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.lease import take
from streaming_jobs.state.set_aside import of_letters
from streaming_jobs.state.slice_requests import SliceCommitRequest, SliceRequests
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_history import note_slice
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.storage.locations import local_scratch
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession


_TRIES = 5
_MARGIN = 60.0
"""Seconds after the end of the wait for which a waiting change is still valid: the wait ends, then it is withdrawn."""


class SliceOpen(TransientError):
    """The stream has not closed the slice yet, and will still write rows of it."""


class OffsetsSkipped(PreflightRefused):
    """A recovery of the stream has skipped records that the slice would be made from."""


@dataclass(frozen=True)
class SliceBase:
    """A version of the table, the newest entry of the batches in it, and the offsets that the slice is made from."""

    table: StoredTable
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
    return SliceBase(table, record, entry, _offsets(made, chosen, record, entry, topics))


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


def note_lost(settings: Settings, made: Sliceable, day: str, why: str) -> None:
    """Keep as an outcome that the slice of a day cannot be rebuilt, since records that it needs are gone."""
    record = stream_record.load(settings, made.stream.name)
    assert record is not None, "a stream without one is refused before"
    chosen, name = slice_range(made.slices, "timestamp", day, None), _name(made, 0)
    entry = LedgerEntry("slice", made.stream.name, made.table.name, record.generation, -1, plan=name, note=chosen.words)
    lost = SliceCommitRequest(
        id=name,
        stream=made.stream.name,
        table=made.table.name,
        entry=entry.encode(),
        change={},
        expires=0.0,
        summary={"slice": chosen.words},
        begin=chosen.begin.timestamp(),
        end=chosen.end.timestamp(),
    )
    SliceRequests.of(settings, made.stream.name).end(lost.ended("failed", reason=why))


def entry_of(base: SliceBase, name: str, chosen: SliceRange, code: CodeVersion, rows: Mapping[str, int]) -> LedgerEntry:
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


Tell = Callable[[str], None]


@dataclass(frozen=True)
class Waits:
    """Waits in seconds: for another rebuild of the stream, for the slice to be closed, and for the commit."""

    other: float = 600.0
    closed: float = 0.0
    commit: float = 300.0


@dataclass(frozen=True)
class Tools:
    """The services of a rebuild: settings, topics and their address, Spark when it is needed, and words for people."""

    settings: Settings
    topics: TopicReader
    bootstrap: str
    spark: Callable[[], SparkSession]
    tell: Tell = lambda _: None
    waits: Waits = Waits()
    despite_accepted: bool = False


@dataclass(frozen=True)
class SliceReport:
    """The outcome of one rebuild. `version` is that of the commit; None without one: `outcome` says why.

    `late` are the records, of all those that were read (`offsets`), that the stream had dropped behind its watermark.
    """

    id: str
    stream: str
    table: str
    words: str
    outcome: str
    base: int
    version: int | None
    records: int
    taken_out: int
    refused: int
    late: int
    tries: int
    seconds: float
    difference: Difference
    offsets: OffsetRange

    @property
    def text(self) -> str:
        rows = f"{self.difference.old_rows:,} rows before, {self.difference.new_rows:,} after"
        return f"slice {self.words} of table {self.table} rebuilt as version {self.version}: {rows}"

    @property
    def figures(self) -> dict[str, int]:
        """The numbers of the slice's rows by their names."""
        difference = self.difference
        return {
            "rows_before": difference.old_rows,
            "rows_after": difference.new_rows,
            **difference.counts._asdict(),
        }


@dataclass(frozen=True)
class CheckedLetters:
    """Dead letters of the slice's topic, by partition and offset, that the code of today was run on already.

    A slice is made without the records on which the function raised, by their dead letters. The `accepted` ones are
    read all the same, the `rejected` ones are left out too.
    """

    accepted: Set[tuple[int, int]] = frozenset()
    rejected: Set[tuple[int, int]] = frozenset()

    def aside(self, letters: Aside) -> Aside:
        """What a slice is made without."""
        return {place: None for place in (*letters, *self.rejected) if place not in self.accepted}


NO_LETTERS = CheckedLetters()


def slice_offsets(tools: Tools, made: Sliceable, begin: str, end: str | None) -> OffsetRange:
    """The offsets that the slice would be made from now; raises what `rebuild` raises before it starts Spark."""
    return _closed_base(tools, made, slice_range(made.slices, column_kind(tools.settings, made), begin, end)).offsets


def rebuild(
    tools: Tools,
    made: Sliceable,
    begin: str,
    end: str | None,
    *,
    dry_run: bool = False,
    letters: CheckedLetters = NO_LETTERS,
    keep: Callable[[StagedSlice], None] = lambda _: None,
) -> SliceReport:
    """Rebuild the slice between two days or times; raises the refusal's error if it cannot be, or is not, rebuilt.

    `keep` is called in each attempt before its commit, with the rows that it has staged.
    """
    kind = column_kind(tools.settings, made)
    chosen = slice_range(made.slices, kind, begin, end)
    requests = SliceRequests.of(tools.settings, made.stream.name)
    with requests.running(tools.waits.other):
        began, reason = time.monotonic(), ""
        repair_idle(tools.settings, made.stream)
        for attempt in range(1, _TRIES + 1):
            base = _closed_base(tools, made, chosen)
            name = _name(made, attempt)
            table = sliced(base.table)
            table.remove_staged({request.id for request in requests.waiting()})
            staged = table.stage(name)
            try:
                started = _Attempt(tools, made, chosen, base, name, requests, began, attempt, letters, keep)
                done = _attempt(started, staged, dry_run)
            finally:
                if requests.outcome(name) is not None or name not in {each.id for each in requests.waiting()}:
                    staged.remove()
            if isinstance(done, SliceReport):
                if done.version is not None:
                    note_slice(tools.settings, done.stream, base.record.generation, done.text)
                return done
            reason = done
            tools.tell(f"{reason}: the slice is rebuilt on the newest version")
    raise CommitRefused(
        f"the slice {chosen.words} of table {made.table.name} was rebuilt {_TRIES} times, and each time the table had "
        f"changed before the commit: {reason}",
        "rebuild it at a quieter time, or while the stream is stopped",
    )


@dataclass(frozen=True)
class _Attempt:
    tools: Tools
    made: Sliceable
    chosen: SliceRange
    base: SliceBase
    name: str
    requests: SliceRequests
    began: float
    number: int
    letters: CheckedLetters
    keep: Callable[[StagedSlice], None]

    def report(self, outcome: str, version: int | None, rebuilt: Rebuilt, difference: Difference) -> SliceReport:
        return SliceReport(
            id=self.name,
            stream=self.made.stream.name,
            table=self.made.table.name,
            words=self.chosen.words,
            outcome=outcome,
            base=self.base.table.version,
            version=version,
            records=self.base.offsets.records,
            taken_out=rebuilt.taken_out,
            refused=rebuilt.refused,
            late=late_records(self.tools.settings, self.base.record, self.base.offsets),
            tries=self.number,
            seconds=round(time.monotonic() - self.began, 2),
            difference=difference,
            offsets=self.base.offsets,
        )


def _attempt(at: _Attempt, staged: StagedSlice, dry_run: bool) -> SliceReport | str:
    """One attempt: the report, or the reason why the slice has to be rebuilt on a newer version."""
    try:
        staged.split(at.chosen)  # first: links keep the version's files while the function runs
    except PreflightRefused as error:
        return f"version {at.base.table.version} is gone: {error.found}"
    rebuilt = _compute(at, staged)
    at.keep(staged)
    with local_scratch(staged.folder) as scratch:
        difference = compare(at.made.table.name, staged.before(), staged.after(), (), scratch / "compared")
    if dry_run:
        return at.report(nothing_committed(difference, dry_run), None, rebuilt, difference)
    rows = {"before": difference.old_rows, "after": difference.new_rows}
    code = loaded_code(at.made.stream, at.tools.settings.flows)
    entry = entry_of(at.base, at.name, at.chosen, code, rows)
    request = SliceCommitRequest(
        id=at.name,
        stream=at.made.stream.name,
        table=at.made.table.name,
        entry=entry.encode(),
        change={},
        expires=time.time() + at.tools.waits.commit + _MARGIN,
        summary={"slice": at.chosen.words, **rows, "gone": difference.only_old, "came": difference.only_new},
        begin=at.chosen.begin.timestamp(),
        end=at.chosen.end.timestamp(),
    )
    if not (difference.only_old or difference.only_new):
        at.requests.end(request.ended("unchanged"))  # the table has the records, those that were late included
        return at.report(nothing_committed(difference, dry_run), None, rebuilt, difference)
    request = replace(request, change=staged.change())
    crash_point("slice_staged", request.stream, 0)
    at.requests.ask(request)
    crash_point("slice_asked", request.stream, 0)
    settings, stream = at.tools.settings, at.made.stream
    ended = committed_or_withdrawn(
        settings,
        at.requests,
        request,
        lambda _: carry_out(at.requests, open_tables(settings, stream)),
        at.tools.waits.commit,
        at.tools.tell,
    )
    if ended.state == "outdated":
        return ended.reason
    if ended.state != "committed":
        raise PreflightRefused(f"the slice {at.chosen.words} was not committed: {ended.reason}", "rebuild it again")
    return at.report("committed", ended.version, rebuilt, difference)


def repair_idle(settings: Settings, stream: Stream) -> None:
    """Remove what a power cut has truncated, as a start of the stream would, if no driver runs: it looks itself."""
    try:
        with take(settings, stream.name, purpose="repair", wait=0.0):
            repair(settings, stream)
    except LeaseBusy:
        return


def _compute(at: _Attempt, staged: StagedSlice) -> Rebuilt:
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    from streaming_jobs.runtime.spark_plan import analysed
    from streaming_jobs.sources.kafka import KafkaSource

    made, stream, offsets = at.made, at.made.stream, at.base.offsets
    if at.number == 1:
        at.tools.tell("starting Spark, which runs the stream's function on the slice's records")
    spark = at.tools.spark()
    client = client_file(at.tools.settings, at.tools.bootstrap)
    try:
        readable = Archives(at.tools.settings)
        archive = readable.of(stream, offsets.topic, offsets.topic_id)
        void = readable.void_of(stream, offsets.topic, offsets.topic_id)
        aside = at.letters.aside(of_letters(at.tools.settings.tables / stream.dead_letters, offsets.topic))
        source = KafkaSource(made.parameter, made.topic, client, made.topic.delay, archive, void, aside=aside)
        frame = source.batch(spark, offsets.start, offsets.end)
        if made.required:
            moment = F.col(f"`{made.event_time}`").cast("timestamp")
            first, last = at.chosen.begin - made.slices.distance, at.chosen.end + made.slices.distance
            frame = frame.where((moment >= _lit(first)) & (moment < _lit(last)))
        try:
            output = stream.outputs(**{made.parameter: frame})[made.sink]
            plan = analysed(output)
        except UsageError:
            raise
        except PySparkException as error:
            raise UsageError(
                f"the function of stream {stream.name} cannot run on a batch of records: {str(error).splitlines()[0]}",
                f"rebuild the whole table: {commands.plan(stream.name, to_earliest=True)}",
            ) from error
        except Exception as error:
            raise function_raised(stream.function, error) from error
        check_plan(made, plan)
        topics = [topic.name for topic in stream.sources.values()]
        try:
            return staged.write(output, at.chosen, topics, stream.rules_of(made.table.name))
        except PySparkException as error:
            raise classify(error) from error
    finally:
        remove_client_file(client)


def _lit(at: datetime) -> Column:
    from pyspark.sql import functions as F

    return F.timestamp_micros(F.lit(int(at.timestamp()) * 1_000_000 + at.microsecond))


def _closed_base(tools: Tools, made: Sliceable, chosen: SliceRange) -> SliceBase:
    """The base, once the slice is closed; raises SliceOpen if that takes longer than the wait."""
    deadline, told = time.monotonic() + tools.waits.closed, False
    while True:
        try:
            return take_base(tools.settings, made, chosen, tools.topics, despite_accepted=tools.despite_accepted)
        except SliceOpen as still_open:
            if time.monotonic() > deadline:
                raise
            if not told:
                tools.tell(f"waits: {still_open.found}")
                told = True
            time.sleep(1.0)


def _name(made: Sliceable, attempt: int) -> str:
    return f"{made.table.name}-{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{attempt}"


def nothing_committed(made: Difference, dry_run: bool) -> str:
    """The outcome of a rebuild without a commit; distinguishes an empty slice from an unchanged one."""
    if not (made.old_rows or made.new_rows or made.unknown):
        return f"{'dry run' if dry_run else 'unchanged'}: no row is in the slice, before or after"
    return "dry run" if dry_run else "unchanged"
