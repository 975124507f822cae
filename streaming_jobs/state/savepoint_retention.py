"""Which savepoints stay: savepoints that a name or a recovery holds, and the others by age and by their bytes.

A name is one savepoint of each of several streams, under a name that a person has given them:

    <state>/_savepoints/before-release.json      the streams, and the savepoint that each of them has

The file is written when all of its savepoints exist, and it alone makes the name: a kill before it leaves savepoints
without a name, which are dropped with age. As long as the name holds them, nothing drops them: retention decides under
the same lock (`only_one`) under which a name is written.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from streaming_jobs.errors import PreflightRefused, RecourseError, TransientError, UsageError
from streaming_jobs.settings import SavepointSettings, Settings
from streaming_jobs.sinks.tables import stores
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.records import read_record, record_bytes
from streaming_jobs.state.savepoints import AGING, Files, Reason, Savepoint
from streaming_jobs.state.stream_folder import StreamFolder, local_folder, state_files
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.storage.files import private_folder
from streaming_jobs.storage.locations import Location, files_below
from streaming_jobs.storage.locks import locked
from streaming_jobs.storage.object_files import ObjectFiles, ObjectHandle
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands

log = structlog.get_logger()

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,62}")
_OF_ONE = re.compile(r"g\d+-b\d+")


@dataclass(frozen=True)
class NamedSavepoint:
    """The savepoint of each stream, by the stream's name; times in seconds since 1970.

    Its savepoints are retained until `until`, or, if that is None, until the name is dropped.
    """

    name: str
    note: str
    taken_at: float
    until: float | None
    streams: Mapping[str, str]

    def holds(self, now: float) -> bool:
        return self.until is None or now < self.until


def _checked_name(name: str) -> str:
    """The name; raises UsageError if it cannot be one of several streams' savepoints."""
    if not _NAME.fullmatch(name) or _OF_ONE.fullmatch(name):
        raise UsageError(
            f"'{name}' cannot name a savepoint of several streams",
            "use a letter, then letters, digits, '.', '_' and '-', 63 at most, and not the form g0001-b000000041",
        )
    return name


def named(settings: Settings) -> list[NamedSavepoint]:
    """All of them, oldest first; raises PreflightRefused for a damaged file."""
    names = (name.removesuffix(".json") for name in _names(settings).names() if name.endswith(".json"))
    found = (_load_name(_handle(settings, name)) for name in names if _NAME.fullmatch(name))
    return sorted((each for each in found if each is not None), key=lambda each: (each.taken_at, each.name))


def find_named(settings: Settings, name: str) -> NamedSavepoint | None:
    return _load_name(_handle(settings, name)) if _NAME.fullmatch(name) else None


def of_stream(settings: Settings, stream: str) -> dict[str, NamedSavepoint]:
    """Those that have a savepoint of the stream, by name."""
    return {each.name: each for each in named(settings) if stream in each.streams}


def _held(settings: Settings, stream: str) -> set[str]:
    """The savepoints of one stream that names retain now."""
    now = time.time()
    return {each.streams[stream] for each in named(settings) if stream in each.streams and each.holds(now)}


def remove_name(settings: Settings, name: str) -> None:
    """Remove a name; on disk when this returns. Its savepoints are no longer retained."""
    _handle(settings, name).delete()


@contextmanager
def only_one(settings: Settings, wait: float = 60.0) -> Iterator[None]:
    """Hold the lock of names and retention; it ends with us. Raises TransientError after `wait` seconds."""
    busy = TransientError("another process holds the names of savepoints", "try again when it is done")
    with locked(private_folder(local_folder(settings)), wait, lambda: busy):
        yield


def _names(settings: Settings) -> ObjectFiles:
    return state_files(settings).below("_savepoints")


def _handle(settings: Settings, name: str) -> ObjectHandle:
    return ObjectHandle(_names(settings), f"{name}.json")


