"""The choice of savepoints to drop: by age, and by the bytes that only savepoints still hold.

A savepoint's files never change, so they are listed once, when it is taken: `links.npy` in its folder has a row of
device, inode and bytes for each. Retention then compares these lists with the files of the table and of the
checkpoints, and looks at no link again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streaming_jobs.files import sync
from streaming_jobs.settings import SavepointSettings

if TYPE_CHECKING:
    from streaming_jobs.state.savepoints import Savepoint

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
