"""Two streams over one topic: the stock of each product, and the movements that took much at once.

topic stock_movements -> inventory    upsert, one row per product
                      -> low_stock    append, one row per large withdrawal
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.catalog.truths import Record, truth
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

MOVEMENT = StructType(
    [
        StructField("product", StringType(), False, {"comment": "Which product"}),
        StructField("kind", StringType(), False, {"comment": "received, sold, returned or corrected"}),
        StructField("quantity", IntegerType(), False, {"comment": "Pieces; of a correction with its sign"}),
        StructField("at", TimestampType(), False, {"comment": "When, UTC"}),
    ]
)
"""One record of the topic `stock_movements`."""

MOVEMENTS = KafkaTopic("stock_movements", value=Json(MOVEMENT), description="What came in and went out, by product.")

INVENTORY = StructType(
    [
        StructField("product", StringType(), True, {"comment": "Which product"}),
        StructField("quantity", LongType(), True, {"comment": "Pieces in stock"}),
        StructField("movements", LongType(), True, {"comment": "Movements so far"}),
        StructField("last_at", TimestampType(), True, {"comment": "When the last one was"}),
    ]
)

LOW_STOCK = StructType(
    [
        StructField("product", StringType(), True, {"comment": "Which product"}),
        StructField("taken", IntegerType(), True, {"comment": "Pieces that went out"}),
        StructField("at", TimestampType(), True, {"comment": "When"}),
    ]
)


def change() -> Column:
    """The change of the stock by a movement: a correction has its sign already, only a sale takes away."""
    return F.when(F.col("kind") == "sold", -F.col("quantity")).otherwise(F.col("quantity"))


@stream(source=MOVEMENTS, sink=DeltaTable("inventory", schema=INVENTORY, keys=["product"]))
def inventory(movements: DataFrame) -> DataFrame:
    """The stock of each product."""
    changes = movements.select("product", "at", change().alias("change"))
    return changes.groupBy("product").agg(
        F.sum("change").alias("quantity"), F.count("*").alias("movements"), F.max("at").alias("last_at")
    )


@stream(source=MOVEMENTS, sink=DeltaTable("low_stock", schema=LOW_STOCK))
def low_stock(movements: DataFrame) -> DataFrame:
    """Movements that took five pieces or more at once."""
    return movements.where(change() <= -5).select("product", (-change()).cast("int").alias("taken"), "at")


@truth(inventory)
def true_inventory(movements: Iterable[Record]) -> list[dict[str, Any]]:
    """The true stock, counted without Spark: for `recourse verify`."""
    quantity: Counter[str] = Counter()
    count: Counter[str] = Counter()
    last: dict[str, Any] = {}
    for movement in (record.value for record in movements):
        product = movement["product"]
        quantity[product] += -movement["quantity"] if movement["kind"] == "sold" else movement["quantity"]
        count[product] += 1
        last[product] = max(last.get(product, movement["at"]), movement["at"])
    return [
        {"product": name, "quantity": quantity[name], "movements": count[name], "last_at": last[name]} for name in last
    ]


@truth(low_stock)
def true_low_stock(movements: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """The large withdrawals, one by one."""
    for movement in (record.value for record in movements):
        change = -movement["quantity"] if movement["kind"] == "sold" else movement["quantity"]
        if change <= -5:
            yield {"product": movement["product"], "taken": -change, "at": movement["at"]}
