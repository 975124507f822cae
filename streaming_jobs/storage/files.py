"""Files and folders that survive a kill and a power cut: whole or absent, and on disk before anything relies on them.

A kill loses nothing that was written; a power cut loses what the system had only in memory. So a file is on disk once
it was synced **and** the folder that names it, and the folder that names that one, up to a folder that existed before.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from streaming_jobs.errors import SetupError
from streaming_jobs.storage.locks import lock, locked, open_lock

_FEW, _AT_A_TIME = 2, 8


class FolderRefused(SetupError, OSError):
    """No folder can be made there. Also an OSError: what is not needed for the work is left unwritten."""


def write_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` by `text` (mode 0600); with `durable`, it is on disk when this returns."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """`write_atomic` for a JSON value."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=False), durable=durable)


def overwritten(path: Path, data: bytes) -> bool:
    """Overwrite a file in the blocks that it has, which takes no space; False if there is no file, or it is too small.

    A reader may see a mixture of the two contents for a moment, and a kill may leave one.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except FileNotFoundError:
        return False
    try:
        if len(data) > os.fstat(descriptor).st_blocks * 512:
            return False
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)
    return True


def hard_link(source: Path, target: Path) -> None:
    """Give a file a second name, and make the folders above it. An existing name stays: a killed attempt has made it.

    The folders get the mode of the umask, as those that deltalake and Spark make: who may read a table may read all
    of it. The name is on disk once the caller has synced the folder.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.link(source, target)


def link_as_new(source: Path, target: Path) -> None:
    """`hard_link` for a file that a commit is about to add to a table: the file's time of change becomes now.

    Delta's VACUUM takes the table's files from the version at its start, lists the folder later, and removes every
    other file that is older than the retention. A link has its file's time, which may be weeks back.
    """
    hard_link(source, target)
    os.utime(target)


def private_folder(path: Path) -> Path:
    """Make the folder, readable by its owner alone, and return it; its name is on disk when this returns.

    Raises FolderRefused where no folder can be made: below a file, or in a file system such as /proc.
    """
    if not path.is_dir():
        missing = [each for each in (path, *path.parents) if not each.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
            raise FolderRefused(
                f"folder {path} cannot be made: {error.strerror} ({error.filename})",
                "name a folder that can be made: `home` in recourse.toml, RECOURSE_HOME, or --set home=...",
            ) from error
        for folder in missing:
            sync(folder.parent)
    return path


def sync(path: Path) -> None:
    """Have a file, or a folder's list of names, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_files(*paths: Path) -> Iterator[Path]:
    """Remove the existing files, each on disk before the next; yields each one."""
    for path in paths:
        if path.exists():
            path.unlink()
            sync(path.parent)
            yield path


def sync_files(files: Iterable[Path], root: Path) -> None:
    """Have these files on disk, then the folders that lead to them from `root` on; a missing one is skipped."""
    files = list(files)
    sync_each(files)
    sync_names(files, root)


def sync_names(files: Iterable[Path], root: Path) -> None:
    """Have the names of these files on disk: the folders that lead to them from `root` on, the deepest first."""
    folders, top = set[str](), os.fspath(root)
    for file in files:
        folder = os.path.dirname(file)  # noqa: PTH120 - thousands of paths, for each commit
        while folder not in folders and (folder == top or folder.startswith(f"{top}{os.sep}")):
            folders.add(folder)
            folder = os.path.dirname(folder)  # noqa: PTH120
    for depth in sorted({folder.count(os.sep) for folder in folders}, reverse=True):
        sync_each([Path(folder) for folder in folders if folder.count(os.sep) == depth])


def sync_each(paths: Sequence[Path]) -> None:
    """Have these files and folders on disk, in no order; a missing one is skipped.

    Several at a time: the file system then needs one commit of its journal for many of them.
    """
    if len(paths) < _FEW:
        for path in paths:
            _sync_existing(path)
    else:
        list(_threads().map(_sync_existing, paths))


def _sync_existing(path: Path) -> None:
    with suppress(FileNotFoundError):
        sync(path)


@cache
def _threads() -> ThreadPoolExecutor:
    """The threads that sync; the interpreter waits for them at its end."""
    return ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="sync")


def sync_tree(root: Path) -> None:
    """Have everything below a folder on disk, and the folder's name; a file that is removed meanwhile is skipped."""
    for folder, _, names in os.walk(root, topdown=False):
        for path in (*(Path(folder) / name for name in names), Path(folder)):
            if not path.is_symlink():
                with suppress(FileNotFoundError):
                    sync(path)
    with suppress(FileNotFoundError):
        sync(root.parent)


# Scratch folders: `<home>/scratch/<kind>-<uuid>`, one of each kind per process, removed by a later start.
#
# A process, and the JVM that inherits the descriptor, hold a lock on the file `lock` of the folder: one whose lock
# is free belongs to nobody. A pid would not do: several containers may share a home, and each has pids of its own.

_LOCK = "lock"


@dataclass(frozen=True)
class Scratch:
    """A folder of this process; `descriptor`, which keeps it, is for the processes that need the folder too."""

    folder: Path
    descriptor: int


_held: dict[tuple[int, Path, str], Scratch] = {}


def scratch(home: Path, kind: str) -> Scratch:
    """This process's folder of a kind; if it does not exist yet, it is created, and unused folders are removed."""
    key = (os.getpid(), home.absolute(), kind)
    there = _held.get(key)
    if there is not None and there.folder.is_dir():
        return there
    with _alone(home) as root:
        for old in root.iterdir():
            if old.name != _LOCK:
                _remove_free(old)
        folder = private_folder(root / f"{kind}-{uuid.uuid4().hex}")
        descriptor = open_lock(folder / _LOCK)
        lock(descriptor)
    if there is not None:
        os.close(there.descriptor)
    _held[key] = Scratch(folder, descriptor)
    return _held[key]


@contextmanager
def _alone(home: Path) -> Iterator[Path]:
    """The root of the folders, for one process at a time: a folder that is being made has no lock yet."""
    root = private_folder(home / "scratch")
    with locked(root / _LOCK):
        yield root


def _remove_free(folder: Path) -> None:
    """Remove the folder unless a process holds its lock."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # without a lock file nobody can hold it
        shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        if lock(descriptor, wait=0):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
