"""Savepoints of several streams at once: taken under one name, and dropped as one.

Each stream's savepoint is after a batch of its own; they are not of one instant. A stream that reads a topic may so be
ahead of the savepoint of the stream that writes it, or behind. A recovery looks up in the ledgers which records come
after a savepoint, and takes a stream that is ahead back further (`reprocessing/plan/affected_streams.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta

from streaming_jobs.errors import TransientError, UsageError
from streaming_jobs.settings import Settings
from streaming_jobs.state import named_savepoints, savepoints, stream_record
from streaming_jobs.state.named_savepoints import NamedSavepoint, only_one
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands

_ATTEMPTS = 3


def last_batch(settings: Settings, stream: str) -> int | None:
    """The last finished batch of the stream's generation; None if there is none."""
    record = stream_record.load(settings, stream)
    return None if record is None else StreamFolder.of(settings, stream).checkpoint(record.generation).last_committed


def take_last(settings: Settings, stream: Stream, reason: savepoints.Reason, note: str = "") -> Savepoint:
    """Take a savepoint of a stream's last finished batch; the stream may run. Raises UsageError if it has none.

    One that exists, and that its age would let go, stays from now on for the purpose that is asked for.
    """
    for _ in range(_ATTEMPTS):
        record, last = stream_record.load(settings, stream.name), last_batch(settings, stream.name)
        if record is None or last is None:
            raise UsageError(f"stream {stream.name} has not finished a batch yet", "run it first")
        taken = savepoints.take(settings, stream, record, last, reason, note)
        if reason != "purpose" or taken.reason == "purpose":
            return taken
        with only_one(settings):
            found = savepoints.find(settings, stream.name, taken.id)  # None if it was pruned meanwhile
            if found is not None:
                return savepoints.keep_for(settings, found, reason, note or found.note)
    raise TransientError(f"savepoints of stream {stream.name} are removed as soon as they are there", "try again")


def take_named(
    settings: Settings,
    streams: Sequence[Stream],
    name: str,
    note: str = "",
    keep: timedelta | None = None,
    *,
    check: Callable[[], None] = lambda: None,
    each: Callable[[Savepoint], None] = lambda _: None,
) -> NamedSavepoint:
    """Take a savepoint of each stream under one name, and retain them for `keep` (0: until the name is dropped).

    `check` raises while a recovery of the streams is under way; `each` is called after each savepoint. Names whose time
    is over are removed. Raises UsageError if the name is in use.
    """
    _refuse_used(settings, named_savepoints.checked(name))
    keep = settings.savepoint.keep_named if keep is None else keep
    for _ in range(_ATTEMPTS):
        check()
        taken: list[Savepoint] = []
        for stream in streams:
            taken.append(take_last(settings, stream, "name", name))
            each(taken[-1])
        with only_one(settings):
            _refuse_used(settings, name)
            if not all(_is_there(settings, saved) for saved in taken):
                continue  # a recovery has come between, or retention
            check()
            now = time.time()
            for old in named_savepoints.named(settings):
                if not old.holds(now):
                    named_savepoints.remove(settings, old.name)
            until = now + keep.total_seconds() if keep else None
            made = NamedSavepoint(name, note, now, until, {saved.stream: saved.id for saved in taken})
            named_savepoints.save(settings, made)
            return made
    raise TransientError("recoveries came between the savepoints of the streams", "try again when they are over")


def drop_named(
    settings: Settings,
    streams: Mapping[str, Stream],
    name: str,
    needed: Callable[[str], Collection[str]] = lambda _: (),
) -> list[str]:
    """Drop a name, then the savepoints that were taken for a name and that no other one holds; returns these.

    `needed` gives the savepoints of a stream that recoveries under way need; raises UsageError if one would be dropped.
    """
    with only_one(settings):
        made = named_savepoints.find(settings, name)
        if made is None:
            raise UsageError(f"there is no savepoint '{name}'", f"see `{commands.savepoints()}`")
        others = [each for each in named_savepoints.named(settings) if each.name != name]
        gone: list[Savepoint] = []
        for stream, each in made.streams.items():
            saved = savepoints.find(settings, stream, each)
            if saved is None or saved.reason != "name" or any(o.streams.get(stream) == each for o in others):
                continue
            if stream not in streams:  # retention has no stream to prune: its files would stay
                raise UsageError(f"stream {stream} of savepoint '{name}' is not declared", "declare it again")
            if each in needed(stream):
                raise UsageError(
                    f"a plan is under way and needs savepoint {each} of stream {stream}", "finish the plan, or abort it"
                )
            gone.append(saved)
        named_savepoints.remove(settings, name)
        for saved in gone:  # still alone: nobody gives one of them another name
            savepoints.drop(settings, streams[saved.stream], saved.id)
    return [f"{saved.stream} {saved.id}" for saved in gone]


def _is_there(settings: Settings, saved: Savepoint) -> bool:
    """True if the savepoint still exists, and its stream is in the same generation."""
    record = stream_record.load(settings, saved.stream)
    same = record is not None and record.generation == saved.generation
    return same and savepoints.find(settings, saved.stream, saved.id) is not None


def _refuse_used(settings: Settings, name: str) -> None:
    existing = named_savepoints.find(settings, name)
    if existing is not None and existing.holds(time.time()):
        raise UsageError(
            f"savepoint '{name}' exists already", f"choose another name, or: {commands.drop_savepoint(name=name)}"
        )
