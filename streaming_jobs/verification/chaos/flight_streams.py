"""Streams that only the kill loop runs, so that a kill can happen between the commits of two tables.

`flights_split` writes two tables. The rules of the other two take rows out of nearly every batch: `flights_judged`
appends, `flights_newest` is an upsert. How many rows that should be, `flight_subject.py` computes with pandas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from streaming_jobs.catalog.truths import Record, truth
from streaming_jobs.declare.rules import Between, Holds, NotNull
from streaming_jobs.examples.flights.streams import FLIGHTS
from streaming_jobs.stream import DeltaTable, stream


@stream(
    source=FLIGHTS,
    sink={"short": DeltaTable("flights_short"), "long": DeltaTable("flights_long")},
)
def flights_split(flights: DataFrame) -> Mapping[str, DataFrame]:
    """Each flight in one of two tables, by its distance; every batch has rows for both."""
    placed = flights.select("carrier", "flight", "distance", *_place())
    return {
        "short": placed.where("distance < 1000").drop("distance"),
        "long": placed.where("distance >= 1000").drop("distance"),
    }


@truth("flights_short")
def short_flights(records: Iterable[Record]) -> list[dict[str, Any]]:
    return [_split_row(record) for record in records if record.value["distance"] < 1000]


@truth("flights_long")
def long_flights(records: Iterable[Record]) -> list[dict[str, Any]]:
    return [_split_row(record) for record in records if record.value["distance"] >= 1000]


def _split_row(record: Record) -> dict[str, Any]:
    value = record.value
    place = {"source_partition": record.partition, "source_offset": record.offset}
    return {"carrier": value["carrier"], "flight": value["flight"], **place}


@stream(
    source=FLIGHTS,
    sink=DeltaTable("flights_judged"),
    rules=[
        NotNull("dep_delay", on_fail="quarantine"),
        Between("distance", 400, 2000, on_fail="quarantine"),
        Between("dep_delay", high=15, on_fail="drop"),
        Between("air_time", high=240),
        Holds("arr_delay is not null or dep_delay is null", name="arrived"),
    ],
)
def flights_judged(flights: DataFrame) -> DataFrame:
    """Each flight, unless a rule drops it or sets it aside; some flights break several rules."""
    return flights.select("carrier", "flight", "dep_delay", "arr_delay", "air_time", "distance", *_place())


@stream(
    source=FLIGHTS,
    sink=DeltaTable("flights_newest", keys=["carrier", "flight"]),
    rules=[Between("dep_delay", high=5, on_fail="quarantine")],
)
def flights_newest(flights: DataFrame) -> DataFrame:
    """The newest flight of each number that left in time, or was cancelled; a late one replaces no other."""
    return flights.select("carrier", "flight", "dep_delay", *_place(), "_source")


def _place() -> tuple[Column, Column]:
    """The record's place in the topic."""
    return F.col("_source.partition").alias("source_partition"), F.col("_source.offset").alias("source_offset")
