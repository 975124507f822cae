"""The pace of a recovery's replay, in words."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW = 60.0
"""Seconds over which the rate of a replay is averaged, so that the start of Spark does not lower it for long."""


@dataclass
class ReplayPace:
    """The progress of a replay as text, with its current rate and the remaining time; `clock` gives seconds."""

    clock: Callable[[], float] = time.monotonic
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def words(self, done: int, total: int) -> str:
        """Such as `1,200 of 30,000 records, 400 a second, about 72 s left`."""
        now, seen = self.clock(), self._seen
        if len(seen) == 1 and seen[0][1] == done:  # no record was read yet: the rate begins with the first one
            seen.clear()
        seen.append((now, done))
        while len(seen) > 2 and now - seen[1][0] >= WINDOW:
            seen.popleft()
        since, first = seen[0]
        rate = (done - first) / max(now - since, 0.001)
        pace = f", {rate:,.0f} a second" if rate else ""
        left = f", about {_span((total - done) / rate)} left" if rate and done < total else ""
        return f"{done:,} of {total:,} records{pace}{left}"


def _span(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 180 else f"{seconds / 60:,.0f} min"
