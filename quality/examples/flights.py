"""Suites on the tables of the flights of 2013 (docs/flights.md has the data).

The critical expectations hold for every row of the year. The others are red on the real data, by numbers that are
known: they show dirt that is in the data itself, and that a reader of the tables should know about.
"""

from __future__ import annotations

from typing import Any

from quality.suites import suite
from quality.table_checks import Reconciled, SameSchema, UniqueKey

CARRIERS = ("9E", "AA", "AS", "B6", "DL", "EV", "F9", "FL", "HA", "MQ", "OO", "UA", "US", "VX", "WN", "YV")
AIRPORTS = ("EWR", "JFK", "LGA")
REGISTRATION = r"^N[1-9](?:[0-9]{0,4}|[0-9]{0,3}[A-Z]|[0-9]{0,2}[A-Z]{2})$"
"""A tail number as the FAA gives it: one to five digits, of which the last one or two may be letters."""

DAY = 1440
"""Minutes."""


@suite(
    table="flights_clean",
    key=["sched_dep", "carrier", "flight", "origin"],
    checks=[SameSchema(), Reconciled()],
)
def flights_rows() -> list[Any]:
    """Every flight is complete and plausible; what is missing is missing for a reason."""
    import great_expectations.expectations as gxe
    from great_expectations.expectations.row_conditions import Column

    departed, cancelled = Column("cancelled") == False, Column("cancelled") == True  # noqa: E712 - a condition of GX
    return [
        gxe.ExpectColumnValuesToNotBeNull(column="sched_dep"),
        gxe.ExpectColumnValuesToNotBeNull(column="flight_date"),
        gxe.ExpectColumnValuesToBeInSet(column="carrier", value_set=list(CARRIERS), meta={"name": "carrier_known"}),
        gxe.ExpectColumnValuesToBeInSet(column="origin", value_set=list(AIRPORTS), meta={"name": "origin_known"}),
        gxe.ExpectColumnValuesToMatchRegex(column="dest", regex="^[A-Z]{3}$", meta={"name": "dest_is_a_code"}),
        gxe.ExpectColumnValuesToBeBetween(column="distance", min_value=1, max_value=6000),
        gxe.ExpectColumnValuesToBeBetween(column="dep_delay", min_value=-60, max_value=DAY),
        gxe.ExpectColumnValuesToBeBetween(column="air_time", min_value=15, max_value=DAY),
        gxe.ExpectColumnValuesToNotBeNull(
            column="actual_dep", row_condition=departed, meta={"name": "departed_has_departure"}
        ),
        gxe.ExpectColumnValuesToBeNull(
            column="actual_dep", row_condition=cancelled, meta={"name": "cancelled_has_no_departure"}
        ),
        gxe.ExpectColumnValuesToBeNull(
            column="arr_delay", row_condition=cancelled, meta={"name": "cancelled_has_no_arrival"}
        ),
        gxe.ExpectCompoundColumnsToBeUnique(
            column_list=["sched_dep", "carrier", "flight", "origin"], meta={"name": "flight_comes_once"}
        ),
        gxe.ExpectCompoundColumnsToBeUnique(
            column_list=["source_partition", "source_offset"], meta={"name": "record_comes_once"}
        ),
        # Diverted flights departed and never arrived at their destination.
        gxe.ExpectColumnValuesToNotBeNull(
            column="arr_delay", row_condition=departed, severity="warning", meta={"name": "departed_has_arrival"}
        ),
        # Flights that were cancelled early have no aircraft yet.
        gxe.ExpectColumnValuesToNotBeNull(column="tailnum", severity="warning"),
        # Departures long before the schedule, and delays of more than ten hours.
        gxe.ExpectColumnValuesToBeBetween(
            column="dep_delay", min_value=-15, max_value=600, severity="warning", meta={"name": "dep_delay_usual"}
        ),
        # American Airlines and others give fleet numbers, such as N3ALAA.
        gxe.ExpectColumnValuesToMatchRegex(
            column="tailnum", regex=REGISTRATION, severity="info", meta={"name": "tailnum_is_a_registration"}
        ),
    ]


