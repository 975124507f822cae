"""Commits that a table's log has done with, and that streams which read the table have not read: `<table>/_unread`.

Each append lists the log, so that stays short. What readers still need is moved beside it: the commits, and checkpoints
from which the table's content at each of them can be had. The folder continues the log backwards, without a gap, and is
a Delta log itself; Delta's readers and VACUUM skip its name. Only the driver of the stream that writes the table
changes it, and remembers what is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streaming_jobs.platform.delta_log import UNREAD, actions, names_on_disk
from streaming_jobs.sinks.delta.log_cleanup import LogFile, log_files

_CHECKPOINT_EVERY = 1_000


@dataclass(frozen=True)
class Removal:
    """What a commit took out of the table: the names that the files may have on disk, and their bytes."""

    names: frozenset[str] = frozenset()
    size: int = 0


@dataclass
class UnreadLog:
    """The commits of the table in a folder that are kept for its readers."""

    table: Path
    _files: dict[int, LogFile] | None = field(default=None, init=False)
    _checkpoints: dict[int, LogFile] = field(default_factory=dict, init=False)
    _removals: dict[int, Removal] = field(default_factory=dict, init=False)

    @property
    def log(self) -> Path:
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
        self.log.mkdir(parents=True, exist_ok=True)
        for file in leaving:
            needed = file.version >= base
            if file.kind == "checkpoint":
                needed = file.version == base or (needed and self._far(file.version))
            if not needed or file.kind == "beside":
                continue
            moved = LogFile(
                file.path.replace(self.log / file.path.name), file.kind, file.version, file.modified, file.size
            )
            (commits if file.kind == "commit" else self._checkpoints)[file.version] = moved

    def trim(self, first: int | None, start: int) -> None:
        """Remove what no reader needs from `first` on; the table's log begins at `start`."""
        oldest = start if first is None else min(start, first)
        self._removals = {version: removal for version, removal in self._removals.items() if version >= oldest}
        commits = self._commits()
        if first is None or first >= start:
            shutil.rmtree(self.table / UNREAD, ignore_errors=True)
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
