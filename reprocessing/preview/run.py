"""One preview, from the choice of its start to the comparison.

    1. the newest committed batch of the running stream is the border; its tables' files are linked
    2. a savepoint, or the stream's start, is chosen; state and tables of then are made in folders of the preview
    3. a replay runs from there to the border, with the code on disk
    4. the rebuilt tables are compared with the published ones as of the border, the stream's suites run on them
    5. all of that is removed

Nothing is published. The stream is not stopped: its lease, its checkpoint and its tables are only read. The source
reads nothing past the border, and the query is stopped there before a batch without records could close windows that
the running stream had not closed yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from reprocessing.plan.history import in_lineage
from reprocessing.preview.folders import Folders, hold_previews
from reprocessing.preview.result import Counts, Edge, Preview, TableChange
from reprocessing.preview.start import NewestBatch, PreviewStart, StartView, Wanted, choose, newest_batch
from reprocessing.replay.difference import compare_stored, compared_tables
from reprocessing.replay.session import Border, ReplayFailure, ReplaySession
from reprocessing.replay.staging import fill, make_empty_tables
from reprocessing.report.facts import READ
from reprocessing.stages.publish import misfit
from reprocessing.stages.recovery import RebuiltTables, RunSuite, no_suites
from streaming_jobs.errors import PreflightRefused, TransientError, UsageError
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry, Txn
from streaming_jobs.ledger.positions import offsets_between
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime.batch_hooks import StopAtBorder
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.state_changes import OTHER_STATE, StateChange, classified, differences, other_state
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.runtime.stream_sinks import DiscardedSinks
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import all_tables, existing_table, open_table
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.redrive_requests import RedriveRequest, RedriveRequests
from streaming_jobs.state.slice_requests import SliceCommitRequest, SliceRequests
from streaming_jobs.state.stream_record import Generation, StreamRecord
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted

RunReplay = Callable[[Folders, Stream, StreamRecord, NewestBatch, Callable[[int], None]], ReplayFailure | None]
"""Runs the stream's code on the preview's folders up to the border; reports batches, returns why it failed."""


def replay(
    folders: Folders, stream: Stream, record: StreamRecord, until: NewestBatch, progress: Callable[[int], None]
) -> ReplayFailure | None:
    """Run the stream's code up to the border; returns why it failed, None if it reached the border.

    `progress` is called with the number of the batch that was written last, if there is a new one, once per second.
    Raises TransientError for a failure that may pass: Spark's JVM ended, or the broker is away.
    """
    reported: int | None = None

    def watch(_: StreamRunner, batch: int | None) -> None:
        nonlocal reported
        if batch is not None and batch != reported:
            reported = batch
            progress(batch)

    target = folders.replay_settings()
    end = border(target, stream, record, until)
    failure = (
        ReplaySession(
            target,
            stream,
            Archives(folders.settings),
            until.ends,
            record.generations,
            bounded=True,
            replan=_Guard(target, stream.name, record, end),
            steps=end.steps,
            external=DiscardedSinks(),
            name=f"preview-{stream.name}",  # of Spark's log file: the stream's session has its own
        )
        .run(watch)
        .failure
    )
    if failure is not None and not failure.permanent:  # it says nothing about the code
        raise failure.error(failure.next_step or "try again")
    return failure


def border(settings: Settings, stream: Stream, record: StreamRecord, until: NewestBatch) -> Border:
    """The end of the replay; for windows one batch of it begins where the stream's newest batch began."""
    return Border.at(until.ends, until.begins if record.state_fingerprint else None, stream, settings, _end_here)


def _end_here() -> None:
    raise StopAtBorder


