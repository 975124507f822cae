"""The planner of a table's batches: decides at which version the next batch ends, and what each of its tasks reads.

A batch has at least one version, however large, and no more versions than the bound on its rows and bytes allows. A
range that begins at 0 is one batch with the table's content: versions cannot divide it. A batch ends before a version
that is not settled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streaming_jobs.errors import OffsetsLost
from streaming_jobs.sources.batch_size import BatchSize
from streaming_jobs.sources.planner import Limits
from streaming_jobs.table_sources.row_blocks import FileToRead
from streaming_jobs.table_sources.versions import TableVersions, Version

SMALL_ROWS = 20_000
SMALL_BYTES = 8 << 20
"""Rows, and bytes of files, that the planner reads itself, at most; larger batches are read by tasks."""

_LOOK = 0.02
"""Seconds between two looks for a new version."""
_CHECK_EVERY = 5.0
"""Seconds between two looks whether an idle table still has what the stream reads next."""
_MOST_VERSIONS = 2_000
"""Versions of one batch: each is a file of the log that is read."""


@dataclass
class TablePlanner:
    """Plans the batches of one query from one table."""

    versions: TableVersions
    limits: Limits
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _size: BatchSize = field(init=False)
    _stop_at: int | None = field(default=None, init=False)
    _planned: tuple[int, float] | None = field(default=None, init=False)
    _checked: float | None = field(default=None, init=False)
    _known: dict[int, Version] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._size = BatchSize(self.limits.seconds, self.limits.records, self.limits.bytes, self.limits.first)

    def next_end(self, start: int) -> int:
        """The end of the batch that begins at version `start`; equal to it if nothing new is there.

        Raises OffsetsLost for a version that is gone, and for a table that ends before `start`.
        """
        if self._planned is not None:
            rows, at = self._planned
            self._size.took(rows, self.monotonic() - at)
        end = self._end(start)
        self._planned = None
        if end <= start:
            return start
        if start == 0:
            return end
        rows = size = 0
        at = start
        while at < end and at - start < _MOST_VERSIONS:
            version = self._version(at)
            if not version.settled:
                break
            if at > start and (rows + version.rows > self._size.limit or size + version.size > self.limits.bytes):
                break
            rows, size, at = rows + version.rows, size + version.size, at + 1
        self._planned = (rows, self.monotonic()) if rows else None
        return at

    def files(self, start: int, end: int) -> list[FileToRead]:
        """The files of a range, in the order in which they are read."""
        if start == 0:
            versions = list(self.versions.between(0, end))
        else:
            versions = [self._version(number) for number in range(start, end)]
            self._known = {number: version for number, version in self._known.items() if number >= end}
        return [FileToRead(each.number, each.at, file) for each in versions for file in each.files]

    def stop_at_present_end(self) -> None:
        """Plan no batch beyond the table's present end, or beyond the bound that the limits give."""
        until = self.limits.until
        self._stop_at = self._present_end() if until is None else until.get(0, 0)
        if until is not None and self._stop_at > (end := self._present_end()):
            raise self._ends_before(end, self._stop_at)

    def _end(self, start: int) -> int:
        """The version after the newest one that may be read; waits for a first one as long as the limits say."""
        if self._stop_at is not None:
            return self._stop_at
        if start == 0:
            return self._present_end()
        until = self.monotonic() + self.limits.wait
        while not self.versions.has(start):
            if self.monotonic() >= until:
                self._check(start)
                return start
            self.sleep(_LOOK)
        end = start + 1
        while end - start < _MOST_VERSIONS and self.versions.has(end):
            end += 1
        return end

    def _present_end(self) -> int:
        newest = self.versions.newest()
        return 0 if newest is None else newest + 1

    def _check(self, start: int) -> None:
        """Raise OffsetsLost if there is nothing at `start`, although the table does not end there.

        It lists the log, so an idle stream does it every few seconds only.
        """
        if self._checked is not None and self.monotonic() - self._checked < _CHECK_EVERY:
            return
        self._checked = self.monotonic()
        end = self._present_end()
        if end > start and not self.versions.has(start):
            raise self.versions.gone(start, max(self.versions.first(), start + 1))
        if end < start:
            raise self._ends_before(end, start)

    def _ends_before(self, end: int, start: int) -> OffsetsLost:
        return OffsetsLost(
            f"table {self.versions.name} ends at version {end - 1}, and the stream has read up to {start - 1}",
            "see `recourse streams status`",
        )

    def _version(self, number: int) -> Version:
        if number in self._known:
            return self._known[number]
        version = self.versions.version(number)
        if version.settled:
            self._known[number] = version
        return version


def is_small(files: Sequence[FileToRead]) -> bool:
    """True if the planner reads the files itself and sends the rows along."""
    rows, size = sum(each.file.rows for each in files), sum(each.file.size for each in files)
    return rows <= SMALL_ROWS and size <= SMALL_BYTES


def tasks(files: Sequence[FileToRead], workers: int) -> list[list[FileToRead]]:
    """The files in at most `workers` runs of about the same bytes, in order: one per task."""
    total, parts, done = sum(each.file.size for each in files), [list[FileToRead]()], 0
    for each in files:
        if parts[-1] and len(parts) < workers and done >= total * len(parts) / workers:
            parts.append([])
        parts[-1].append(each)
        done += each.file.size
    return [part for part in parts if part]
