"""Which spans one run rebuilds, as which slices, and what happens to spans whose records are gone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from functools import partial
from typing import Any

import pytest

from reprocessing.slices.base import OffsetsSkipped
from reprocessing.slices.spans import DAY, Lost, TimeSpan, each_slice, grouped
from streaming_jobs.declare.slices import SliceRange, Slices, slice_range
from streaming_jobs.errors import LeaseBusy, OffsetsLost, RecourseError
from streaming_jobs.runtime.sliceable import sliceable
from tests.support.days import BEGIN, declared

NONE = timedelta(0)


def span(begin: float, end: float) -> TimeSpan:
    """By days."""
    return TimeSpan(BEGIN + timedelta(days=begin), BEGIN + timedelta(days=end))


def days(*numbers: int) -> list[TimeSpan]:
    return [span(number, number + 1) for number in numbers]


@pytest.mark.parametrize(
    ("spans", "gap", "most", "expected"),
    [
        ([], NONE, 31, []),
        (days(1, 2, 4, 6, 7), NONE, 31, [days(1, 2), days(4), days(6, 7)]),
        (days(7, 1, 6, 4, 2, 1), NONE, 4, [days(1, 2), days(4), days(6)]),
        (days(1, 2, 3), NONE, 2, [days(1, 2)]),
        (days(1, 3, 6), DAY, 31, [days(1, 3), days(6)]),
        (days(1, 3, 6), DAY, 3, [days(1, 3)]),
        ([span(0, 50), span(51, 52)], NONE, 31, [[span(0, 50)]]),
        ([span(0, 3), span(0.5, 1), span(2.5, 4)], NONE, 31, [[span(0, 3), span(0.5, 1), span(2.5, 4)]]),
        ([span(n, n + 0.1) for n in range(9)], NONE, 3, [[span(n, n + 0.1)] for n in range(3)]),
    ],
)
def test_a_run_takes_the_first_spans_and_the_near_ones_are_one_slice(
    spans: list[TimeSpan], gap: timedelta, most: int, expected: list[list[TimeSpan]]
) -> None:
    assert grouped(spans, gap, most) == expected


def test_days_on_which_the_clocks_change_are_days() -> None:
    slices = Slices("at", zone="America/New_York")
    year = [TimeSpan.of(slice_range(slices, "timestamp", f"2013-11-{day:02}", None)) for day in range(1, 29)]
    assert grouped(year, NONE, 28) == [year] and grouped(year, NONE, 27) == [year[:27]]


class Rebuilds:
    """Rebuilds that need no record from before a day; the others are refused."""

    def __init__(self, since: str, error: RecourseError) -> None:
        self.since, self.error, self.asked, self.refused = since, error, list[tuple[str, str]](), 0

    def __call__(self, begin: str, end: str) -> str:
        if begin < self.since:
            self.refused += 1
            raise self.error
        self.asked.append((begin, end))
        return begin


def results(rebuilds: Rebuilds, spans: Sequence[TimeSpan], **options: Any) -> list[Any]:
    return list(each_slice(sliceable(declared()), spans, rebuilds, **options))


@pytest.mark.parametrize("gone", [OffsetsLost("they are gone"), OffsetsSkipped("they were skipped")])
def test_spans_whose_records_are_gone_are_lost_alone_and_use_none_of_the_runs_days(
    gone: RecourseError,
) -> None:
    rebuilds = Rebuilds("2013-03-06", gone)
    made = results(rebuilds, days(*range(12)), most=4)
    assert sorted(s for spans, each in made if isinstance(each, Lost) for s in spans) == days(*range(5))
    assert all(each.why == gone.found for _, each in made if isinstance(each, Lost))
    assert sorted(s for spans, each in made if not isinstance(each, Lost) for s in spans) == days(5, 6, 7, 8)
    assert rebuilds.refused < 12


def test_a_border_within_a_day_is_a_time() -> None:
    rebuilds = Rebuilds("", OffsetsLost("gone"))
    results(rebuilds, [span(0.5, 1)])
    assert rebuilds.asked == [("2013-03-01T12:00:00+00:00", "2013-03-02")]


@pytest.mark.parametrize(
    ("zone", "first"), [("America/Santiago", date(2025, 9, 6)), ("America/Havana", date(2025, 11, 1))]
)
def test_days_that_begin_as_the_clocks_change_are_days_of_a_column_of_dates(zone: str, first: date) -> None:
    """In Santiago the second of these days begins at one o'clock; in Havana the hour after its midnight comes twice."""
    slices = Slices("at", zone=zone)
    chosen = [slice_range(slices, "date", (first + number * DAY).isoformat(), None) for number in range(3)]
    made, rebuild = sliceable(declared(slices)), partial(slice_range, slices, "date")
    for part in (chosen[:1], chosen[1:2], chosen[1:], chosen):
        [(_, rebuilt)] = each_slice(made, map(TimeSpan.of, part), rebuild)
        assert isinstance(rebuilt, SliceRange) and (rebuilt.begin, rebuilt.end) == (part[0].begin, part[-1].end)


def test_an_error_that_may_pass_is_raised() -> None:
    with pytest.raises(LeaseBusy):
        results(Rebuilds("3", LeaseBusy("another slice", "wait")), days(1))