@suite(table="airport_hours", key=["window_start", "origin"], checks=[SameSchema(), Reconciled()])
def airport_hours_rows() -> list[Any]:
    """Every hour of an airport occurs once, and its figures are consistent."""
    import great_expectations.expectations as gxe

    return [
        gxe.ExpectColumnValuesToBeInSet(column="origin", value_set=list(AIRPORTS), meta={"name": "origin_known"}),
        gxe.ExpectColumnValuesToNotBeNull(column="window_start"),
        gxe.ExpectColumnPairValuesAToBeGreaterThanB(
            column_A="window_end", column_B="window_start", meta={"name": "window_ends_after_its_start"}
        ),
        gxe.ExpectCompoundColumnsToBeUnique(column_list=["window_start", "origin"], meta={"name": "hour_comes_once"}),
        gxe.ExpectColumnValuesToNotBeNull(column="flights"),
        gxe.ExpectColumnValuesToBeBetween(column="flights", min_value=1, max_value=60),
        gxe.ExpectColumnValuesToBeBetween(column="cancelled", min_value=0, max_value=60),
        gxe.ExpectColumnPairValuesAToBeGreaterThanB(
            column_A="flights", column_B="cancelled", or_equal=True, meta={"name": "no_more_cancelled_than_flights"}
        ),
        gxe.ExpectColumnPairValuesAToBeGreaterThanB(
            column_A="max_dep_delay",
            column_B="mean_dep_delay",
            or_equal=True,
            ignore_row_if="either_value_is_missing",
            meta={"name": "mean_below_maximum"},
        ),
        gxe.ExpectColumnValuesToBeBetween(column="max_dep_delay", min_value=-60, max_value=DAY),
        # Hours in which every flight was cancelled have no delay.
        gxe.ExpectColumnValuesToNotBeNull(column="mean_dep_delay", severity="warning"),
        gxe.ExpectColumnValuesToBeBetween(
            column="mean_dep_delay", max_value=60, severity="warning", meta={"name": "mean_delay_under_an_hour"}
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="max_dep_delay", max_value=600, severity="warning", meta={"name": "no_delay_over_ten_hours"}
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="flights", min_value=2, severity="info", meta={"name": "more_than_one_flight"}
        ),
    ]


@suite(table="carrier_totals", key=["carrier"], slice="all", checks=[UniqueKey(), Reconciled()])
def carrier_totals_rows() -> list[Any]:
    """Every carrier has one row, with plausible totals; a run reads the whole table, which is small."""
    import great_expectations.expectations as gxe

    return [
        gxe.ExpectTableRowCountToBeBetween(min_value=1, max_value=len(CARRIERS)),
        gxe.ExpectColumnValuesToNotBeNull(column="carrier"),
        gxe.ExpectColumnValuesToBeUnique(column="carrier"),
        gxe.ExpectColumnValuesToBeInSet(column="carrier", value_set=list(CARRIERS), meta={"name": "carrier_known"}),
        gxe.ExpectColumnValuesToNotBeNull(column="flights"),
        gxe.ExpectColumnValuesToBeBetween(column="flights", min_value=1, max_value=100_000),
        gxe.ExpectColumnSumToBeBetween(column="flights", min_value=1, max_value=336_776),
        gxe.ExpectColumnValuesToNotBeNull(column="dep_delay_minutes"),
        gxe.ExpectColumnValuesToBeBetween(column="dep_delay_minutes", min_value=-100_000, max_value=10_000_000),
        gxe.ExpectColumnValuesToBeBetween(column="cancelled", min_value=0, max_value=100_000),
        gxe.ExpectColumnPairValuesAToBeGreaterThanB(
            column_A="flights", column_B="cancelled", or_equal=True, meta={"name": "no_more_cancelled_than_flights"}
        ),
        # Hawaiian and SkyWest have few flights from New York: a mean over them says little.
        gxe.ExpectColumnValuesToBeBetween(
            column="flights", min_value=500, severity="info", meta={"name": "enough_flights_for_a_mean"}
        ),
    ]
