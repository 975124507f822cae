"""The choice of savepoints to drop: by age, and by the bytes that only savepoints still hold."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from streaming_jobs.settings import SavepointSettings

if TYPE_CHECKING:
    from streaming_jobs.state.savepoints import Savepoint

_DAY = 86_400.0
AGING = ("time", "code", "name")
"""Reasons of savepoints that are dropped with age; those with a name only after the name."""
_Inode = tuple[int, int]


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
    savepoints: Sequence[Savepoint], folders: Mapping[str, Iterable[Path]], max_bytes: int, held: Collection[str] = ()
) -> list[Savepoint]:
    """The oldest savepoints to drop, so that the files held only by savepoints take at most `max_bytes`.

    `folders` are the folders with each savepoint's files, by its name. A file is held only by savepoints if all of its
    hard links are theirs. Those taken on purpose, of recoveries, with a name, and the newest one stay, whatever they
    hold.
    """
    size: dict[_Inode, int] = {}
    names: dict[_Inode, int] = {}
    mine = {name: _links(places, size, names) for name, places in folders.items()}
    ours: Counter[_Inode] = Counter()
    for links in mine.values():
        ours.update(links)
    alone = sum(size[inode] for inode, count in ours.items() if count == names[inode])
    gone: list[Savepoint] = []
    for savepoint in _aging(savepoints)[:-1]:
        if alone <= max_bytes:
            break
        if savepoint.id in held:
            continue
        gone.append(savepoint)
        for inode, count in mine[savepoint.id].items():
            ours[inode] -= count
            names[inode] -= count
            if not names[inode]:
                alone -= size[inode]
    return gone


def _aging(savepoints: Sequence[Savepoint]) -> list[Savepoint]:
    return [s for s in sorted(savepoints, key=lambda s: s.taken_at) if s.reason in AGING]


def files_below(places: Iterable[Path]) -> Iterator[os.stat_result]:
    """Yields the `stat` of every file below these folders; a file that is removed meanwhile is left out."""
    for place in places:
        for folder, _, names in os.walk(place, onerror=_unless_gone):
            for name in names:
                with suppress(FileNotFoundError):
                    yield Path(folder, name).stat()


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _links(places: Iterable[Path], size: dict[_Inode, int], names: dict[_Inode, int]) -> Counter[_Inode]:
    """The number of links to each file there; device and inode identify it, as there may be two file systems."""
    links: Counter[_Inode] = Counter()
    for status in files_below(places):
        inode = (status.st_dev, status.st_ino)
        links[inode] += 1
        size[inode], names[inode] = status.st_size, status.st_nlink
    return links
