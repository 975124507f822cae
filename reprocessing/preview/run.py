"""One preview, from the choice of its start to the comparison.

    1. the newest committed batch of the running stream is the border; its tables' files are linked
    2. a savepoint, or the stream's start, is chosen; state and tables of then are made in folders of the preview
    3. an ordinary session replays from there to the border, with the code on disk
    4. the rebuilt tables are compared with the published ones as of the border, the stream's suites run on them
    5. all of that is removed

Nothing is published. The stream is not stopped: its lease, its checkpoint and its tables are only read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reprocessing.planning.history import in_lineage
from reprocessing.preview.compare import TableChange, compare_tables
from reprocessing.preview.folders import Folders, alone
from reprocessing.preview.published import Published, published
from reprocessing.preview.replay import Failure, prepare, replay
from reprocessing.preview.result import Counts, Edge, Preview
from reprocessing.preview.start import Start, View, Wanted, choose, records
from reprocessing.rebuild.context import RunSuite, no_suites
from streaming_jobs.errors import PreflightRefused, TransientError, UsageError
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry, Txn
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.slice_requests import SliceRequest, SliceRequests
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.text.spelling import counted

READ = 50_000
"""Batches at most whose figures are read from a ledger, the newest ones."""


Replay = Callable[[Folders, Stream, StreamRecord, Published, Callable[[int], None]], Failure | None]
"""Runs the stream's code on the preview's folders up to the border; reports batches, returns why it failed."""


@dataclass(frozen=True)
class Asked:
    """The request: from where, the suites that have to pass, and how records are replayed."""

    wanted: Wanted = field(default_factory=Wanted)
    suites: tuple[str, ...] = ()
    run_suite: RunSuite = no_suites
    replay: Replay = replay


@dataclass(frozen=True)
class Rebuilt:
    """The stream with the tables of the replay, as suites see it."""

    own: Settings
    stream: Stream


def preview(
    settings: Settings,
    stream: Stream,
    topics: TopicReader,
    asked: Asked,
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
    if stream.topics_only:
        raise UsageError(
            f"stream {stream.name} writes topics only, and a preview compares tables",
            "give a copy of the stream a table as its sink, and preview that",
        )
    folders, clock = Folders(settings, stream.name), Clock()
    topics = Archives(settings).added_to(topics, stream)
    with alone(folders):
        folders.clear()
        try:
            return _preview(folders, stream, record, topics, asked, clock, tell)
        finally:
            try:
                folders.clear()
            except TransientError as error:  # the result counts, and the next preview removes what is left
                tell(f"the folders of this preview are left to the next one: {error.found}")


@dataclass
class Clock:
    """The seconds that each part of a preview takes."""

    parts: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    _last: float = field(default_factory=time.monotonic)

    def done(self, part: str) -> None:
        """The part that began with the end of the one before is over."""
        now = time.monotonic()
        self.parts[part], self._last = round(now - self._last, 1), now

    def seconds(self) -> dict[str, float]:
        """All parts, and their sum."""
        return {**self.parts, "in all": round(time.monotonic() - self.began, 1)}


def _preview(
    folders: Folders,
    stream: Stream,
    record: StreamRecord,
    topics: TopicReader,
    asked: Asked,
    clock: Clock,
    tell: Callable[[str], None],
) -> Preview:
    end = published(folders, stream, record)
    start = choose(asked.wanted, _view(folders.settings, record, topics, end))
    count = records(start.ends, end.ends)
    where = f"savepoint {start.savepoint.id}" if start.savepoint else "the stream's start"
    tell(f"replays {counted(count, 'record')} from {where} ({start.why}) to {end.txn}; the stream runs on")
    failure = _undeclared(stream, record)
    tables: tuple[TableChange, ...] = ()
    suites: tuple[tuple[str, tuple[str, ...]], ...] = ()
    if failure is None:
        prepare(folders, stream, record, start)
        clock.done("preparation")
        failure = asked.replay(
            folders, stream, record, end, lambda batch: tell(f"  batch {batch} of the replay is written")
        )
        clock.done("session and replay")
    if failure is None:
        tables = compare_tables(folders, stream)
        clock.done("comparison")
        rebuilt = Rebuilt(folders.own(), stream)
        suites = tuple((name, tuple(asked.run_suite(rebuilt, name))) for name in asked.suites)
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
        notes=tuple(_notes(start, end, written, SliceRequests.of(folders.settings, stream.name).history())),
        seconds=clock.seconds(),
    )


def _view(settings: Settings, record: StreamRecord, topics: TopicReader, end: Published) -> View:
    held = {name: topics.offsets(name) for name in end.ends}
    return View(
        stream=record.stream,
        generations=record.generations,
        savepoints=savepoints.savepoints(settings, record.stream),
        starts=record.starts,
        earliest={name: offsets.earliest for name, offsets in held.items()},
        end=end.txn,
        ends=end.ends,
        now=time.time(),
        archived={name: offsets.archived for name, offsets in held.items()},
        continues={name: offsets.continues for name, offsets in held.items()},
    )


def _undeclared(stream: Stream, record: StreamRecord) -> Failure | None:
    """The refusal of code that no longer declares a table of the stream, which has to be there to be rebuilt."""
    gone = sorted({bound.name for bound in record.tables} - {declared.name for declared, _ in all_tables(stream)})
    if not gone:
        return None
    found = f"stream {stream.name} no longer writes table {', '.join(gone)}"
    return Failure(PreflightRefused.code, found, "declare the sink again", starts=False)


def _published_entries(settings: Settings, record: StreamRecord, after: Txn | None, up_to: Txn) -> list[LedgerEntry]:
    """The entries of the published batches of the range, oldest first; at most `READ`."""
    lines = ledger_file(settings, record.stream).after(record.stream, after, at_most=READ)
    on_path = [line.entry for line in lines if in_lineage(record.generations, line.entry.txn)]
    return [entry for entry in reversed(on_path) if entry.txn <= up_to]


def _rebuilt_entries(folders: Folders) -> list[LedgerEntry]:
    lines = ledger_file(folders.own(), folders.stream).after(folders.stream, None, at_most=READ)
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


def _notes(start: Start, end: Published, written: Sequence[LedgerEntry], rebuilt: Sequence[SliceRequest]) -> list[str]:
    notes = []
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
    return notes
