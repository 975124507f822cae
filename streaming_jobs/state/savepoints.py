"""Savepoints: a stream as it was after one batch. A rewind, an undo and an abort each return to a savepoint.

    <state>/<stream>/savepoints/g0001-b000000041/savepoint.json   written last: without it there is no savepoint
                                                 checkpoint/      Spark's checkpoint, cut after the batch

The rows of each table are retained by its store, which may write its files there too (`sinks/delta/store.py`). Only
log entries are copied, so a savepoint costs as much disk as was rewritten since. Its name is the generation and the
batch: taking it a second time changes nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import structlog

from streaming_jobs.errors import PreflightRefused, RecourseError, UsageError
from streaming_jobs.ledger.entry import NO_CODE, CodeVersion, Txn
from streaming_jobs.ledger.positions import OffsetRange, TopicOffsets, decode
from streaming_jobs.platform.files import private_folder, sync, write_json
from streaming_jobs.settings import SavepointSettings, Settings
from streaming_jobs.sinks.stored import Content, SavedAs, SavedTable, StoredTable, TableStore
from streaming_jobs.sinks.tables import all_tables, existing_table, store_of, stores
from streaming_jobs.state import named_savepoints, stream_record
from streaming_jobs.state.checkpoint import cut
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream

# The choice of savepoints to drop: by age, and by the bytes that only savepoints still hold.
#
# A savepoint's files never change, so they are listed once, when it is taken: `links.npy` in its folder has a row
# of device, inode and bytes for each. Retention then compares these lists with the files of the table and of the
# checkpoints, and looks at no link again.

_DAY = 86_400.0
AGING = ("time", "code", "name")
"""Reasons of savepoints that are dropped with age; those with a name only after the name."""
LINKS = "links.npy"
Files = npt.NDArray[np.uint64]
"""Files as rows of device, inode and bytes."""
_NONE: Files = np.empty((0, 3), np.uint64)


def expired(
    savepoints: Sequence[Savepoint], rule: SavepointSettings, now: float, held: Collection[str] = ()
) -> list[Savepoint]:
    """The savepoints to drop because of their age; those taken on purpose, and those that names hold, stay.

    All stay for `keep`, the first of each day and those of recoveries for `keep_daily`, and the newest one always.
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


def files_below(places: Iterable[Path], without: Collection[str] = ()) -> Iterator[os.stat_result]:
    """Yields the `stat` of every file below these folders; a file that is removed meanwhile is left out.

    Folders whose names are in `without` are not entered.
    """
    for place in places:
        for folder, inner, names in os.walk(place, onerror=_unless_gone):
            inner[:] = [name for name in inner if name not in without]
            for name in names:
                with suppress(FileNotFoundError):
                    yield Path(folder, name).stat()


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def list_links(folder: Path, places: Iterable[Path]) -> Files:
    """List the files of a savepoint once and for all; on disk when this returns. `folder` is its own."""
    files = files_of(places)
    partial = folder / f".{LINKS}"
    with partial.open("wb") as file:
        np.save(file, files)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / LINKS)
    sync(folder)
    return files


def links(folder: Path, places: Iterable[Path]) -> Files:
    """The files of a savepoint; those of one that an earlier version took are listed now."""
    try:
        with (folder / LINKS).open("rb") as file:
            return np.asarray(np.load(file, allow_pickle=False), np.uint64).reshape(-1, 3)
    except (FileNotFoundError, ValueError, EOFError):
        return list_links(folder, places) if folder.is_dir() else files_of(places)


def files_of(places: Iterable[Path], without: Collection[str] = ()) -> Files:
    """The files below these folders, each once, but for those in folders with the names `without`."""
    found = {(each.st_dev, each.st_ino): each.st_size for each in files_below(places, without)}
    return np.array([(*place, size) for place, size in found.items()], np.uint64).reshape(-1, 3)


Reason = Literal["time", "code", "purpose", "recovery", "name"]
_FORMAT = 1
_NAME = re.compile(r"g\d{4,}-b\d{9,}")
_OF_SAVEPOINTS = ("savepoints", "_savepoints")
"""Names of folders with savepoints' files, in the state and in the tables."""
_MB = 1 << 20
_ATTEMPTS = 3
_NAMES_WAIT = 5.0
"""Seconds that retention waits for another process to give or drop a name: each takes a moment."""


