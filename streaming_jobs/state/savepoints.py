"""Savepoints: a stream as it was after one batch. A rewind, an undo and an abort each return to a savepoint.

    <state>/<stream>/savepoints/g0001-b000000041/savepoint.json   written last: without it there is no savepoint
                                                 checkpoint/      Spark's checkpoint, cut after the batch

The rows of each table are retained by its store, which may write its files there too (`sinks/delta/store.py`). Only
log entries are copied, so a savepoint costs as much disk as was rewritten since. Its name is the generation and the
batch: taking it a second time changes nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.entry import NO_CODE, CodeVersion, Txn
from streaming_jobs.ledger.positions import OffsetRange, TopicOffsets, decode
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import Content, SavedAs, SavedTable, StoredTable, TableStore
from streaming_jobs.sinks.tables import all_tables, existing_table, store_of, stores
from streaming_jobs.state.checkpoint import cut
from streaming_jobs.state.records import read_record, record_bytes
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.storage.files import sync
from streaming_jobs.storage.locations import Location, StorePath, files_below, made_folder, remove_tree
from streaming_jobs.storage.object_files import ObjectHandle
from streaming_jobs.stream import Stream

# The list of a savepoint's files, which never change: made once, when it is taken. `links.npy` in its folder has a row
# of device, inode and bytes for each, so that retention reads no link again.

AGING = ("time", "code", "name")
"""Reasons of savepoints that are dropped with age; those with a name only after the name."""
LINKS = "links.npy"
Files = npt.NDArray[np.uint64]
"""Files as rows of device, inode and bytes."""


def _files(places: Iterable[Location], without: Collection[str] = ()) -> Iterator[tuple[int, int, int, bool]]:
    """Yields device, inode and bytes of each file below these locations, and whether it has no other name.

    An object of a store has one name, whose hash stands for its inode. Folders whose names are in `without` are not
    entered; a file that is removed meanwhile is left out.
    """
    for place in places:
        if isinstance(place, StorePath):
            for name, status in files_below(place):
                digest = hashlib.sha256(f"{place}/{name}".encode()).digest()
                yield 0, int.from_bytes(digest[:8]), status.st_size, True
            continue
        for folder, inner, names in os.walk(place, onerror=_unless_gone):
            inner[:] = [name for name in inner if name not in without]
            for name in names:
                with suppress(FileNotFoundError):
                    found = Path(folder, name).stat()
                    yield found.st_dev, found.st_ino, found.st_size, found.st_nlink == 1


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def list_links(folder: Path, places: Iterable[Location]) -> Files:
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


def links(folder: Location, places: Iterable[Location]) -> Files:
    """The files of a savepoint; listed now if an earlier version took the savepoint, or if it is on a store."""
    if isinstance(folder, StorePath):
        return files_of(places)
    try:
        with (folder / LINKS).open("rb") as file:
            return np.asarray(np.load(file, allow_pickle=False), np.uint64).reshape(-1, 3)
    except (FileNotFoundError, ValueError, EOFError):
        return list_links(folder, places) if folder.is_dir() else files_of(places)


def files_of(places: Iterable[Location], without: Collection[str] = ()) -> Files:
    """The files below these locations, each once, but for those in folders with the names `without`."""
    found = {(device, inode): size for device, inode, size, _ in _files(places, without)}
    return np.array([(*place, size) for place, size in found.items()], np.uint64).reshape(-1, 3)


Reason = Literal["time", "code", "purpose", "recovery", "name"]
_NAME = re.compile(r"g\d{4,}-b\d{9,}")
_ATTEMPTS = 3


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


def folder(settings: Settings, stream: str) -> Location:
    return StreamFolder.of(settings, stream).savepoints


def checkpoint_of(settings: Settings, savepoint: Savepoint) -> Location:
    return folder(settings, savepoint.stream) / savepoint.id / "checkpoint"


def take(
    settings: Settings, stream: Stream, record: StreamRecord, batch: int, reason: Reason, note: str = ""
) -> Savepoint:
    """Take a savepoint after a batch of the current generation, or return the existing one.

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
        except FileNotFoundError:  # a running driver has just removed or rewritten a file: list again
            if attempt + 1 == _ATTEMPTS:
                raise
    raise AssertionError


def savepoints(settings: Settings, stream: str) -> list[Savepoint]:
    """All savepoints of a stream, oldest first."""
    of_stream = StreamFolder.of(settings, stream)
    names = (name for name in of_stream.files.folders("savepoints") if _NAME.fullmatch(name))
    loaded = (_load(of_stream.savepoint(name)) for name in names)
    return sorted((s for s in loaded if s is not None), key=lambda savepoint: savepoint.txn)


