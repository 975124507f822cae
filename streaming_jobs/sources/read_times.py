"""The seconds that reading and decoding the records of a batch take, in whatever process they take them.

Spark brings nothing from a data source back to the driver but records. So the times go by a file in the session's
folder on this machine, one per source: the planner begins it anew with each batch, and tasks append a line each. Tasks
on other machines do not see the folder: their times are not known. Nothing depends on the file: what cannot be written
is missing, and a truncated line counts as nothing.
"""

from __future__ import annotations

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
        """Begin the file of a batch, with the times of its planner."""
        self._write(file, "w", "plan")

    def note_task(self, file: Path | None) -> None:
        """Append the times of a task: one write, which no other task's can be in the middle of."""
        self._write(file, "a", "task")

    def _write(self, file: Path | None, mode: str, who: str) -> None:
        if file is not None:
            with suppress(OSError), file.open(mode, encoding="ascii") as output:
                output.write(f"{who} {self.read:.6f} {self.decode:.6f}\n")


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