@dataclass(frozen=True)
class Savepoint:
    """The content of savepoint.json. `ends`: topic -> partition -> offset; `taken_at` in seconds since 1970."""

    stream: str
    generation: int
    batch: int
    taken_at: float
    reason: Reason
    note: str
    ends: TopicOffsets
    topic_ids: Mapping[str, str]
    code: CodeVersion
    state_fingerprint: Mapping[str, str]
    tables: tuple[SavedTable, ...]

    @property
    def id(self) -> str:
        return name_of(Txn(self.generation, self.batch))

    @property
    def txn(self) -> Txn:
        """The batch it was taken after."""
        return Txn(self.generation, self.batch)

    @property
    def offsets(self) -> tuple[OffsetRange, ...]:
        """The end of that batch, in the form of a ledger entry's offsets."""
        return tuple(OffsetRange(topic, self.topic_ids[topic], {}, dict(ends)) for topic, ends in self.ends.items())


@dataclass(frozen=True)
class Cost:
    """The disk space of a savepoint: files and bytes (`size`), and the bytes that only it still holds (`alone`)."""

    files: int
    size: int
    alone: int


def name_of(txn: Txn) -> str:
    return f"g{txn.generation:04d}-b{txn.batch:09d}"


def folder(settings: Settings, stream: str) -> Path:
    return StreamFolder.of(settings, stream).savepoints


def checkpoint_of(settings: Settings, savepoint: Savepoint) -> Path:
    return folder(settings, savepoint.stream) / savepoint.id / "checkpoint"


def take(
    settings: Settings, stream: Stream, record: StreamRecord, batch: int, reason: Reason, note: str = ""
) -> Savepoint:
    """Take a savepoint after a batch of the current generation; one that exists already is returned.

    Raises UsageError or PreflightRefused when the checkpoint or a table no longer shows that moment.
    """
    txn = Txn(record.generation, batch)
    with suppress(PreflightRefused, UsageError):  # where the log no longer reaches back, nothing shows a change
        drop_outdated(settings, stream, record, batch)
    if (existing := find(settings, record.stream, name_of(txn))) is not None:
        return existing
    for attempt in range(_ATTEMPTS):
        try:
            return _take(settings, stream, record, txn, reason, note)
        except FileNotFoundError:  # a running driver has just removed or rewritten a file: it is listed anew
            if attempt + 1 == _ATTEMPTS:
                raise
    raise AssertionError


def savepoints(settings: Settings, stream: str) -> list[Savepoint]:
    """All savepoints of a stream, oldest first."""
    loaded = (_load(path) for path in folder(settings, stream).glob("g*-b*/savepoint.json"))
    return sorted((s for s in loaded if s is not None), key=lambda savepoint: savepoint.txn)


def find(settings: Settings, stream: str, name: str) -> Savepoint | None:
    return _load(folder(settings, stream) / name / "savepoint.json") if _NAME.fullmatch(name) else None


def contents_of(settings: Settings, stream: Stream, savepoint: Savepoint) -> dict[str, Content]:
    """The content of each table at a savepoint, by name."""
    saved, contents = _saved_as(settings, savepoint.stream, savepoint.id), dict[str, Content]()
    for store, names in _by_store(stream, (table.name for table in savepoint.tables)):
        contents |= store.retained(settings, [table for table in savepoint.tables if table.name in names], saved)
    return contents


def drop(settings: Settings, stream: Stream, name: str) -> None:
    """Remove a savepoint; savepoint.json first, so that a kill leaves unused files and no half savepoint."""
    saved = _saved_as(settings, stream.name, name)
    _forget(settings, stream.name, name)
    for store in stores(stream):
        store.release(settings, saved)
    shutil.rmtree(saved.folder, ignore_errors=True)


def _forget(settings: Settings, stream: str, name: str) -> None:
    """Remove savepoint.json, so that there is no savepoint; its files stay for now."""
    (folder(settings, stream) / name / "savepoint.json").unlink(missing_ok=True)


def drop_outdated(settings: Settings, stream: Stream, record: StreamRecord, batch: int) -> None:
    """Drop the savepoint of a batch if rows have changed since: by an accepted other writer, or a rebuilt slice."""
    txn = Txn(record.generation, batch)
    savepoint = find(settings, record.stream, name_of(txn))
    if savepoint is None:
        return
    for saved in savepoint.tables:
        table = _open(settings, stream, saved.name)
        now = version_after(table, stream.name, txn)
        since = [c for c in table.commits() if saved.version < c.version <= now]
        if any(c.changes_data for c in since):
            drop(settings, stream, savepoint.id)
            return


