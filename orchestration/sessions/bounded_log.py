"""A log file that child processes write to, and that stays small."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from streaming_jobs.storage.files import private_folder
from streaming_jobs.storage.log_stream import dropped_when_full


class BoundedLog:
    """A file that child processes append to, kept below `limit` bytes; mode 0600.

    It is cut by whoever calls `trim` now and then, not by the writers, which may outlive the caller. The newest
    half stays, in the same file, because the writers keep it open for appending.
    """

    def __init__(self, path: Path, limit: int = 8 * 1024 * 1024) -> None:
        self.path = path
        self.limit = limit

    def open(self) -> BinaryIO:
        """The file for appending, without a buffer of ours; the caller closes it."""
        private_folder(self.path.parent)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "wb", buffering=0)

    def write(self, line: str) -> None:
        """Append a line of our own; it is dropped if the disk is full."""
        with dropped_when_full(), self.open() as file:
            file.write(f"{line}\n".encode())

    def trim(self, mark: str = "") -> None:
        """Drop the older half if the file has grown beyond its limit; a line `mark` stays, before what stays."""
        with suppress(FileNotFoundError):
            if self.path.stat().st_size <= self.limit:
                return
            newest = self.tail(self.limit // 2)
            os.truncate(self.path, 0)
            begins = mark and f"{mark}\n" not in f"{newest}\n"
            head = f"{mark}\n(older lines dropped)" if begins else "(older lines dropped)"
            self.write(f"{head}\n{newest}")

    def tail(self, size: int = 4096) -> str:
        """The last whole lines, at most `size` bytes."""
        try:
            with self.path.open("rb") as file:
                length = file.seek(0, os.SEEK_END)
                file.seek(max(0, length - size))
                data = file.read(size)
        except FileNotFoundError:
            return ""
        if length > size:
            data = data.partition(b"\n")[2] or data
        return data.decode("utf-8", "replace").rstrip("\n")

    def tail_from(self, mark: str, size: int = 4096) -> str:
        """The last whole lines, at most `size` bytes, after the last line that is `mark`."""
        text = self.tail(size)
        return text.rpartition(f"{mark}\n")[2] if f"{mark}\n" in text else text if text != mark else ""
