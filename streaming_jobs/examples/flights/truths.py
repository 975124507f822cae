"""The truth about the shipped tables, for `recourse verify`: what pandas makes of the package's own columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from streaming_jobs.examples.flights.streams import airport_hours, carrier_totals, flights_clean
from streaming_jobs.truths import Record, truth

if TYPE_CHECKING:
    import pandas as pd


@truth(flights_clean)
def true_flights_clean(flights: Iterable[Record]) -> pd.DataFrame:
    """Every flight that was fed, at its place."""
    from streaming_jobs.examples.flights.truth import truth_of

    return truth_of(flights_clean.name, flights)


@truth(airport_hours, final="window_end", tolerance=1e-9)
def true_airport_hours(flights: Iterable[Record]) -> pd.DataFrame:
    """Every hour of every airport; the mean may differ by the order in which floats were added."""
    from streaming_jobs.examples.flights.truth import truth_of

    return truth_of(airport_hours.name, flights)


@truth(carrier_totals)
def true_carrier_totals(flights: Iterable[Record]) -> pd.DataFrame:
    """The totals of every carrier."""
    from streaming_jobs.examples.flights.truth import truth_of

    return truth_of(carrier_totals.name, flights)