def keep_for_recovery(settings: Settings, savepoint: Savepoint) -> None:
    """Retain a savepoint as long as those of recoveries, if its age would let it be dropped earlier."""
    if savepoint.reason in AGING:
        keep_for(settings, savepoint, "recovery", savepoint.note)


def keep_for(settings: Settings, savepoint: Savepoint, reason: Reason, note: str) -> Savepoint:
    """Give an existing savepoint another reason to be retained."""
    kept = replace(savepoint, reason=reason, note=note)
    _write(settings, kept)
    return kept


def prune(settings: Settings, stream: Stream) -> list[str]:
    """Drop savepoints past their age or too large together, and unfinished ones; returns the names of the dropped.

    The lock of names is held only while savepoints are forgotten, not while they are measured or their files are
    removed: streams of one home do not wait for each other. Raises TransientError if another process holds it too long.
    """
    held = named_savepoints.held(settings, stream.name)
    existing = savepoints(settings, stream.name)
    gone = [s.id for s in expired(existing, settings.savepoint, time.time(), held)]
    if settings.savepoint.max_mb:
        left = [s for s in existing if s.id not in gone]
        gone += [s.id for s in beyond(settings, stream, left, settings.savepoint.max_mb * _MB, held)]
    if gone:
        with named_savepoints.only_one(settings, wait=_NAMES_WAIT):
            now = {s.id: s.reason for s in savepoints(settings, stream.name)}
            named = named_savepoints.held(settings, stream.name)
            chosen = {s.id: s.reason for s in existing}
            gone = [name for name in gone if name not in named and now.get(name, chosen[name]) == chosen[name]]
            for name in gone:  # from here on nobody gives one of them a name
                _forget(settings, stream.name, name)
    begun = (p for p in folder(settings, stream.name).glob("g*-b*") if p.name not in {s.id for s in existing})
    gone += [path.name for path in begun if time.time() - path.stat().st_mtime > _DAY / 24]
    for name in gone:
        drop(settings, stream, name)
    return gone


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
        saved = _saved_as(settings, savepoint.stream, savepoint.id)
        linked[savepoint.id] = links(saved.folder, _places(settings, stream, savepoint))
    tables = {table.name for savepoint in candidates for table in savepoint.tables}
    places = [StreamFolder.of(settings, stream.name).path, *(settings.tables / name for name in sorted(tables))]
    elsewhere = files_of(places, _OF_SAVEPOINTS)
    return too_large(candidates, linked, elsewhere, max_bytes, held)


def cost(settings: Settings, stream: Stream, savepoint: Savepoint) -> Cost:
    files = list(files_below(_places(settings, stream, savepoint)))
    return Cost(len(files), sum(f.st_size for f in files), sum(f.st_size for f in files if f.st_nlink == 1))


def _places(settings: Settings, stream: Stream, savepoint: Savepoint) -> list[Path]:
    """The folders with a savepoint's files."""
    saved = _saved_as(settings, savepoint.stream, savepoint.id)
    beside = [
        place
        for store, names in _by_store(stream, (table.name for table in savepoint.tables))
        for name in names
        for place in store.retained_in(settings, name, saved)
    ]
    return [saved.folder, *beside]


def _saved_as(settings: Settings, stream: str, name: str) -> SavedAs:
    return SavedAs(stream, name, folder(settings, stream) / name)


def _by_store(stream: Stream, tables: Iterable[str]) -> list[tuple[TableStore, list[str]]]:
    """These tables of the stream, by store; one that is no longer declared is in the store of the primary table."""
    declared = {table.name: table for table, _ in all_tables(stream)}
    groups: list[tuple[TableStore, list[str]]] = [(store, []) for store in stores(stream)]
    for name in tables:
        store = store_of(declared.get(name, stream.primary))
        next(names for each, names in groups if each is store).append(name)
    return [(store, names) for store, names in groups if names]


def _open(settings: Settings, stream: Stream, name: str) -> StoredTable:
    """A table that the stream is bound to; raises PreflightRefused if it is gone or no longer declared."""
    declared = next((table for table, _ in all_tables(stream) if table.name == name), None)
    if declared is None:
        raise PreflightRefused(f"stream {stream.name} no longer writes table {name}", "declare the sink again")
    return existing_table(settings, declared, stream.name)