def find(settings: Settings, stream: str, name: str) -> Savepoint | None:
    return _load(StreamFolder.of(settings, stream).savepoint(name)) if _NAME.fullmatch(name) else None


def contents_of(settings: Settings, stream: Stream, savepoint: Savepoint) -> dict[str, Content]:
    """The content of each table at a savepoint, by name."""
    saved, contents = saved_as(settings, savepoint.stream, savepoint.id), dict[str, Content]()
    for store, names in _by_store(stream, (table.name for table in savepoint.tables)):
        contents |= store.retained(settings, [table for table in savepoint.tables if table.name in names], saved)
    return contents


def drop(settings: Settings, stream: Stream, name: str) -> None:
    """Remove a savepoint; savepoint.json first, so that a kill leaves unused files and no half savepoint."""
    saved = saved_as(settings, stream.name, name)
    forget(settings, stream.name, name)
    for store in stores(stream):
        store.release(settings, saved)
    remove_tree(saved.folder)


def forget(settings: Settings, stream: str, name: str) -> None:
    """Remove savepoint.json, so that there is no savepoint; its files stay for now."""
    StreamFolder.of(settings, stream).savepoint(name).delete()


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
    """Retain a savepoint as long as recoveries' savepoints, if it would expire earlier."""
    if savepoint.reason in AGING:
        keep_for(settings, savepoint, "recovery", savepoint.note)


def keep_for(settings: Settings, savepoint: Savepoint, reason: Reason, note: str) -> Savepoint:
    """Give an existing savepoint another reason to be retained; raises FileNotFoundError if it is dropped meanwhile."""
    kept, handle = replace(savepoint, reason=reason, note=note), _handle(settings, savepoint)
    if (there := handle.read()) is None:
        raise FileNotFoundError(f"{handle} is gone")
    handle.replace(record_bytes(asdict(kept)), there.tag)
    return kept


def cost(settings: Settings, stream: Stream, savepoint: Savepoint) -> Cost:
    files = list(_files(folders_of(settings, stream, savepoint)))
    return Cost(len(files), sum(size for *_, size, _ in files), sum(size for *_, size, alone in files if alone))


def folders_of(settings: Settings, stream: Stream, savepoint: Savepoint) -> list[Location]:
    saved = saved_as(settings, savepoint.stream, savepoint.id)
    beside = [
        place
        for store, names in _by_store(stream, (table.name for table in savepoint.tables))
        for name in names
        for place in store.retained_in(settings, name, saved)
    ]
    return [saved.folder, *beside]


def saved_as(settings: Settings, stream: str, name: str) -> SavedAs:
    return SavedAs(stream, name, folder(settings, stream) / name)


def _by_store(stream: Stream, tables: Iterable[str]) -> list[tuple[TableStore, list[str]]]:
    """These tables of the stream, by store; an undeclared table is in the store of the primary table."""
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
    saved = saved_as(settings, record.stream, name_of(txn))
    made_folder(saved.folder.parent)
    place = made_folder(saved.folder)
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
    if isinstance(saved.folder, Path):
        list_links(saved.folder, folders_of(settings, stream, savepoint))
    _write(settings, savepoint)
    return savepoint


def _write(settings: Settings, savepoint: Savepoint) -> None:
    _handle(settings, savepoint).put(record_bytes(asdict(savepoint)))


def _handle(settings: Settings, savepoint: Savepoint) -> ObjectHandle:
    return StreamFolder.of(settings, savepoint.stream).savepoint(savepoint.id)


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


def _load(handle: ObjectHandle) -> Savepoint | None:
    def damaged(error: Exception) -> PreflightRefused:
        return PreflightRefused(
            f"{handle} cannot be read: {error}",
            "use the version of recourse-streams that wrote it; if the file is damaged, remove its folder: that "
            "savepoint is lost then",
        )

    return read_record(handle, _savepoint, damaged, newer=UsageError)


def _savepoint(value: dict[str, Any]) -> Savepoint:
    ends = decode(value.pop("ends"))
    tables = tuple(SavedTable(**{**t, "partition_by": tuple(t["partition_by"])}) for t in value.pop("tables"))
    return Savepoint(**{**value, "ends": ends, "tables": tables, "code": CodeVersion(*value["code"])})
