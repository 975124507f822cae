"""Files below a table's folder that no version lists, and which of them may be deleted.

The age of a file that was removed from the table counts from its removal, which the log records (its newest checkpoint
keeps removals for `delta.deletedFileRetentionDuration`). The age of a file that never was in the table, left by a batch
or a writer that died, counts from its own time. Top-level folders whose names begin with `_` are not searched, as Delta
requires of VACUUM, with the same exception: `_change_data`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from streaming_jobs.platform.delta_log import actions, names_on_disk
from streaming_jobs.sinks.delta.log_cleanup import log_files
from streaming_jobs.storage.locations import Location, Status, StorePath, files_below, opened_for_reading, path_below

_DATA = re.compile(r".*\.parquet(?:#\d+|\.crc)?")
_BATCH_FOLDER = re.compile(r"g\d{4,}")
AT_LEAST = timedelta(minutes=1)
AT_LEAST_ON_STORES = timedelta(hours=1)
"""By size no file is deleted earlier after its removal: a reader may have opened the table just before.

Deletes on a store have no condition. A driver that was paused longer than that, and whose stream another driver has
taken over, could delete a file that is young to the other one.
"""


@dataclass(frozen=True)
class Unlisted:
    """One file: bytes, the time since which no version lists it (seconds since 1970); `removed` if one ever did."""

    path: Location
    size: int
    since: float
    removed: bool
    name: str = ""
    """Its path below the table's folder."""


def find(table: Location, live: Iterable[str]) -> list[Unlisted]:
    """Every unlisted file; `live` are the paths of the table's files as the log has them.

    Raises OSError or ValueError if the log cannot be read: then no file may be deleted.
    """
    listed = {name for path in live for name in names_on_disk(path)}
    removals = {name: at for path, at in _removals(table / "_delta_log").items() for name in names_on_disk(path)}
    unlisted = []
    for path, status in _data_files(table):
        name = path_below(path, table)
        if name not in listed:
            at = removals.get(name)
            unlisted.append(Unlisted(path, status.st_size, status.st_mtime if at is None else at, at is not None, name))
    return unlisted


def due(
    files: Sequence[Unlisted], *, now: float, retention: timedelta, max_bytes: int, at_least: timedelta = AT_LEAST
) -> list[Unlisted]:
    """Files to delete: those past the retention, then the oldest removed ones until the rest is below `max_bytes`."""
    old = [file for file in files if now - file.since > retention.total_seconds()]
    left = sum(file.size for file in files) - sum(file.size for file in old)
    rest = sorted((f for f in files if f.removed and f not in set(old)), key=lambda file: file.since)
    for file in rest:
        if left <= max_bytes or now - file.since <= at_least.total_seconds():
            break
        old.append(file)
        left -= file.size
    return old


def remove_empty_folders(table: Location, *, before: float) -> None:
    """Remove folders without any file that have not changed since `before` (seconds since 1970); a store has none."""
    if isinstance(table, StorePath):
        return
    for top in table.iterdir():
        if top.is_dir() and not _hidden(top.name):
            for folder, _, _ in os.walk(top, topdown=False):
                with os.scandir(folder) as inside:
                    empty = next(inside, None) is None
                if empty and Path(folder).stat().st_mtime < before:
                    Path(folder).rmdir()


STAGED = "_staged-"
"""The beginning of folders with tables that are staged below a table on a store, whose files a publish lists there."""


def _hidden(name: str) -> bool:
    """True if Delta's readers and VACUUM skip it; a partition column's name may begin with `_`."""
    return name.startswith(("_", ".")) and "=" not in name and not name.startswith(STAGED)


def _data_files(table: Location) -> Iterator[tuple[Location, os.stat_result | Status]]:
    if isinstance(table, StorePath):
        yield from _objects(table)
        return
    waiting = [(table, False)]
    while waiting:
        folder, ours = waiting.pop()
        with os.scandir(folder) as inside:
            for entry in inside:
                top = folder == table
                if entry.is_dir(follow_symlinks=False):
                    if not (top and _hidden(entry.name)) or entry.name == "_change_data":
                        waiting.append((Path(entry.path), ours or (top and bool(_BATCH_FOLDER.fullmatch(entry.name)))))
                elif ours or _DATA.fullmatch(entry.name):
                    try:
                        yield Path(entry.path), entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue


def _objects(table: StorePath) -> Iterator[tuple[StorePath, Status]]:
    """The objects that may be data files, without those of tables that are staged below this one (`content.py`)."""
    found = [(PurePosixPath(name), status) for name, status in files_below(table)]
    staged = {name.parents[1] for name, _ in found if name.parent.name == "_delta_log" and len(name.parts) > 2}
    for name, status in found:
        top = name.parts[0]
        hidden = len(name.parts) > 1 and _hidden(top) and top != "_change_data"
        ours = len(name.parts) > 1 and bool(_BATCH_FOLDER.fullmatch(top))
        if not hidden and (ours or _DATA.fullmatch(name.name)) and not staged.intersection(name.parents):
            assert isinstance(status, Status)
            yield table / name.as_posix(), status


def _removals(log: Location) -> dict[str, float]:
    """Path -> time of removal from the table (seconds since 1970), as far back as the log has removals."""
    files = list(log_files(log))
    checkpoint = max((f for f in files if f.kind == "checkpoint"), key=lambda f: f.version, default=None)
    removals: dict[str, float] = {}
    if checkpoint is not None:
        column = pq.read_table(opened_for_reading(checkpoint.path), columns=["remove"])["remove"]
        removed = pa.table({"remove": column}).filter(pc.is_valid(column)).flatten()
        names, times = removed["remove.path"].to_pylist(), removed["remove.deletionTimestamp"].to_pylist()
        removals.update({name: (at or 0) / 1000 for name, at in zip(names, times, strict=True)})
    since = -1 if checkpoint is None else checkpoint.version
    for file in sorted((f for f in files if f.kind == "commit" and f.version > since), key=lambda f: f.version):
        for action in actions(file.path, containing='"remove"'):
            if (removal := action.get("remove")) is not None:
                removals[str(removal["path"])] = float(str(removal.get("deletionTimestamp") or 0)) / 1000
    return removals
