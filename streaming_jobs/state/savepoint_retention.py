"""Which savepoints go: by age, and by the bytes that nothing but savepoints holds any more."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from streaming_jobs.settings import SavepointSettings

if TYPE_CHECKING:
    from streaming_jobs.state.savepoints import Savepoint

_DAY = 86_400.0
_AGING = ("time", "code")
_Inode = tuple[int, int]


def expired(kept: Sequence[Savepoint], rule: SavepointSettings, now: float) -> list[Savepoint]:
    """Which of these may go: those taken on purpose stay, of the others the age decides.

    All stay for `keep`; then the first of each day for `keep_daily`, and those of recoveries as long; the newest one
    stays in any case.
    """
    days: set[int] = set()
    gone = [s for s in kept if s.reason == "recovery" and timedelta(seconds=now - s.taken_at) > rule.keep_daily]
    for savepoint in _aging(kept)[:-1]:
        age, day = timedelta(seconds=now - savepoint.taken_at), int(savepoint.taken_at // _DAY)
        if age > rule.keep and (day in days or age > rule.keep_daily):
            gone.append(savepoint)
        days.add(day)
    return gone


def too_large(kept: Sequence[Savepoint], folders: Mapping[str, Iterable[Path]], max_bytes: int) -> list[Savepoint]:
    """The oldest ones that have to go so that what only savepoints hold is at most `max_bytes`.

    `folders` are where each savepoint's files lie, by its name. A file is held by savepoints alone when all of its
    names are theirs. Those taken on purpose, those of recoveries and the newest one stay, whatever they hold.
    """
    size: dict[_Inode, int] = {}
    names: dict[_Inode, int] = {}
    mine = {name: _links(places, size, names) for name, places in folders.items()}
    ours: Counter[_Inode] = Counter()
    for links in mine.values():
        ours.update(links)
    alone = sum(size[inode] for inode, count in ours.items() if count == names[inode])
    gone: list[Savepoint] = []
    for savepoint in _aging(kept)[:-1]:
        if alone <= max_bytes:
            break
        gone.append(savepoint)
        for inode, count in mine[savepoint.id].items():
            ours[inode] -= count
            names[inode] -= count
            if not names[inode]:
                alone -= size[inode]
    return gone


def _aging(kept: Sequence[Savepoint]) -> list[Savepoint]:
    return [s for s in sorted(kept, key=lambda s: s.taken_at) if s.reason in _AGING]


def files_below(places: Iterable[Path]) -> Iterator[os.stat_result]:
    """What the system says of every file below these folders; what goes meanwhile is passed over."""
    for place in places:
        for folder, _, names in os.walk(place, onerror=_unless_gone):
            for name in names:
                with suppress(FileNotFoundError):
                    yield Path(folder, name).stat()


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _links(places: Iterable[Path], size: dict[_Inode, int], names: dict[_Inode, int]) -> Counter[_Inode]:
    """How often each file lies there. State and tables may be on two file systems, each with numbers of its own."""
    found: Counter[_Inode] = Counter()
    for status in files_below(places):
        inode = (status.st_dev, status.st_ino)
        found[inode] += 1
        size[inode], names[inode] = status.st_size, status.st_nlink
    return found
