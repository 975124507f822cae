"""The pause of a stream after a batch while few records arrive, so that its cost follows the number of records.

A micro-batch costs the same for one record as for hundreds. Without a pause, a few records per second would be read in
as many batches as the machine can run: more CPU time, commits and files than at ten times the records. So after a batch
the stream waits until its batches take at most `_SHARE` of the time, but no longer than `longest`. The more records
arrive, the shorter the wait; from `_PLENTY` records per second on there is none. Records that arrive after a quiet
moment are read as soon as a batch may start: the wait comes after a batch, never before it. There is no wait after the
first batch: it is slow, and no measure of the rate of records.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

_PLENTY = 1000.0
_SHARE = 0.1
_WINDOW = 10.0
_LEAST_WINDOW = 1.0


@dataclass
class Pace:
    """The pause of one stream; its clock runs in seconds."""

    longest: timedelta
    clock: Callable[[], float] = time.monotonic
    _recent: deque[tuple[float, int]] = field(default_factory=deque)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def after(self, records: int, started: float) -> float:
        """Seconds to wait after a batch of `records` that started at `started` and has just ended."""
        now, first = self.clock(), not self._recent
        self._recent.append((started, records))
        if first:
            return 0.0
        while self._recent[0][0] < now - _WINDOW and len(self._recent) > 1:
            self._recent.popleft()
        rate = sum(count for _, count in self._recent) / min(max(now - self._began, _LEAST_WINDOW), _WINDOW)
        few = max(0.0, 1.0 - rate / _PLENTY)
        return min(self.longest.total_seconds() * few, (now - started) * (1 / _SHARE - 1))
