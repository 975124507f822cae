"""Scratch folders: `<home>/scratch/<kind>-<uuid>`, one of each kind per process, removed by a later start.

A process, and the JVM that inherits the descriptor, hold a lock on the file `lock` of the folder: one whose lock is
free belongs to nobody. A pid would not do: several containers may share a home, and each has pids of its own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streaming_jobs.files import private_folder

_LOCK = "lock"


@dataclass(frozen=True)
class Scratch:
    """A folder of this process; `descriptor`, which keeps it, is for the processes that need the folder too."""

    folder: Path
    descriptor: int


_held: dict[tuple[int, Path, str], Scratch] = {}


def scratch(home: Path, kind: str) -> Scratch:
    """This process's folder of a kind; made, and those that nobody holds are removed, if there is none yet."""
    key = (os.getpid(), home.absolute(), kind)
    there = _held.get(key)
    if there is not None and there.folder.is_dir():
        return there
    with _alone(home) as root:
        for old in root.iterdir():
            if old.name != _LOCK:
                _remove_free(old)
        folder = private_folder(root / f"{kind}-{uuid.uuid4().hex}")
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    if there is not None:
        os.close(there.descriptor)
    _held[key] = Scratch(folder, descriptor)
    return _held[key]


@contextmanager
def _alone(home: Path) -> Iterator[Path]:
    """The root of the folders, for one process at a time: a folder that is being made has no lock yet."""
    root = private_folder(home / "scratch")
    descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield root
    finally:
        os.close(descriptor)


def _remove_free(folder: Path) -> None:
    """Remove the folder unless a process holds its lock."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # without a lock file nobody can hold it
        shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)