@dataclass(frozen=True)
class _Guard:
    """The check before each batch of the replay: the border, and that the state fits the stream's stored state.

    A replay from the stream's start has no state that could refuse another aggregation; the running stream has.
    """

    replay_settings: Settings
    stream: str
    record: StreamRecord
    border: Border

    def __call__(self, checkpoint: Checkpoint, batch: int) -> bool:
        """As `Border` answers; raises PreflightRefused for another state than the stream's."""
        begun = stream_record.existing(self.replay_settings, self.stream)
        if changes := differences(self.record.state_fingerprint, begun.state_fingerprint):
            raise other_state(self.stream, changes)
        return self.border(checkpoint, batch)


@dataclass(frozen=True)
class PreviewRequest:
    """From where, the suites that have to pass, and how records are replayed."""

    wanted: Wanted = field(default_factory=Wanted)
    suites: tuple[str, ...] = ()
    run_suite: RunSuite = no_suites
    replay: RunReplay = replay


def preview(
    settings: Settings,
    stream: Stream,
    topics: TopicReader,
    request: PreviewRequest,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> Preview:
    """Make a preview of the code on disk.

    Raises UsageError if there is nothing to begin at or to compare with, or another preview of the stream runs;
    PreflightRefused while a recovery is under way, and if the stream has another primary table by now;
    TransientError if the broker or Spark's JVM is gone.
    """
    record = stream_record.load(settings, stream.name)
    if record is None:
        raise UsageError(f"stream {stream.name} has never run", "there is nothing to compare with")
    if record.tables and record.table(stream.primary.name) is None:
        before = next((bound.name for bound in record.tables if bound.role == "primary"), "")
        raise PreflightRefused(
            f"cannot start on today's state: stream {stream.name} no longer writes table {before}",
            "declare the sink again",
        )
    if stream.batches_only:
        raise UsageError(
            f"stream {stream.name} writes no Delta table, and a preview compares these",
            "give a copy of the stream a Delta table as its sink, and preview that",
        )
    folders, clock = Folders(settings, stream.name), PartTimes()
    topics = Archives(settings).added_to(topics, stream)
    with hold_previews(folders):
        folders.clear()
        try:
            return _preview(folders, stream, record, topics, request, clock, tell)
        finally:
            try:
                folders.clear()
            except TransientError as error:  # the result counts, and the next preview removes what is left
                tell(f"the folders of this preview are left to the next one: {error.found}")


@dataclass
class PartTimes:
    parts: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    _last: float = field(default_factory=time.monotonic)

    def done(self, part: str) -> None:
        """The part that began with the end of the one before is over."""
        now = time.monotonic()
        self.parts[part], self._last = round(now - self._last, 1), now

    def seconds(self) -> dict[str, float]:
        return {**self.parts, "in all": round(time.monotonic() - self.began, 1)}


def _preview(
    folders: Folders,
    stream: Stream,
    record: StreamRecord,
    topics: TopicReader,
    request: PreviewRequest,
    clock: PartTimes,
    tell: Callable[[str], None],
) -> Preview:
    end = newest_batch(folders, stream, record)
    start = choose(request.wanted, _view(folders.settings, record, topics, end))
    count = offsets_between(start.ends, end.ends)
    where = f"savepoint {start.savepoint.id}" if start.savepoint else "the stream's start"
    tell(f"replays {counted(count, 'record')} from {where} ({start.why}) to {end.txn}; the stream runs on")
    failure = _undeclared(stream, record)
    tables: tuple[TableChange, ...] = ()
    suites: tuple[tuple[str, tuple[str, ...]], ...] = ()
    if failure is None:
        prepare(folders, stream, record, start)
        clock.done("preparation")
        failure = request.replay(
            folders, stream, record, end, lambda batch: tell(f"  batch {batch} of the replay is written")
        )
        clock.done("session and replay")
    if failure is None:
        tables = compare_tables(folders, stream)
        clock.done("comparison")
        rebuilt = RebuiltTables(folders.replay_settings(), stream)
        suites = tuple((name, tuple(request.run_suite(rebuilt, name))) for name in request.suites)
        if suites:
            clock.done("suites")
    after = start.savepoint.txn if start.savepoint is not None else None
    written = _published_entries(folders.settings, record, after, end.txn)
    return Preview(
        stream=stream.name,
        made_at=time.time(),
        code=loaded_code(stream, folders.settings.flows),
        published_code=_codes(record, written, end.txn),
        savepoint=start.savepoint.id if start.savepoint is not None else None,
        why=start.why,
        begin=Edge(after, start.savepoint.taken_at if start.savepoint is not None else 0.0, start.ends),
        end=Edge(end.txn, end.at, end.ends),
        records=count,
        tables=tables,
        before=_counts(written),
        after=_counts(_rebuilt_entries(folders)) if failure is None else Counts(),
        suites=suites,
        failure=failure,
        notes=tuple(
            _notes(
                stream,
                start,
                end,
                written,
                SliceRequests.of(folders.settings, stream.name).history(),
                RedriveRequests.of(folders.settings, stream.name).history(),
            )
        ),
        seconds=clock.seconds(),
        change=_change(folders, stream, record, start, failure),
    )


def _change(
    folders: Folders, stream: Stream, record: StreamRecord, start: PreviewStart, failure: ReplayFailure | None
) -> StateChange | None:
    """What the code means for the stream's state; from a savepoint, Spark has taken that state, or refused it."""
    rebuild = f"; to rebuild it: {stream.rebuild_step()}"
    if failure is not None:
        refused = not failure.starts and failure.found.startswith(OTHER_STATE)
        return StateChange("state has to be rebuilt", failure.found + rebuild) if refused else None
    begun = stream_record.load(folders.replay_settings(), record.stream)
    if begun is None:
        return None
    change = classified(record.state_fingerprint, begun.state_fingerprint, "")
    if change.kind == "state has to be rebuilt":
        return replace(change, why=change.why + rebuild)
    if start.savepoint is None and (begun.state_fingerprint or len(stream.sources) > 1):
        return replace(
            change, why=f"{change.why}; if Spark takes it as it is, `{commands.deploy(record.stream)}` shows"
        )
    return change


def prepare(folders: Folders, stream: Stream, record: StreamRecord, start: PreviewStart) -> None:
    """Make the state and the tables of the replay: those of the savepoint, or empty tables with today's columns.

    Raises TransientError if the savepoint is dropped meanwhile, as the running stream does with old ones.
    """
    target, savepoint = folders.replay_settings(), start.savepoint
    after = (None, -1) if savepoint is None else (savepoint.generation, savepoint.batch)
    opened = Generation(record.generation + 1, time.time(), "preview", *after)
    try:
        fill(folders.settings, target, stream, record, opened, savepoint, starts=start.ends, plan="preview")
    except (FileNotFoundError, PreflightRefused) as error:
        if savepoint is None or savepoints.find(folders.settings, stream.name, savepoint.id) is not None:
            raise
        raise TransientError(
            f"savepoint {savepoint.id} of stream {stream.name} was dropped while the preview began", "try again"
        ) from error
    if savepoint is None:
        make_empty_tables(folders.settings, target, stream, opened, "preview")


def compare_tables(folders: Folders, stream: Stream) -> tuple[TableChange, ...]:
    """Compare each table of the stream with the published one as of the border."""
    changes = []
    for declared in compared_tables(stream):
        published = open_table(folders.with_tables("published"), declared, stream.name)
        if published is None:  # a table that the stream does not have yet
            continue
        rebuilt = existing_table(folders.replay_settings(), declared, stream.name)
        known = {column.name for column in published.schema.fields}
        changes.append(
            TableChange(
                compare_stored(
                    folders.settings, folders.tables / "differing", declared, stream.name, published, rebuilt
                ),
                tuple(column.name for column in rebuilt.schema.fields if column.name not in known),
                tuple(misfit(published, rebuilt)),
            )
        )
    return tuple(changes)


def _view(settings: Settings, record: StreamRecord, topics: TopicReader, end: NewestBatch) -> StartView:
    return StartView(
        stream=record.stream,
        generations=record.generations,
        savepoints=savepoints.savepoints(settings, record.stream),
        starts=record.starts,
        topics={name: topics.offsets(name) for name in end.ends},
        end=end.txn,
        ends=end.ends,
        now=time.time(),
    )


def _undeclared(stream: Stream, record: StreamRecord) -> ReplayFailure | None:
    """The refusal of code that no longer declares a table of the stream, which has to be there to be rebuilt."""
    gone = sorted({bound.name for bound in record.tables} - {declared.name for declared, _ in all_tables(stream)})
    if not gone:
        return None
    found = f"stream {stream.name} no longer writes table {', '.join(gone)}"
    return ReplayFailure(PreflightRefused.code, found, "declare the sink again", starts=False)


def _published_entries(settings: Settings, record: StreamRecord, after: Txn | None, up_to: Txn) -> list[LedgerEntry]:
    """The entries of the published batches of the range, oldest first; at most `READ`."""
    lines = ledger_file(settings, record.stream).after(record.stream, after, at_most=READ)
    on_path = [line.entry for line in lines if in_lineage(record.generations, line.entry.txn)]
    return [entry for entry in reversed(on_path) if entry.txn <= up_to]


def _rebuilt_entries(folders: Folders) -> list[LedgerEntry]:
    lines = ledger_file(folders.replay_settings(), folders.stream).after(folders.stream, None, at_most=READ)
    return [line.entry for line in reversed(lines)]


def _codes(record: StreamRecord, written: Sequence[LedgerEntry], up_to: Txn) -> tuple[CodeVersion, ...]:
    """The code of the published batches in order; by the record if the ledger file has none of them."""
    codes = dict.fromkeys(entry.code for entry in written if entry.code.hash)
    if not codes:
        codes = dict.fromkeys(each.version for each in record.code if each.since <= up_to)
        return tuple(codes)[-1:]
    return tuple(codes)


def _counts(entries: Sequence[LedgerEntry]) -> Counts:
    named: dict[str, int] = {}
    for entry in entries:
        broken = {f"broke {rule} of {table}": n for table, each in entry.rules.items() for rule, n in each.items()}
        for name, number in {**entry.rows, **broken}.items():
            named[name] = named.get(name, 0) + number
    return Counts(len(entries), named)


def _notes(
    stream: Stream,
    start: PreviewStart,
    end: NewestBatch,
    written: Sequence[LedgerEntry],
    rebuilt: Sequence[SliceCommitRequest],
    redriven: Sequence[RedriveRequest],
) -> list[str]:
    notes = []
    if stream.external_words:
        notes.append(f"not compared, since only Delta tables are: {', '.join(stream.external_words)}")
    if len(written) == READ:
        notes.append(f"only the newest {READ:,} published batches are counted")
    for saved in start.savepoint.tables if start.savepoint is not None else ():
        others = [v for v in end.foreign.get(saved.name, ()) if saved.version < v <= end.versions[saved.name]]
        if others:
            notes.append(
                f"version {', '.join(map(str, others))} of table {saved.name} was written by another program: its "
                "change shows as a difference"
            )
        notes += [
            f"slice {each.summary.get('slice', each.id)} of table {saved.name} was rebuilt in version {each.version}: "
            "its rows show as a difference"
            for each in rebuilt
            if each.table == saved.name
            and each.version is not None
            and saved.version < each.version <= end.versions[saved.name]
        ]
        notes += [
            f"{counted(len(each.redriven), 'record')} were redriven into table {saved.name} in version {part.version}: "
            "their rows show as a difference"
            for each in redriven
            for part in each.parts
            if part.table == saved.name
            and part.version is not None
            and saved.version < part.version <= end.versions[saved.name]
        ]
    return notes
