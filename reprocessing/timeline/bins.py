"""The batches of a timeline as columns of a plot: equal parts of its time, with rows per minute and durations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reprocessing.timeline.batches import BatchPoint

COLUMNS = 220
"""Columns at most."""
_WIDTHS = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 28_800, 86_400, 7 * 86_400)


@dataclass
class Bin:
    """The batches that ended in one part of the time, from `since` on; those of a replay are counted apart."""

    since: float
    batches: int = 0
    rows: int = 0
    replayed: int = 0
    timed: int = 0
    seconds: float = 0.0
    slowest: float = 0.0

    @property
    def mean(self) -> float:
        """Mean duration of a batch in seconds."""
        return self.seconds / self.timed if self.timed else 0.0


def width_of(since: float, until: float) -> int:
    """Seconds of a column."""
    span = until - since
    return next((each for each in _WIDTHS if span / each <= COLUMNS), max(int(span / COLUMNS) + 1, 1))


def bins_of(batches: Sequence[BatchPoint], since: float, until: float) -> list[Bin]:
    """The columns that have batches, oldest first."""
    width = width_of(since, until)
    last = int((until - since) // width)
    bins: dict[int, Bin] = {}
    for each in batches:
        place = min(int((each.at - since) // width), last)  # a clock that was set back gives times after the end
        found = bins.get(place)
        if found is None:
            found = bins[place] = Bin(since + place * width)
        found.batches += 1
        if each.replay:
            found.replayed += each.rows
        else:
            found.rows += each.rows
        if each.seconds is not None:
            found.timed += 1
            found.seconds += each.seconds
            found.slowest = max(found.slowest, each.seconds)
    return [bins[place] for place in sorted(bins)]
