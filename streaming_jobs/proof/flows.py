"""A fourth stream for the kill loop: two tables from one stream, so that a kill can come between their commits."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs.flows.flights import FLIGHTS
from streaming_jobs.stream import DeltaTable, stream


@stream(
    source=FLIGHTS,
    sink={"departed": DeltaTable("flights_departed"), "cancelled": DeltaTable("flights_cancelled")},
)
def flights_split(flights: DataFrame) -> Mapping[str, DataFrame]:
    """Each flight in one of two tables: those that departed, and those that were cancelled."""
    placed = flights.select(
        "carrier",
        "flight",
        "cancelled",
        F.col("_source.partition").alias("source_partition"),
        F.col("_source.offset").alias("source_offset"),
    )
    return {
        "departed": placed.where("NOT cancelled").drop("cancelled"),
        "cancelled": placed.where("cancelled").drop("cancelled"),
    }
