"""A fourth stream for the kill loop: two tables from one stream, so that a kill can come between their commits."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs.examples.flights.streams import FLIGHTS
from streaming_jobs.stream import DeltaTable, stream


@stream(
    source=FLIGHTS,
    sink={"short": DeltaTable("flights_short"), "long": DeltaTable("flights_long")},
)
def flights_split(flights: DataFrame) -> Mapping[str, DataFrame]:
    """Each flight in one of two tables, by its distance; every batch has rows for both."""
    placed = flights.select(
        "carrier",
        "flight",
        "distance",
        F.col("_source.partition").alias("source_partition"),
        F.col("_source.offset").alias("source_offset"),
    )
    return {
        "short": placed.where("distance < 1000").drop("distance"),
        "long": placed.where("distance >= 1000").drop("distance"),
    }
