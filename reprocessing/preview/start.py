"""Where a preview begins and ends: a savepoint with the state of then, and the stream's newest committed batch.

The stream runs on meanwhile. Its tables' files are linked at once, so that no compaction or clean-up of the live tables
can take them away before they are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from reprocessing.plan.history import has_present_rows
from reprocessing.plan.journal import RecoveryUnderWay, refuse_under_way
from reprocessing.plan.replay_range import lost
from reprocessing.preview.folders import Folders
from streaming_jobs.errors import PreflightRefused, RecourseError, TransientError, UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import OffsetBounds, TopicOffsets, ends_of, offsets_between, starts_of
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import newest
from streaming_jobs.sinks.tables import all_tables, copied_table, existing_table, open_table
from streaming_jobs.state.savepoints import Savepoint, version_after
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import Generation, StreamRecord
from streaming_jobs.storage.locations import remove_tree
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration
from streaming_jobs.text.spelling import instant_words, instead

_ATTEMPTS = 3


@dataclass(frozen=True)
class Wanted:
    """The request: records of the last `last`, or records after a savepoint; if neither is given, Recourse chooses."""

    last: timedelta | None = None
    savepoint: str | None = None


@dataclass(frozen=True)
class StartView:
    """What the choice depends on. `end` and `ends`: the newest committed batch, and where it ended; `now` in s."""

    stream: str
    generations: Sequence[Generation]
    savepoints: Sequence[Savepoint]
    starts: TopicOffsets
    topics: Mapping[str, OffsetBounds]
    end: Txn
    ends: TopicOffsets
    now: float


@dataclass(frozen=True)
class PreviewStart:
    """The savepoint (None: the stream's start), the offsets there, and why it is this one, in words."""

    savepoint: Savepoint | None
    ends: TopicOffsets
    why: str


def choose(wanted: Wanted, view: StartView) -> PreviewStart:
    """The start of the preview; raises UsageError if there is none, with what is possible instead."""
    if wanted.savepoint is not None:
        return _named(wanted.savepoint, view)
    usable = [each for each in view.savepoints if not _unusable(each, view)]
    if wanted.last is not None:
        span = format_duration(wanted.last)
        old = [each for each in usable if each.taken_at <= view.now - wanted.last.total_seconds()]
        if old:
            return _from(old[-1], f"the newest that is at least {span} old")
        return _beginning(view, usable, f"no savepoint is {span} old")
    before = [each for each in usable if offsets_between(each.ends, view.ends)]
    if before:
        return _from(before[-1], "the newest that has records after it")
    return _beginning(view, [], "no savepoint has records after it" if usable else "there is no savepoint to begin at")


def _named(name: str, view: StartView) -> PreviewStart:
    savepoint = next((each for each in view.savepoints if each.id == name), None)
    if savepoint is None:
        raise UsageError(
            f"stream {view.stream} has no savepoint {name}", instead(name, [each.id for each in view.savepoints])
        )
    why_not = _unusable(savepoint, view)
    if not why_not and not offsets_between(savepoint.ends, view.ends):
        why_not = "no record came after it"
    if why_not:
        raise UsageError(f"a preview cannot begin at savepoint {name}: {why_not}", "choose another savepoint, or none")
    return _from(savepoint, "as asked for")


def _unusable(savepoint: Savepoint, view: StartView) -> str:
    """Why a savepoint cannot be replayed from, in words; empty if it can."""
    if savepoint.txn > view.end or not has_present_rows(view.generations, savepoint.txn):
        return "a recovery has replaced what came after it"
    return lost(savepoint.ends, view.topics)


def _from(savepoint: Savepoint, why: str) -> PreviewStart:
    return PreviewStart(savepoint, savepoint.ends, why)


def _beginning(view: StartView, younger: Sequence[Savepoint], why: str) -> PreviewStart:
    """The stream's very start, if the topics still have all records since."""
    gone = lost(view.starts, view.topics)
    if not gone:
        return PreviewStart(None, view.starts, why)
    oldest = next((each for each in younger if offsets_between(each.ends, view.ends)), None)
    raise UsageError(
        f"{why}, and {gone}",
        f"the oldest savepoint is of {instant_words(oldest.taken_at)}: --from-savepoint {oldest.id}"
        if oldest is not None
        else f"take a savepoint and let records come: {commands.take_savepoint(view.stream)}",
    )


@dataclass(frozen=True)
class NewestBatch:
    """The newest committed batch of a stream: its end, its beginning (if known), and the time of its commit.

    `versions`: the version of each table after it. `at` in seconds since 1970. `foreign`: table -> versions of its
    commits that are not the stream's, as far back as its log reaches.
    """

    txn: Txn
    ends: TopicOffsets
    begins: TopicOffsets | None
    at: float
    versions: Mapping[str, int]
    foreign: Mapping[str, tuple[int, ...]]


def newest_batch(folders: Folders, stream: Stream, record: StreamRecord) -> NewestBatch:
    """Find the newest batch, and link the tables as they are after it into the folder `published`.

    Raises UsageError before the stream's first batch, PreflightRefused while a recovery is under way, TransientError
    if the live tables change faster than they can be linked.
    """
    reason: Exception | None = None
    for _ in range(_ATTEMPTS):
        try:
            found = _newest(folders.settings, stream, record)
            _link(folders, stream, found)
        except (FileNotFoundError, PreflightRefused) as error:
            if isinstance(error, RecoveryUnderWay):
                raise
            reason = error  # the running stream has just removed a file or a part of its log
            remove_tree(folders.with_tables("published").tables)
        else:
            return found
    text = reason.found if isinstance(reason, RecourseError) else str(reason)
    raise TransientError(
        f"the tables of stream {stream.name} could not be held as they are: {text}",
        "try again; if it stays so, a table's files or its log are not complete",
    ) from reason


def _newest(settings: Settings, stream: Stream, record: StreamRecord) -> NewestBatch:
    primary = existing_table(settings, stream.primary, stream.name)
    commit, _ = newest(primary.commits(), stream.name)
    entry = commit.entry if commit is not None else None
    if entry is not None:
        refuse_under_way(primary.name, entry, record.generation)
    if commit is None or entry is None or entry.batch < 0:
        raise UsageError(f"stream {stream.name} has not written a batch yet", "there is nothing to compare with")
    versions, foreign = {}, {}
    for declared, _ in all_tables(stream):
        table = open_table(settings, declared, stream.name)
        if table is not None:
            versions[table.name] = version_after(table, stream.name, entry.txn)
            foreign[table.name] = tuple(each.version for each in table.commits() if each.foreign_to(stream.name))
    begins: TopicOffsets | None = starts_of(entry.offsets)
    if entry.kind == "publish":  # its range is that of the whole replay
        try:
            checkpoint = StreamFolder.of(settings, stream.name).checkpoint(entry.generation)
            begins = checkpoint.start(entry.batch)
        except PreflightRefused:
            begins = None
    return NewestBatch(entry.txn, ends_of(entry.offsets), begins, commit.at / 1000, versions, foreign)


def _link(folders: Folders, stream: Stream, found: NewestBatch) -> None:
    for declared, _ in all_tables(stream):
        if (version := found.versions.get(declared.name)) is not None:
            content = existing_table(folders.settings, declared, stream.name).content(version)
            copied_table(folders.settings, folders.tables / "published", declared, stream.name, content)
