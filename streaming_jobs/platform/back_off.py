"""The delays between tries of what has failed: a stream's query, a session, a process, a step of `recourse up`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, ldexp

_MOST_DOUBLINGS = 16


@dataclass(frozen=True)
class BackOff:
    """A delay after each of several failures in a row, in seconds: twice as long each time, `longest` at most.

    The row of failures ends once something has run for `healthy_after` seconds.
    """

    first: float
    longest: float
    healthy_after: float = inf

    def delay(self, failures: int) -> float:
        """The delay after so many failures in a row."""
        return min(self.longest, ldexp(self.first, min(failures - 1, _MOST_DOUBLINGS)))


OF_STREAMS = BackOff(1.0, 60.0, healthy_after=600.0)
"""The quick tries of a stream's query in its session."""
OF_SESSIONS = BackOff(5.0, 300.0, healthy_after=120.0)
"""Sessions that Dagster starts, and child sessions of a session."""
