"""The files of a table's log that may be removed, by Delta's protocol, section "Metadata Cleanup".

A commit may be removed if there is a complete checkpoint at its version or a later one: the versions from that
checkpoint on stay readable, earlier ones do not. Files with other names than these are left alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

from streaming_jobs.platform.delta_log import UNREAD, actions, names_on_disk
from streaming_jobs.sinks.stored import Need
from streaming_jobs.storage.locations import Location, StorePath, files_below, moved, remove_tree

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.parquet")
_PART = re.compile(r"(\d{20})\.checkpoint\.(\d{10})\.(\d{10})\.parquet")
_BESIDE = re.compile(r"(\d{20})\.(?:crc|(?:json|checkpoint\.parquet)#\d+)|\d{20}\.(\d{20})\.compacted\.json")


@dataclass(frozen=True)
class LogFile:
    """One file of a log; `version` is the last one that it covers, `modified` in seconds since 1970, `size` on disk.

    A part of a checkpoint is of kind `beside`: only checkpoints in one file count as complete.
    """

    path: Location
    kind: Literal["commit", "checkpoint", "beside"]
    version: int
    modified: float
    size: int = 0


def log_files(log: Location) -> Iterator[LogFile]:
    """The files of a log whose names are known."""
    if isinstance(log, StorePath):
        for name, found in files_below(log):
            if (known := _known(name)) is not None:
                yield LogFile(log / name, *known, found.st_mtime, found.st_size)
        return
    with os.scandir(log) as listing:
        for file in listing:
            if (known := _known(file.name)) is None:
                continue
            try:
                status = file.stat()
            except FileNotFoundError:
                continue
            yield LogFile(Path(file.path), *known, status.st_mtime, status.st_blocks * 512)


def _known(name: str) -> tuple[Literal["commit", "checkpoint", "beside"], int] | None:
    """The kind and the version of a file of a log by its name."""
    if match := _COMMIT.fullmatch(name):
        return "commit", int(match[1])
    if match := _CHECKPOINT.fullmatch(name):
        return "checkpoint", int(match[1])
    match = _PART.fullmatch(name) or _BESIDE.fullmatch(name)
    return None if match is None else ("beside", int(match[1] or match[2]))


def expired(
    files: Iterable[LogFile],
    *,
    now: float,
    retention: timedelta,
    versions: int,
    needed: int | None,
) -> list[LogFile]:
    """The files that may be removed, oldest first.

    A version stays while it is younger than `retention` and among the newest `versions` (0: no such bound). The version
    `needed` and all later ones stay in any case, and so does the checkpoint that the oldest of them starts from.
    """
    files = sorted(files, key=lambda file: (file.version, file.path.name))
    commits = [file for file in files if file.kind == "commit"]
    if not commits:
        return []
    newest = commits[-1].version
    young = (file.version for file in commits if file.modified >= now - retention.total_seconds())
    keep = next(young, newest)
    if versions:
        keep = max(keep, newest - versions + 1)
    keep = keep if needed is None else min(keep, needed)
    starts = [file.version for file in files if file.kind == "checkpoint" and file.version <= keep]
    return [file for file in files if file.version < max(starts)] if starts else []


def bounded(
    commits: Sequence[LogFile],
    needs: Iterable[Need],
    *,
    now: float,
    retention: timedelta,
    max_bytes: int,
    removed: Callable[[LogFile], int],
) -> int | None:
    """The first version that stays for readers: younger than `retention`, and within `max_bytes`.

    `commits` are the newest first, without a gap; `removed` are the bytes of the files that one took out of the table,
    which stay for readers of the versions before it. None if no reader needs any. One that reads an older version next
    cannot continue, whatever stays: it does not count.
    """
    needs = list(needs)
    if not commits or not needs:
        return None
    oldest, held = commits[0].version, 0
    for commit in commits:
        held += commit.size
        if commit.version < commits[0].version and (
            held > max_bytes or commit.modified < now - retention.total_seconds()
        ):
            break
        oldest = commit.version
        held += removed(commit)
    return min((max(need.first, oldest) for need in needs if need.then is None or need.then >= oldest), default=None)


# Commits that a table's log has done with, and that streams which read the table have not read: `<table>/_unread`.
#
# Each append lists the log, so that stays short. What readers still need is moved beside it: the commits, and
# checkpoints from which the table's content at each of them can be had. The folder continues the log backwards, without
# a gap, and is a Delta log itself; Delta's readers and VACUUM skip its name. Only the driver of the stream that writes
# the table changes it, and remembers what is there.

_CHECKPOINT_EVERY = 1_000


@dataclass(frozen=True)
class Removal:
    """What a commit took out of the table: the names that the files may have on disk, and their bytes."""

    names: frozenset[str] = frozenset()
    size: int = 0


@dataclass
class UnreadLog:
    """The commits of the table in a folder that are kept for its readers."""

    table: Location
    _files: dict[int, LogFile] | None = field(default=None, init=False)
    _checkpoints: dict[int, LogFile] = field(default_factory=dict, init=False)
    _removals: dict[int, Removal] = field(default_factory=dict, init=False)

    @property
    def log(self) -> Location:
        return self.table / UNREAD / "_delta_log"

    def before(self, log: Iterable[LogFile]) -> list[LogFile]:
        """The commits of the table's log and of this one, newest first, as far back as there is no gap."""
        there = {file.version: file for file in log if file.kind == "commit"}
        number, commits = max(there, default=-1), []
        kept = self._commits()
        while (file := there.get(number) or kept.get(number)) is not None:
            commits.append(file)
            number -= 1
        return commits

    def removal(self, commit: LogFile) -> Removal:
        if (known := self._removals.get(commit.version)) is None:
            removes = [a["remove"] for a in actions(commit.path, containing='"remove"') if a.get("remove")]
            names = frozenset(name for each in removes for name in names_on_disk(str(each["path"])))
            known = Removal(names, sum(int(each.get("size") or 0) for each in removes))
            self._removals[commit.version] = known
        return known

    def keep(self, leaving: Sequence[LogFile], first: int | None) -> None:
        """Move what readers need from `first` on of the files that leave the log, the oldest first."""
        if first is None or not any(file.kind == "commit" and file.version >= first for file in leaving):
            return
        commits = self._commits()
        bases = [v for v in (*self._checkpoints, *(f.version for f in leaving if f.kind == "checkpoint")) if v <= first]
        base = max(bases, default=0)
        for file in leaving:
            needed = file.version >= base
            if file.kind == "checkpoint":
                needed = file.version == base or (needed and self._far(file.version))
            if not needed or file.kind == "beside":
                continue
            kept = replace(file, path=moved(file.path, self.log / file.path.name))
            (commits if file.kind == "commit" else self._checkpoints)[file.version] = kept

    def trim(self, first: int | None, start: int) -> None:
        """Remove what no reader needs from `first` on; the table's log begins at `start`."""
        oldest = start if first is None else min(start, first)
        self._removals = {version: removal for version, removal in self._removals.items() if version >= oldest}
        commits = self._commits()
        if first is None or first >= start:
            remove_tree(self.table / UNREAD)
            self._files = None
            return
        base = max((version for version in self._checkpoints if version <= first), default=0)
        for files in (self._checkpoints, commits):
            for version in sorted(version for version in files if version < base):
                files.pop(version).path.unlink(missing_ok=True)

    def _far(self, version: int) -> bool:
        """True if a checkpoint is far enough after the last one: the folder gets shorter by such steps."""
        return version - max(self._checkpoints, default=-_CHECKPOINT_EVERY) >= _CHECKPOINT_EVERY

    def _commits(self) -> dict[int, LogFile]:
        if self._files is None:
            found = list(self._listed())
            self._files = {file.version: file for file in found if file.kind == "commit"}
            self._checkpoints = {file.version: file for file in found if file.kind == "checkpoint"}
        return self._files

    def _listed(self) -> Iterator[LogFile]:
        if self.log.is_dir():
            yield from log_files(self.log)
