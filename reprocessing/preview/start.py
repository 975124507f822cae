"""Where a preview begins: a savepoint with the state of then, or the very start of the stream. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from reprocessing.planning.history import has_present_rows
from reprocessing.planning.instants import instant_words
from reprocessing.planning.replay_start import lost
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import Archived, TopicOffsets, by_place
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_record import Generation
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration
from streaming_jobs.text.spelling import instead


@dataclass(frozen=True)
class Wanted:
    """What was asked for: records of the last so much time, or those after a savepoint; neither: the choice is ours."""

    last: timedelta | None = None
    savepoint: str | None = None


@dataclass(frozen=True)
class View:
    """What the choice depends on. `end` and `ends`: the newest committed batch, and where it ended; `now` in s."""

    stream: str
    generations: Sequence[Generation]
    savepoints: Sequence[Savepoint]
    starts: TopicOffsets
    earliest: TopicOffsets
    end: Txn
    ends: TopicOffsets
    now: float
    archived: Mapping[str, Archived | None] = field(default_factory=dict)
    continues: TopicOffsets = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """The savepoint (None: the stream's start), the offsets there, and why it is this one, in words."""

    savepoint: Savepoint | None
    ends: TopicOffsets
    why: str


def choose(wanted: Wanted, view: View) -> Start:
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
    before = [each for each in usable if records(each.ends, view.ends)]
    if before:
        return _from(before[-1], "the newest that has records after it")
    return _beginning(view, [], "no savepoint has records after it" if usable else "there is no savepoint to begin at")


def records(begin: TopicOffsets, end: TopicOffsets) -> int:
    """The offsets between two positions."""
    begins = by_place(begin)
    return sum(max(offset - begins.get(place, 0), 0) for place, offset in by_place(end).items())


def _named(name: str, view: View) -> Start:
    savepoint = next((each for each in view.savepoints if each.id == name), None)
    if savepoint is None:
        raise UsageError(
            f"stream {view.stream} has no savepoint {name}", instead(name, [each.id for each in view.savepoints])
        )
    why_not = _unusable(savepoint, view)
    if not why_not and not records(savepoint.ends, view.ends):
        why_not = "no record came after it"
    if why_not:
        raise UsageError(f"a preview cannot begin at savepoint {name}: {why_not}", "choose another savepoint, or none")
    return _from(savepoint, "as asked for")


def _unusable(savepoint: Savepoint, view: View) -> str:
    """Why a savepoint cannot be replayed from, in words; empty if it can."""
    if savepoint.txn > view.end or not has_present_rows(view.generations, savepoint.txn):
        return "a recovery has replaced what came after it"
    return lost(savepoint.ends, view.earliest, view.archived, view.continues)


def _from(savepoint: Savepoint, why: str) -> Start:
    return Start(savepoint, savepoint.ends, why)


def _beginning(view: View, younger: Sequence[Savepoint], why: str) -> Start:
    """The stream's very start, if the topics still have all records since."""
    gone = lost(view.starts, view.earliest, view.archived, view.continues)
    if not gone:
        return Start(None, view.starts, why)
    oldest = next((each for each in younger if records(each.ends, view.ends)), None)
    raise UsageError(
        f"{why}, and {gone}",
        f"the oldest savepoint is of {instant_words(oldest.taken_at)}: --from-savepoint {oldest.id}"
        if oldest is not None
        else f"take a savepoint and let records come: {commands.take_savepoint(view.stream)}",
    )
