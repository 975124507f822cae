"""Spans of a table that lack records, and their rebuild within bounds: for late records, and for dead letters.

A record that its window does not have belongs to a span of the table's column of slices. Spans that are near each other
are one slice, with one commit. A run rebuilds the first ones, up to a number of days. If records that a slice is made
from are gone, its halves are rebuilt, down to single spans: only those that need the records are lost. A loss is found
before Spark starts, so lost spans do not count as rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from reprocessing.slices.rebuild import NONE_JUDGED, Judged, OffsetsSkipped, SliceReport, Tools, rebuild
from streaming_jobs.declare.slices import SliceRange, begin_of
from streaming_jobs.errors import OffsetsLost
from streaming_jobs.runtime.sliceable import Sliceable

MOST_DAYS = 31
"""Days of a table that one run rebuilds at most, unless the caller says otherwise."""
DAY = timedelta(days=1)


@dataclass(frozen=True, order=True)
class Span:
    """A part of the column of slices: from `begin` to before `end`, both in UTC."""

    begin: datetime
    end: datetime

    @classmethod
    def of(cls, chosen: SliceRange) -> Span:
        return cls(chosen.begin, chosen.end)

    def has(self, other: Span) -> bool:
        return self.begin <= other.begin and other.end <= self.end


@dataclass(frozen=True)
class Lost:
    """Records that a span would be rebuilt from are gone; `why` in words."""

    why: str


Outcome = tuple[Sequence[Span], SliceReport | Lost]
"""Spans that were one slice, and its report; or one span that is lost."""


def grouped(spans: Iterable[Span], gap: timedelta, most: int) -> list[list[Span]]:
    """The first spans, in their order, in groups of one slice each, which are at most `most` days long together.

    Within a group no gap is longer than `gap`. A group counts as whole days, one at least; the first span is taken
    however long it is.
    """
    groups: list[list[Span]] = []
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


def rebuild_spans(
    tools: Tools,
    made: Sliceable,
    spans: Iterable[Span],
    *,
    gap: timedelta = timedelta(0),
    most: int = MOST_DAYS,
    judged: Judged = NONE_JUDGED,
    dry_run: bool = False,
) -> Iterator[Outcome]:
    """Yields the outcomes of the first spans, until `most` days are rebuilt; raises any error other than a loss."""
    waiting, left = sorted(set(spans)), most
    while waiting and left > 0:
        groups = grouped(waiting, gap, left)
        waiting = waiting[sum(map(len, groups)) :]
        for group in groups:
            for outcome in _rebuilt(tools, made, group, judged, dry_run=dry_run):
                if not isinstance(outcome[1], Lost):
                    left -= _days(outcome[0][0].begin, _end(outcome[0]))
                yield outcome


def _rebuilt(
    tools: Tools, made: Sliceable, spans: Sequence[Span], judged: Judged, *, dry_run: bool
) -> Iterator[Outcome]:
    begin, end = (_text(made, at) for at in (spans[0].begin, _end(spans)))
    try:
        yield spans, rebuild(tools, made, begin, end, dry_run=dry_run, judged=judged)
    except (OffsetsLost, OffsetsSkipped) as error:  # refused before Spark starts
        if len(spans) == 1:
            yield spans, Lost(error.found)
            return
        middle = len(spans) // 2
        yield from _rebuilt(tools, made, spans[middle:], judged, dry_run=dry_run)
        yield from _rebuilt(tools, made, spans[:middle], judged, dry_run=dry_run)


def _end(spans: Sequence[Span]) -> datetime:
    return max(span.end for span in spans)


def _text(made: Sliceable, at: datetime) -> str:
    """A border as `rebuild` takes it: a day of the calendar, if the day begins there."""
    day = at.astimezone(made.slices.calendar).date()
    return day.isoformat() if at == begin_of(day, made.slices.calendar) else at.isoformat()
