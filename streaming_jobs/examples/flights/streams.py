"""Three streams over one topic: single rows, windows that close, and running totals.

    topic flights -> flights_clean    append, one row per flight; rows that cannot be right are set aside
                  -> airport_hours    append, one row per airport and hour, once the hour is over
                  -> carrier_totals   upsert, one row per carrier

Times are UTC. docs/flights.md has the data, and how the lateness was measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from streaming_jobs.catalog.truths import Record, truth
from streaming_jobs.declare.rules import Between, Holds, InSet, Matches, NotNull
from streaming_jobs.declare.slices import Slices
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

if TYPE_CHECKING:
    import pandas as pd

OWNERS = ("flights@example.org",)
LOCAL_ZONE = "America/New_York"


def _column(name: str, kind: DataType, comment: str, *, required: bool = False) -> StructField:
    return StructField(name, kind, not required, {"comment": comment})


FLIGHT = StructType(
    [
        _column("year", IntegerType(), "Local year of the scheduled departure", required=True),
        _column("month", IntegerType(), "Local month of the scheduled departure", required=True),
        _column("day", IntegerType(), "Local day of the scheduled departure", required=True),
        _column("sched_dep", TimestampType(), "Scheduled departure, UTC", required=True),
        _column("actual_dep", TimestampType(), "Actual departure, UTC; null when cancelled"),
        _column("dep_delay", IntegerType(), "Departure delay, minutes, negative when early; null when cancelled"),
        _column("arr_delay", IntegerType(), "Arrival delay, minutes; null when cancelled or diverted"),
        _column("carrier", StringType(), "Code of the carrier", required=True),
        _column("flight", IntegerType(), "Flight number", required=True),
        _column("tailnum", StringType(), "Tail number of the aircraft, if known"),
        _column("origin", StringType(), "Airport of departure: EWR, JFK or LGA", required=True),
        _column("dest", StringType(), "Airport of destination", required=True),
        _column("air_time", IntegerType(), "Minutes in the air; null when cancelled or diverted"),
        _column("distance", IntegerType(), "Distance, miles", required=True),
        _column("cancelled", BooleanType(), "The flight never departed", required=True),
    ]
)
"""One record of the topic `flights`."""

FLIGHTS_CLEAN = StructType(
    [
        _column("flight_date", DateType(), "Local date of the scheduled departure (New York)"),
        *(StructField(f.name, f.dataType, True, f.metadata) for f in FLIGHT.fields[3:]),
        _column("month", StringType(), "UTC month of the scheduled departure, such as 2013-01"),
        _column("source_partition", IntegerType(), "Partition of the topic that the record came from"),
        _column("source_offset", LongType(), "Offset of the record in that partition"),
    ]
)
AIRPORT_HOURS = StructType(
    [
        _column("origin", StringType(), "Airport of departure"),
        _column("window_start", TimestampType(), "Begin of the hour of scheduled departure, UTC, inclusive"),
        _column("window_end", TimestampType(), "End of the hour, UTC, exclusive"),
        _column("flights", LongType(), "Flights scheduled in the hour, cancelled ones included"),
        _column("cancelled", LongType(), "Cancelled flights"),
        _column("mean_dep_delay", DoubleType(), "Mean departure delay, minutes; null when no flight departed"),
        _column("max_dep_delay", IntegerType(), "Greatest departure delay, minutes; null when no flight departed"),
    ]
)
CARRIER_TOTALS = StructType(
    [
        _column("carrier", StringType(), "Code of the carrier"),
        _column("flights", LongType(), "Flights so far, cancelled ones included"),
        _column(
            "dep_delay_minutes", LongType(), "Sum of departure delays so far, minutes; early departures count down"
        ),
        _column("cancelled", LongType(), "Cancelled flights so far"),
    ]
)

FLIGHTS = KafkaTopic(
    "flights",
    value=Json(FLIGHT),
    description="Departures of 2013 from EWR, JFK and LGA in the order in which they happened, keyed by flight.",
    owners=OWNERS,
)
FLIGHTS_BY_SCHEDULE = replace(FLIGHTS, event_time="sched_dep", lateness="10 days")
"""The topic with a watermark; only a stream with windows needs one. `docs/flights.md` has the delay that is needed."""


@stream(
    source=FLIGHTS,
    sink=DeltaTable(
        "flights_clean",
        schema=FLIGHTS_CLEAN,
        partition_by=["month"],
        description="Every flight, typed, with its place in the topic; one file folder a month.",
        owners=OWNERS,
        slices=Slices("flight_date", event_time="sched_dep", zone=LOCAL_ZONE, first_day="2013-01-01"),
    ),
    owners=OWNERS,
    rules=[
        NotNull("tailnum"),
        Holds("arr_delay is not null or cancelled", name="arrived_or_cancelled"),
        Between("dep_delay", -60, 24 * 60),
        Between("distance", low=1, on_fail="quarantine"),
        InSet("origin", ["EWR", "JFK", "LGA"], on_fail="quarantine"),
        Holds("cancelled = (actual_dep is null)", name="cancelled_or_departed", on_fail="quarantine"),
    ],
)
def flights_clean(flights: DataFrame) -> DataFrame:
    """Every flight, parsed and typed."""
    return flights.select(
        F.to_date(F.from_utc_timestamp("sched_dep", LOCAL_ZONE)).alias("flight_date"),
        *FLIGHT.fieldNames()[3:],
        F.date_format("sched_dep", "yyyy-MM").alias("month"),
        F.col("_source.partition").alias("source_partition"),
        F.col("_source.offset").alias("source_offset"),
    )


@stream(
    source=FLIGHTS_BY_SCHEDULE,
    sink=DeltaTable(
        "airport_hours",
        schema=AIRPORT_HOURS,
        description="Departures by airport and hour; a row comes once, when its hour can no longer change.",
        owners=OWNERS,
        slices=Slices("window_start", reach="1 hour", zone=LOCAL_ZONE, first_day="2013-01-01"),
    ),
    owners=OWNERS,
    rules=[Holds("cancelled <= flights", name="cancelled_at_most_all"), Between("flights", 1, 60)],
)
def airport_hours(flights: DataFrame) -> DataFrame:
    """Departures by airport and hour of schedule, emitted when the window closes."""
    hours = flights.groupBy("origin", F.window("sched_dep", "1 hour").alias("hour")).agg(
        F.count("*").alias("flights"),
        F.count_if("cancelled").alias("cancelled"),
        F.avg("dep_delay").alias("mean_dep_delay"),
        F.max("dep_delay").alias("max_dep_delay"),
    )
    return hours.select("origin", "hour.start", "hour.end", *AIRPORT_HOURS.fieldNames()[3:]).toDF(
        *AIRPORT_HOURS.fieldNames()
    )


@stream(
    source=FLIGHTS,
    sink=DeltaTable(
        "carrier_totals",
        schema=CARRIER_TOTALS,
        keys=["carrier"],
        description="Running totals by carrier.",
        owners=OWNERS,
    ),
    owners=OWNERS,
    rules=[Holds("cancelled <= flights", name="cancelled_at_most_all"), Matches("carrier", "^[A-Z0-9]{2}$")],
)
def carrier_totals(flights: DataFrame) -> DataFrame:
    """Flights, minutes of departure delay and cancellations by carrier so far."""
    return flights.groupBy("carrier").agg(
        F.count("*").alias("flights"),
        F.coalesce(F.sum("dep_delay"), F.lit(0)).alias("dep_delay_minutes"),
        F.count_if("cancelled").alias("cancelled"),
    )


STREAMS = (flights_clean, airport_hours, carrier_totals)

# The expected content of the tables, for `recourse verify`: computed by pandas from the package's own columns.


@truth(flights_clean)
def true_flights_clean(flights: Iterable[Record]) -> pd.DataFrame:
    """Every flight that was fed, at its place."""
    from streaming_jobs.examples.flights.truth import truth_of  # needs pandas, which a driver does not

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