def _load_name(handle: ObjectHandle) -> NamedSavepoint | None:
    def damaged(error: Exception) -> PreflightRefused:
        return PreflightRefused(
            f"{handle} cannot be read: {error}", "put it back from a copy, or remove it: the name is then gone"
        )

    return read_record(handle, lambda value: NamedSavepoint(**value), damaged, newer=UsageError)


# Savepoints of several streams at once: taken under one name, and dropped as one.
#
# Each stream's savepoint is after a batch of its own; they are not of one instant. A stream that reads a topic may so
# be ahead of the savepoint of the stream that writes it, or behind. A recovery looks up in the ledgers which records
# come after a savepoint, and takes a stream that is ahead back further (`reprocessing/plan/affected_streams.py`).

_ATTEMPTS = 3


def last_batch(settings: Settings, stream: str) -> int | None:
    """The last finished batch of the stream's generation; None if there is none."""
    record = stream_record.load(settings, stream)
    return None if record is None else StreamFolder.of(settings, stream).checkpoint(record.generation).last_committed


def take_last(settings: Settings, stream: Stream, reason: Reason, note: str = "") -> Savepoint:
    """Take a savepoint of a stream's last finished batch; the stream may run. Raises UsageError if it has none.

    An existing savepoint that would expire by age stays from now on for the requested purpose.
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
    _refuse_used(settings, _checked_name(name))
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
                continue  # a recovery has intervened, or retention
            check()
            now = time.time()
            for old in named(settings):
                if not old.holds(now):
                    remove_name(settings, old.name)
            until = now + keep.total_seconds() if keep else None
            made = NamedSavepoint(name, note, now, until, {saved.stream: saved.id for saved in taken})
            _handle(settings, name).put(record_bytes(asdict(made)))
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
        made = find_named(settings, name)
        if made is None:
            raise UsageError(f"there is no savepoint '{name}'", f"see `{commands.savepoints()}`")
        others = [each for each in named(settings) if each.name != name]
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
        remove_name(settings, name)
        for saved in gone:  # still under the lock: none of them can get another name
            savepoints.drop(settings, streams[saved.stream], saved.id)
    return [f"{saved.stream} {saved.id}" for saved in gone]


def _is_there(settings: Settings, saved: Savepoint) -> bool:
    """True if the savepoint still exists, and its stream is in the same generation."""
    record = stream_record.load(settings, saved.stream)
    same = record is not None and record.generation == saved.generation
    return same and savepoints.find(settings, saved.stream, saved.id) is not None


def _refuse_used(settings: Settings, name: str) -> None:
    existing = find_named(settings, name)
    if existing is not None and existing.holds(time.time()):
        raise UsageError(
            f"savepoint '{name}' exists already", f"choose another name, or: {commands.drop_savepoint(name=name)}"
        )


# The choice of savepoints to drop: by age, and by the bytes that only savepoints still hold.
#
# Retention compares the lists of the savepoints' files with the files of the table and of the checkpoints.

_DAY = 86_400.0
_NONE: Files = np.empty((0, 3), np.uint64)


def expired(
    savepoints: Sequence[Savepoint], rule: SavepointSettings, now: float, held: Collection[str] = ()
) -> list[Savepoint]:
    """The savepoints to drop because of their age; savepoints on purpose, and savepoints that a name holds, stay.

    All stay for `keep`, the first of each day and recoveries' savepoints for `keep_daily`, and the newest one always.
    """
    days: set[int] = set()
    gone = [s for s in savepoints if s.reason == "recovery" and timedelta(seconds=now - s.taken_at) > rule.keep_daily]
    for savepoint in _aging(savepoints)[:-1]:
        age, day = timedelta(seconds=now - savepoint.taken_at), int(savepoint.taken_at // _DAY)
        if age > rule.keep and (day in days or age > rule.keep_daily):
            gone.append(savepoint)
        days.add(day)
    return [savepoint for savepoint in gone if savepoint.id not in held]


def too_large(
    savepoints: Sequence[Savepoint],
    linked: Mapping[str, Files],
    elsewhere: Files,
    max_bytes: int,
    held: Collection[str] = (),
) -> list[Savepoint]:
    """The oldest savepoints to drop, so that the files held only by savepoints take at most `max_bytes`.

    `linked` has the files of each savepoint by its name, `elsewhere` those that the stream and its tables have beside
    its savepoints: these are not held by savepoints alone. Savepoints taken on purpose, of recoveries, with a name, and
    the newest one stay, whatever they hold.
    """
    names = list(linked)
    rows = np.concatenate([linked[name] for name in names] or [_NONE])
    index = _numbered(np.concatenate([rows, elsewhere]))
    ours, others = index[: len(rows)], index[len(rows) :]
    size = np.zeros(index.max(initial=-1) + 1, np.int64)
    size[ours] = rows[:, 2]
    size[others] = 0
    holders = np.bincount(ours, minlength=len(size))
    alone = int(size[holders > 0].sum())
    ends = np.cumsum([len(linked[name]) for name in names])
    mine = dict(zip(names, np.split(ours, ends[:-1]), strict=True)) if names else {}
    gone: list[Savepoint] = []
    for savepoint in _aging(savepoints)[:-1]:
        if alone <= max_bytes:
            break
        if savepoint.id in held:
            continue
        gone.append(savepoint)
        holders[mine[savepoint.id]] -= 1
        left = mine[savepoint.id][holders[mine[savepoint.id]] == 0]
        alone -= int(size[left].sum())
    return gone


def _numbered(files: Files) -> npt.NDArray[np.intp]:
    """A number for each file, from 0 on, the same for the same device and inode."""
    devices, device = np.unique(files[:, 0], return_inverse=True)
    _, inode = np.unique(files[:, 1], return_inverse=True)
    numbers: npt.NDArray[np.intp] = np.unique(inode * max(len(devices), 1) + device, return_inverse=True)[1]
    return numbers


def _aging(savepoints: Sequence[Savepoint]) -> list[Savepoint]:
    return [s for s in sorted(savepoints, key=lambda s: s.taken_at) if s.reason in AGING]


_OF_SAVEPOINTS = ("savepoints", "_savepoints")
"""Names of folders with savepoints' files, in the state and in the tables."""
_MB = 1 << 20
_NAMES_WAIT = 5.0
"""Seconds that retention waits for another process to give or drop a name: each takes a moment."""


