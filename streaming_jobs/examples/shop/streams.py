"""Orders become changes of the stock, these the stock of each product, and this says what can be ordered.

topic shop_orders -> stock_changes -> topic shop_stock_changes -> stock -> topic shop_stock -> availability
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

PIECES_OF_A_BOX = 12

ORDER = StructType(
    [
        StructField("order", LongType(), False, {"comment": "Number of the order, or of the delivery"}),
        StructField("kind", StringType(), False, {"comment": "delivered, ordered or cancelled"}),
        StructField("product", StringType(), False, {"comment": "Which product"}),
        StructField("quantity", IntegerType(), False, {"comment": "How many units"}),
        StructField("unit", StringType(), False, {"comment": "piece, or box: 12 pieces"}),
        StructField("at", TimestampType(), False, {"comment": "When, UTC"}),
    ]
)
CHANGE = StructType(
    [
        StructField("product", StringType(), False, {"comment": "Which product"}),
        StructField("pieces", IntegerType(), False, {"comment": "Pieces that came, or, below zero, went"}),
        StructField("at", TimestampType(), False, {"comment": "When, UTC"}),
    ]
)
STOCK = StructType(
    [
        StructField("product", StringType(), True, {"comment": "Which product"}),
        StructField("pieces", LongType(), True, {"comment": "Pieces in stock"}),
        StructField("changes", LongType(), True, {"comment": "Changes so far"}),
    ]
)
AVAILABILITY = StructType(
    [
        StructField("product", StringType(), True, {"comment": "Which product"}),
        StructField("pieces", LongType(), True, {"comment": "Pieces in stock"}),
        StructField("available", BooleanType(), True, {"comment": "True if there is a piece"}),
    ]
)

ORDERS = KafkaTopic("shop_orders", value=Json(ORDER), description="Deliveries, orders and cancelled orders.")
CHANGES = KafkaTopic("shop_stock_changes", value=Json(CHANGE), description="Pieces that came and went, by product.")
LEVELS = KafkaTopic("shop_stock", value=Json(STOCK), description="The stock of each product after each of its changes.")
TOPICS: Mapping[str, int] = {ORDERS.name: 2, CHANGES.name: 2, LEVELS.name: 2}
"""The topics, with the partitions that they are made with."""


@stream(source=ORDERS, sink=KafkaSink(CHANGES, key="product", timestamp="at"))
def stock_changes(orders: DataFrame) -> DataFrame:
    """What each order, cancelled order or delivery does to the stock, in pieces."""
    pieces = F.when(F.col("unit") == "box", F.col("quantity") * PIECES_OF_A_BOX).otherwise(F.col("quantity"))
    change = F.when(F.col("kind") == "ordered", -pieces).otherwise(pieces)
    return orders.select("product", change.cast("int").alias("pieces"), "at", "_source")


@stream(source=CHANGES, sink=KafkaSink(LEVELS, key="product", emit="update"))
def stock(changes: DataFrame) -> DataFrame:
    """The stock of each product, whenever it has changed."""
    return changes.groupBy("product").agg(F.sum("pieces").alias("pieces"), F.count("*").alias("changes"))


@stream(source=LEVELS, sink=DeltaTable("availability", schema=AVAILABILITY, keys=["product"]))
def availability(levels: DataFrame) -> DataFrame:
    """Which products can be ordered."""
    return levels.select("product", "pieces", (F.col("pieces") > 0).alias("available"), "_source")
