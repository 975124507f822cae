"""The seconds that reading and decoding the records of a batch take, in whatever process they take them.

Spark brings nothing from a data source back to the driver but records. So the times go by a file in the session's
folder on this machine, one per source: the planner begins it anew with each batch, and tasks append a line each. Tasks
on other machines do not see the folder: their times are not known. Nothing depends on the file: what cannot be written
is missing, and a truncated line counts as nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass
class ReadTimes:
    """Seconds of reading and of decoding."""

    read: float = 0.0
    decode: float = 0.0

    @property
    def sum(self) -> float:
        return self.read + self.decode

    def plus(self, read: float, decode: float, share: float = 1.0) -> None:
        self.read += read * share
        self.decode += decode * share

    def each_read(self, blocks: Iterable[T]) -> Iterator[T]:
        """The same blocks, with the time until each of them is there counted as reading."""
        left = iter(blocks)
        while True:
            with self.reading():
                block = next(left, None)
            if block is None:
                return
            yield block

    @contextmanager
    def reading(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.read += time.monotonic() - began

    @contextmanager
    def decoding(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.decode += time.monotonic() - began

    def note_batch(self, file: Path | None) -> None:
        """Begin the file of a batch, with the times of its planner.

        Written over the line of the batch before: ext4 writes a file to disk that is truncated and written anew, which
        takes milliseconds.
        """
        if file is not None:
            with suppress(OSError), _opened(file, os.O_RDWR) as descriptor:
                os.pwrite(descriptor, line := self._line("plan"), 0)
                if os.fstat(descriptor).st_size > len(line):
                    os.ftruncate(descriptor, len(line))

    def note_task(self, file: Path | None) -> None:
        """Append the times of a task: one write, which no other task's can be in the middle of."""
        if file is not None:
            with suppress(OSError), _opened(file, os.O_WRONLY | os.O_APPEND) as descriptor:
                os.write(descriptor, self._line("task"))

    def _line(self, who: str) -> bytes:
        return b"%s %15.6f %15.6f\n" % (who.encode(), self.read, self.decode)


@dataclass(frozen=True)
class BatchReadTimes:
    """The times of one batch: of its planner, before Spark runs the batch; and of its tasks, the mean of a source's.

    Tasks read at the same time, and while Spark works on what they have read: the mean is at most the time of the
    stage. With several sources, the sums.
    """

    planner: ReadTimes
    tasks: ReadTimes

    @classmethod
    def of(cls, files: Iterable[Path]) -> BatchReadTimes:
        """From the files of a batch's sources."""
        planner, tasks = ReadTimes(), ReadTimes()
        for file in files:
            lines = _lines(file)
            count = sum(who == "task" for who, _, _ in lines)
            for who, read, decode in lines:
                if who == "task":
                    tasks.plus(read, decode, 1 / count)
                else:
                    planner.plus(read, decode)
        return cls(planner, tasks)


NO_TIMES = BatchReadTimes(ReadTimes(), ReadTimes())


@contextmanager
def _opened(file: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(file, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lines(file: Path) -> list[tuple[str, float, float]]:
    try:
        text = file.read_text(encoding="ascii")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        with suppress(ValueError):
            who, read, decode = line.split()
            found.append((who, float(read), float(decode)))
    return found