def prune(settings: Settings, stream: Stream) -> list[str]:
    """Drop savepoints past their age or too large together, and unfinished ones; returns the names of the dropped.

    The lock of names is held only while savepoints are forgotten, not while they are measured or their files are
    removed: streams of one home do not wait for each other. Raises TransientError if another process holds it too long.
    """
    held = _held(settings, stream.name)
    existing = savepoints.savepoints(settings, stream.name)
    gone = [s.id for s in expired(existing, settings.savepoint, time.time(), held)]
    if settings.savepoint.max_mb:
        left = [s for s in existing if s.id not in gone]
        gone += [s.id for s in beyond(settings, stream, left, settings.savepoint.max_mb * _MB, held)]
    if gone:
        with only_one(settings, wait=_NAMES_WAIT):
            now = {s.id: s.reason for s in savepoints.savepoints(settings, stream.name)}
            named = _held(settings, stream.name)
            chosen = {s.id: s.reason for s in existing}
            gone = [name for name in gone if name not in named and now.get(name, chosen[name]) == chosen[name]]
            for name in gone:  # from here on none of them can get a name
                savepoints.forget(settings, stream.name, name)
    begun = (
        p for p in savepoints.folder(settings, stream.name).glob("g*-b*") if p.name not in {s.id for s in existing}
    )
    gone += [path.name for path in begun if time.time() - _changed(path) > _DAY / 24]
    for name in gone:
        savepoints.drop(settings, stream, name)
    return gone


