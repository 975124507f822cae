"""Streams whose format, rule or function is wrong until `REDRIVE_CODE` is `right`, for tests of redrives."""

from __future__ import annotations

import os

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DoubleType, IntegerType, StringType, StructField, StructType, TimestampType

from streaming_jobs import DeltaTable, ErrorPolicy, Holds, Json, KafkaTopic, Slices, Stream, stream


def priced(topic: str, code: str) -> Stream:
    """The code `wrong` refuses prices with a fraction and quarantines those above 50, `right` does neither."""
    kind, most = ("int", 50) if code == "wrong" else ("double", 10_000)
    source = KafkaTopic(topic, value=Json({"id": "int", "price": kind}))

    @stream(
        name="priced",
        source=source,
        sink=DeltaTable("priced"),
        rules=[Holds(f"price <= {most}", name="cheap", on_fail="quarantine")],
    )
    def rows(orders: DataFrame) -> DataFrame:
        place = ("_source.partition AS p", "_source.offset AS o", "_source")
        return orders.selectExpr("id", "CAST(price AS DOUBLE) AS price", *place)

    return rows


def hourly(topic: str, code: str) -> Stream:
    """Sums of the amounts by hour. The code `wrong` refuses amounts with a fraction, and raises on those above 50."""
    amount: DataType = IntegerType() if code == "wrong" else DoubleType()
    record = StructType(
        [
            StructField("at", TimestampType(), nullable=False),
            StructField("amount", amount, nullable=False),
            StructField("note", StringType()),
        ]
    )
    source = KafkaTopic(topic, value=Json(record), event_time="at", lateness="1 minute")
    sink = DeltaTable("hourly", slices=Slices("begin", reach="1 hour"), late_rows="keep")

    @stream(name="hourly", source=source, sink=sink, errors=ErrorPolicy(function="dead_letter", budget="1000 per hour"))
    def sums(events: DataFrame) -> DataFrame:
        checked = "CAST(amount AS DOUBLE)" if code == "right" else "CAST(IF(amount > 50, 'x', amount) AS DOUBLE)"
        by_hour = (
            events.withColumn("n", F.expr(checked)).groupBy(F.window("at", "1 hour")).agg(F.sum("n").alias("total"))
        )
        return by_hour.select(F.col("window.start").alias("begin"), "total")

    return sums


def limited(topic: str, code: str) -> Stream:
    """Sums of the amounts by hour and parity; the code `wrong` sets those above 10 aside, `right` those above 50."""
    source = KafkaTopic(
        topic, value=Json({"at": "timestamp", "amount": "int", "number": "int"}), event_time="at", lateness="1 minute"
    )
    most = 10 if code == "wrong" else 50

    @stream(
        name="limited",
        source=source,
        sink=DeltaTable("limited", slices=Slices("begin", reach="1 hour")),
        rules=[Holds(f"total <= {most}", name="small", on_fail="quarantine")],
    )
    def sums(events: DataFrame) -> DataFrame:
        odd = F.expr("number % 2").alias("odd")
        by_hour = events.groupBy(F.window("at", "1 hour"), odd).agg(F.sum("amount").alias("total"))
        return by_hour.select(F.col("window.start").alias("begin"), "odd", "total")

    return sums


if "REDRIVE_TOPIC" in os.environ:
    flow = priced(os.environ["REDRIVE_TOPIC"], os.environ.get("REDRIVE_CODE", "right"))
    rules_of_windows = limited(os.environ["REDRIVE_TOPIC"], os.environ.get("REDRIVE_CODE", "right"))
    windowed = hourly(os.environ["REDRIVE_TOPIC"], os.environ.get("REDRIVE_CODE", "right"))
