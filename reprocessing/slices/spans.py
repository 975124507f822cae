"""Spans of a table that lack records, and their rebuild within bounds: for late records, and for dead letters.

A record that its window does not have belongs to a span of the table's column of slices. Spans that are near each other
are one slice, with one commit. A run rebuilds the first ones, up to a number of days. If records that a slice is made
from are gone, its halves are rebuilt, down to single spans: only those that need the records are lost. A loss is found
before Spark starts, so lost spans do not count as rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

from reprocessing.slices.base import OffsetsSkipped
from streaming_jobs.declare.slices import SliceRange, begin_of
from streaming_jobs.errors import OffsetsLost
from streaming_jobs.runtime.sliceable import Sliceable

MOST_DAYS = 31
"""Days of a table that one run rebuilds at most, unless the caller says otherwise."""
DAY = timedelta(days=1)
Result = TypeVar("Result")


@dataclass(frozen=True, order=True)
class TimeSpan:
    """A part of the column of slices: from `begin` to before `end`, both in UTC."""

    begin: datetime
    end: datetime

    @classmethod
    def of(cls, chosen: SliceRange) -> TimeSpan:
        return cls(chosen.begin, chosen.end)

    def has(self, other: TimeSpan) -> bool:
        return self.begin <= other.begin and other.end <= self.end


@dataclass(frozen=True)
class Lost:
    """Says that a span cannot be rebuilt: records that it is made from are gone, or skipped; `why` is the refusal."""

    why: str


def grouped(spans: Iterable[TimeSpan], gap: timedelta, most: int) -> list[list[TimeSpan]]:
    """The first spans, in their order, in groups of one slice each, which are at most `most` days long together.

    Within a group no gap is longer than `gap`. A group counts as whole days, one at least; the first span is taken
    however long it is.
    """
    groups: list[list[TimeSpan]] = []
    before, end = 0, datetime.min
    for span in sorted(set(spans)):
        joins = bool(groups) and span.begin - end <= gap
        if groups and not joins:
            before += _days(groups[-1][0].begin, end)
        last = max(end, span.end) if joins else span.end
        if groups and before + _days(groups[-1][0].begin if joins else span.begin, last) > most:
            break
        if joins:
            groups[-1].append(span)
        else:
            groups.append([span])
        end = last
    return groups


def _days(begin: datetime, end: datetime) -> int:
    """The days of a slice; a day on which clocks change counts as one."""
    return max(1, round((end - begin) / DAY))


def each_slice(
    made: Sliceable,
    spans: Iterable[TimeSpan],
    attempt: Callable[[str, str], Result],
    *,
    gap: timedelta = timedelta(0),
    most: int = MOST_DAYS,
) -> Iterator[tuple[Sequence[TimeSpan], Result | Lost]]:
    """Yields the first spans, as slices, with what `attempt` returns for the borders of each; `most` days, at most.

    Lost spans are yielded alone, and count as no day. Any error of `attempt` other than a loss is raised.
    """
    waiting, left = sorted(set(spans)), most
    while waiting and left > 0:
        groups = grouped(waiting, gap, left)
        waiting = waiting[sum(map(len, groups)) :]
        for group in groups:
            for part, result in _attempted(made, group, attempt):
                if not isinstance(result, Lost):
                    left -= _days(part[0].begin, _end(part))
                yield part, result


def _attempted(
    made: Sliceable, spans: Sequence[TimeSpan], attempt: Callable[[str, str], Result]
) -> Iterator[tuple[Sequence[TimeSpan], Result | Lost]]:
    try:
        yield spans, attempt(*borders(made, spans))
    except (OffsetsLost, OffsetsSkipped) as error:  # refused before Spark starts
        if len(spans) == 1:
            yield spans, Lost(error.found)
            return
        middle = len(spans) // 2
        yield from _attempted(made, spans[middle:], attempt)
        yield from _attempted(made, spans[:middle], attempt)


def borders(made: Sliceable, spans: Sequence[TimeSpan]) -> tuple[str, str]:
    """Begin and end of the slice of these spans, which are sorted, as `rebuild` takes them."""
    return _text(made, spans[0].begin), _text(made, _end(spans))


def _end(spans: Sequence[TimeSpan]) -> datetime:
    return max(span.end for span in spans)


def _text(made: Sliceable, at: datetime) -> str:
    """A day of the calendar, if the day begins there; otherwise the time."""
    day = at.astimezone(made.slices.calendar).date()
    return day.isoformat() if at == begin_of(day, made.slices.calendar) else at.isoformat()