def version_after(table: StoredTable, stream: str, txn: Txn) -> int:
    """The table's version after the batch, and after the upkeep between it and the stream's next commit.

    Raises PreflightRefused when the log does not reach back to it.
    """
    version: int | None = None
    oldest = -1
    for commit in table.commits():
        version = commit.version if version is None else version
        oldest = commit.version
        entry = commit.entry
        if entry is None or not commit.moves(stream):
            continue
        if entry.kind == "publish" and entry.txn > txn:
            raise PreflightRefused(
                f"{txn} was replayed by plan {entry.plan}: no version of table {table.name} shows it alone",
                f"choose {entry.txn} or a later batch, or a savepoint",
            )
        if entry.txn <= txn:
            return version
        version = commit.version - 1
    if version is None or oldest > 0:
        raise PreflightRefused(
            f"the log of table {table.name} no longer shows {txn}", "choose a later batch, or a savepoint"
        )
    return version


def _take(settings: Settings, stream: Stream, record: StreamRecord, txn: Txn, reason: Reason, note: str) -> Savepoint:
    saved = _saved_as(settings, record.stream, name_of(txn))
    private_folder(saved.folder.parent)
    place = private_folder(saved.folder)
    checkpoint = StreamFolder.of(settings, record.stream).checkpoint(txn.generation)
    cut(checkpoint, txn.batch, place / "checkpoint")
    tables = _retained(settings, stream, record, txn, saved)
    code = next((c for c in reversed(record.code) if c.since <= txn), None)
    savepoint = Savepoint(
        stream=record.stream,
        generation=txn.generation,
        batch=txn.batch,
        taken_at=time.time(),
        reason=reason,
        note=note,
        ends={topic: dict(ends) for topic, ends in checkpoint.end(txn.batch).items()},
        topic_ids={topic.name: topic.topic_id for topic in record.topics},
        code=code.version if code else NO_CODE,
        state_fingerprint=dict(record.state_fingerprint),
        tables=tables,
    )
    list_links(saved.folder, _places(settings, stream, savepoint))
    _write(settings, savepoint)
    return savepoint


def _write(settings: Settings, savepoint: Savepoint) -> None:
    path = folder(settings, savepoint.stream) / savepoint.id / "savepoint.json"
    write_json(path, {"format": _FORMAT, **asdict(savepoint)})


def _retained(
    settings: Settings, stream: Stream, record: StreamRecord, txn: Txn, saved: SavedAs
) -> tuple[SavedTable, ...]:
    """Let the stores retain the rows of every bound table after the batch; returns them in the record's order."""
    done: dict[str, SavedTable] = {}
    for store, names in _by_store(stream, (bound.name for bound in record.tables)):
        tables = [_open(settings, stream, name) for name in names]
        versions = [(table, version_after(table, stream.name, txn)) for table in tables]
        done |= {table.name: table for table in store.retain(versions, saved)}
    return tuple(done[bound.name] for bound in record.tables)


def _load(path: Path) -> Savepoint | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PreflightRefused(
            f"{path} cannot be read: {error}", "remove its folder; that savepoint is lost"
        ) from error
    if value.pop("format") != _FORMAT:
        raise UsageError(f"{path} was written by a newer version", "use the newer recourse-streams")
    ends = decode(value.pop("ends"))
    tables = tuple(SavedTable(**{**t, "partition_by": tuple(t["partition_by"])}) for t in value.pop("tables"))
    return Savepoint(**{**value, "ends": ends, "tables": tables, "code": CodeVersion(*value["code"])})


# Savepoints of a running stream, which are taken by themselves: none of their failures stops the stream.
#
# A periodic savepoint is taken in a thread of its own while later batches run: it is of the batch after which it
# was due, and of the tables' versions after that batch, which no later commit changes. One at a time; the runner
# waits for it before it lets go of the stream (`settled`). If the process dies meanwhile, the savepoint has no
# savepoint.json, so there is none, and retention removes what is there of it.

log = structlog.get_logger()


class PeriodicSavepoints:
    """Takes a running stream's savepoints at an interval; `after` is called between two batches."""

    def __init__(self, settings: Settings, stream: Stream, record: StreamRecord) -> None:
        self._settings, self._stream, self._record = settings, stream, record
        newest = max((s.taken_at for s in savepoints(settings, record.stream)), default=None)
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
        taken = take(settings, stream, record, batch, reason, note)
        prune(settings, stream)
        stream_record.prune(settings, record, settings.savepoint.keep_generations)
    except faults as error:
        what = "no savepoint was taken" if taken is None else "old savepoints and generations stay for now"
        log.warning(what, stream=record.stream, batch=batch, reason=str(error)[:300])
    if taken is not None:
        log.info("savepoint", stream=record.stream, savepoint=taken.id, reason=reason)
    return taken
