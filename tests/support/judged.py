"""Streams with row rules over the topic `orders`, for tests; `order(i)` makes the i-th record, some of them dirty."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.declare.rules import Between, Holds, NotNull, Unique
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

ORDER = StructType(
    [
        StructField("n", LongType(), nullable=False),
        StructField("customer", StringType()),
        StructField("price", LongType()),
    ]
)
ORDERS = KafkaTopic("orders", value=Json(ORDER))


@stream(
    source=ORDERS,
    sink=DeltaTable("orders_clean"),
    rules=[
        NotNull("customer", on_fail="quarantine"),
        Between("price", 0, 100, on_fail="drop"),
        Holds("price <> 50", name="not fifty"),
        Unique("n"),
    ],
)
def orders_clean(orders: DataFrame) -> DataFrame:
    """Every order with its place in the topic."""
    place = (F.col("_source.partition").alias("part"), F.col("_source.offset").alias("off"))
    return orders.select("n", "customer", "price", *place)


@stream(
    source=ORDERS,
    sink={"cheap": DeltaTable("cheap"), "dear": DeltaTable("dear")},
    rules={"dear": [NotNull("customer", on_fail="quarantine"), Between("price", high=90, on_fail="drop")]},
)
def orders_split(orders: DataFrame) -> Mapping[str, DataFrame]:
    """Two tables, the second one with rules."""
    columns = ("n", "customer", "price", "_source")
    return {
        "cheap": orders.where("price < 60").select(*columns),
        "dear": orders.where("price >= 60").select(*columns),
    }


@stream(
    source=ORDERS,
    sink=DeltaTable("newest", keys=["customer"]),
    rules=[Between("price", 0, 100, on_fail="quarantine")],
)
def orders_newest(orders: DataFrame) -> DataFrame:
    """The newest order of each customer."""
    return orders.where("customer is not null").select("customer", "n", "price", "_source")


@stream(source=ORDERS, sink=DeltaTable("strict"), rules=[NotNull("customer", on_fail="fail")])
def orders_strict(orders: DataFrame) -> DataFrame:
    """Stops at the first order without a customer."""
    return orders.select("n", "customer", "price")


def order(number: int) -> tuple[bytes, bytes]:
    """Key and value of a record: each seventh has no customer, each eleventh a price below zero, each 500th is junk."""
    customer = None if number % 7 == 0 else f"c{number % 30}"
    price = -1 if number % 11 == 0 else number % 101
    value = b"junk" if number % 500 == 499 else json.dumps({"n": number, "customer": customer, "price": price}).encode()
    return f"c{number % 30}".encode(), value
