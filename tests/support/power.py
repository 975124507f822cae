"""A power cut in simulation: what was not synced since it changed is gone.

Every `os.fsync` is noted with what the file, or the folder's list of names, held then. `cut` writes the tree as it
would be found afterwards: a file has the content of its last sync (empty without one), a folder the names of its last
sync. What libraries write without Python (deltalake does) is on disk while the test runs, and survives only if we have
synced it. A real file system may keep more; `luck` decides for each change whether it does.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

Names = dict[str, int]


def _none() -> bool:
    return False


class Power:
    """Watches everything below `root`; what is there at the beginning counts as on disk."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.syncs = 0
        self.after_sync: Callable[[], None] = lambda: None
        self._held: dict[int, int] = {}  # keeps the number of an inode from being given to another file
        self._content: dict[int, bytes] = {}
        self._names: dict[int, Names] = {}
        for folder, _, files in os.walk(root):
            for path in (Path(folder), *(Path(folder) / name for name in files)):
                self._note(os.open(path, os.O_RDONLY))
        self._really = os.fsync
        self.one_at_a_time = threading.RLock()
        """Held while files are noted as synced, and by who cuts the power beside threads that sync."""
        monkeypatch.setattr(os, "fsync", self._fsync)

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def cut(self, target: Path, luck: Callable[[], bool] = _none) -> Path:
        """Copy the synced state of the root to `target`, and of the unsynced changes those that `luck` chooses."""
        self._build(self.root.stat().st_ino, self.root, target, luck, {})
        return target

    def _fsync(self, descriptor: int) -> None:
        self._really(descriptor)
        with self.one_at_a_time:
            self._synced(descriptor)

    def _synced(self, descriptor: int) -> None:
        if _path(descriptor).is_relative_to(self.root):
            self._note(os.dup(descriptor))
            self.syncs += 1
            self.after_sync()

    def _note(self, descriptor: int) -> int:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = self._listed(_path(descriptor))
        else:
            self._content[status.st_ino] = _bytes(descriptor)
        return self._hold(descriptor)

    def _hold(self, descriptor: int) -> int:
        inode = os.fstat(descriptor).st_ino
        if inode in self._held:
            os.close(descriptor)
        else:
            self._held[inode] = descriptor
        return inode

    def _listed(self, folder: Path) -> Names:
        names: Names = {}
        for entry in os.scandir(folder):
            names[entry.name] = self._hold(os.open(entry.path, os.O_RDONLY))
        return names

    def _build(
        self, inode: int, now: Path | None, target: Path, luck: Callable[[], bool], made: dict[int, Path]
    ) -> None:
        """Write the surviving content of a folder; `now` is its path, if it still exists."""
        target.mkdir()
        synced = self._names.get(inode, {})
        present = self._listed(now) if now is not None and now.is_dir() and now.stat().st_ino == inode else {}
        names = {
            name: present[name] if name in present and (synced.get(name) == present[name] or luck()) else synced[name]
            for name in synced
            if name in present or not luck()
        }
        names |= {name: there for name, there in present.items() if name not in synced and luck()}
        for name, there in names.items():
            path = target / name
            mode = os.fstat(self._held[there]).st_mode
            if stat.S_ISDIR(mode):
                below = now / name if now is not None and present.get(name) == there else None
                self._build(there, below, path, luck, made)
            elif there in made:
                os.link(made[there], path)
            else:
                last = self._content.get(there, b"")
                latest = _bytes(self._held[there])
                path.write_bytes(latest if latest != last and luck() else last)
                made[there] = path


def _path(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def _bytes(descriptor: int) -> bytes:
    return Path(f"/proc/self/fd/{descriptor}").read_bytes()
