"""Locks between processes: `flock` on a file or a folder. The end of the process releases a lock, also a kill."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL = 0.05


def open_lock(path: Path) -> int:
    """The descriptor of a lock's file, which is made for this user alone, or of an existing folder."""
    how = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT
    return os.open(path, how | os.O_CLOEXEC, 0o600)


def lock(descriptor: int, wait: float | None = None) -> bool:
    """Lock an open file, also for the processes that inherit it.

    Waits at most `wait` seconds (None: as long as it takes); False if another process has held the lock all the time.
    """
    if wait is None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return True
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
        else:
            return True


@contextmanager
def locked(path: Path, wait: float | None = None, busy: Callable[[], Exception] = BlockingIOError) -> Iterator[int]:
    """Hold the lock of a file or a folder (`open_lock`); yields its descriptor.

    Raises the error that `busy` makes if another process has held the lock for `wait` seconds.
    """
    descriptor = open_lock(path)
    try:
        if not lock(descriptor, wait):
            raise busy()
        yield descriptor
    finally:
        os.close(descriptor)
