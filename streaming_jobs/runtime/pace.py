"""How long a stream waits after a batch while few records come, so that its cost follows the records.

A micro-batch costs the same work for one record as for hundreds. Without a pause a trickle would be taken in as many
batches as the machine can make: more work, commits and files than at ten times the records. So after a batch the stream
waits until its batches take at most `_SHARE` of the time, but no longer than `longest`; the more records come, the
shorter, and not at all from `_PLENTY` a second on. What comes after a quiet moment is taken at once: the wait is after
a batch, never before it. Nothing waits after the first batch, which is slow: it says nothing of what comes meanwhile.
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
        """Seconds to wait after a batch of so many records that started at `started` and has just ended."""
        now, first = self.clock(), not self._recent
        self._recent.append((started, records))
        if first:
            return 0.0
        while self._recent[0][0] < now - _WINDOW and len(self._recent) > 1:
            self._recent.popleft()
        rate = sum(count for _, count in self._recent) / min(max(now - self._began, _LEAST_WINDOW), _WINDOW)
        few = max(0.0, 1.0 - rate / _PLENTY)
        return min(self.longest.total_seconds() * few, (now - started) * (1 / _SHARE - 1))