def _changed(folder: Location) -> float:
    """When a savepoint's folder was changed last, seconds since 1970."""
    if isinstance(folder, Path):
        return folder.stat().st_mtime
    return max((status.st_mtime for _, status in files_below(folder)), default=0.0)


def beyond(
    settings: Settings,
    stream: Stream,
    candidates: Sequence[Savepoint],
    max_bytes: int,
    held: Collection[str] = (),
) -> list[Savepoint]:
    """The oldest of these to drop, so that the files held only by savepoints take at most `max_bytes`."""
    linked = {}
    for savepoint in candidates:
        saved = savepoints.saved_as(settings, savepoint.stream, savepoint.id)
        linked[savepoint.id] = savepoints.links(saved.folder, savepoints.folders_of(settings, stream, savepoint))
    tables = {table.name for savepoint in candidates for table in savepoint.tables}
    folders = (StreamFolder.of(settings, stream.name).path, *(settings.tables / name for name in sorted(tables)))
    # An object of a store has one name, so none is both of a savepoint and of something else.
    elsewhere = savepoints.files_of((each for each in folders if isinstance(each, Path)), _OF_SAVEPOINTS)
    return too_large(candidates, linked, elsewhere, max_bytes, held)


# Savepoints of a running stream, which are taken by themselves: none of their failures stops the stream.
#
# A periodic savepoint is taken in a thread of its own while later batches run: it is of the batch after which it
# was due, and of the tables' versions after that batch, which no later commit changes. One at a time; the runner
# waits for it before it lets go of the stream (`settled`). If the process dies meanwhile, the savepoint has no
# savepoint.json, so there is none, and retention removes what is there of it.


class PeriodicSavepoints:
    """Takes a running stream's savepoints at an interval; `after` is called between two batches."""

    def __init__(self, settings: Settings, stream: Stream, record: StreamRecord) -> None:
        self._settings, self._stream, self._record = settings, stream, record
        newest = max((s.taken_at for s in savepoints.savepoints(settings, record.stream)), default=None)
        self._last = newest if newest is not None else time.time()
        self._taking: threading.Thread | None = None

    def after(self, batch: int) -> None:
        """Begin to take one after this batch if it is time, and none is being taken."""
        every = self._settings.savepoint.every.total_seconds()
        if batch < 0 or not every or time.time() - self._last < every or not self.settled(0):
            return
        self._last = time.time()
        # No daemon: an interpreter that ends in order waits for it.
        self._taking = threading.Thread(target=self._take, args=(batch,), name=f"savepoint {self._stream.name}")
        self._taking.start()

    def settled(self, seconds: float) -> bool:
        """Wait at most so long for the savepoint that is being taken; True if there is none any longer."""
        if self._taking is None:
            return True
        self._taking.join(seconds)
        return not self._taking.is_alive()

    def _take(self, batch: int) -> None:
        try_take(self._settings, self._stream, self._record, batch, "time")


def try_take(
    settings: Settings, stream: Stream, record: StreamRecord, batch: int, reason: Reason, note: str = ""
) -> Savepoint | None:
    """Take one, and drop those past their age; a failure is only logged, since the stream can continue without it."""
    taken = None
    faults: tuple[type[Exception], ...] = (OSError, RecourseError, ValueError, KeyError)
    faults += tuple(fault for store in stores(stream) for fault in store.faults)
    try:
        taken = savepoints.take(settings, stream, record, batch, reason, note)
        prune(settings, stream)
        stream_record.prune(settings, record, settings.savepoint.keep_generations)
    except faults as error:
        what = "no savepoint was taken" if taken is None else "old savepoints and generations stay for now"
        log.warning(what, stream=record.stream, batch=batch, reason=str(error)[:300])
    if taken is not None:
        log.info("savepoint", stream=record.stream, savepoint=taken.id, reason=reason)
    return taken
