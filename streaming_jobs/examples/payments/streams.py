"""Payments become parts of five-minute totals, hot accounts in several parts, and these the totals.

    topic payments -> payment_parts -> topic payment_parts -> payment_totals

A part is written once, when its window is over; a total is updated with each of its parts. docs/payments.md explains
the salt, the lateness, and why the two stages write differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.catalog.truths import Record, truth
from streaming_jobs.declare.salt import salt
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

WINDOW = timedelta(minutes=5)
LATENESS = timedelta(minutes=10)
"""How much later than a newer payment a payment may arrive and still count."""
HOT_ACCOUNTS = ("market",)
"""The accounts whose groups are divided."""
SALTS = 16
"""The number of parts into which a group of a hot account is divided."""


def _column(name: str, kind: DataType, comment: str, *, required: bool = True) -> StructField:
    return StructField(name, kind, not required, {"comment": comment})


PAYMENT = StructType(
    [
        _column("payment", LongType(), "Number of the payment"),
        _column("account", StringType(), "The account that is paid"),
        _column("region", StringType(), "The region that the payer is in"),
        _column("payer", StringType(), "Who pays"),
        _column("cents", LongType(), "Amount, cents"),
        _column("at", TimestampType(), "When, UTC"),
    ]
)
_TOTALS = (
    _column("payments", LongType(), "Number of payments"),
    _column("cents", LongType(), "Sum of the amounts, cents"),
    _column("payers", LongType(), "Number of different payers"),
)
_GROUP = (
    _column("window_start", TimestampType(), "Begin of the five minutes, UTC, inclusive"),
    _column("window_end", TimestampType(), "End of the five minutes, UTC, exclusive"),
    _column("account", StringType(), "The account that is paid"),
    _column("region", StringType(), "The region that the payers are in"),
)
PART = StructType([*_GROUP, _column("salt", IntegerType(), "Which part of a hot account; otherwise 0"), *_TOTALS])
TOTAL = StructType(
    [StructField(f.name, f.dataType, True, f.metadata) for f in (*_GROUP, *_TOTALS)]
    + [_column("parts", LongType(), "Number of parts that the total is made of", required=False)]
)

PAYMENTS = KafkaTopic(
    "payments",
    value=Json(PAYMENT),
    event_time="at",
    lateness="10 minutes",
    max_ahead="5 minutes",
    description="Payments, by payer.",
)
PARTS = KafkaTopic(
    "payment_parts",
    value=Json(PART),
    event_time="window_end",
    lateness="6 hours",
    description="Parts of the totals of five minutes, by account; written once, when the five minutes are over.",
)
TOPICS: Mapping[str, int] = {PAYMENTS.name: 4, PARTS.name: 4}
"""The topics, with the partitions that they are made with."""


def parts(payments: DataFrame, salts: int) -> DataFrame:
    """The totals of each window, account, region and salt: a payer is in one part of a hot account's group."""
    five_minutes, hot = F.window("at", "5 minutes"), F.col("account").isin(*HOT_ACCOUNTS)
    part = salt("payer", parts=salts, where=hot).alias("salt")
    totals = payments.groupBy(five_minutes.alias("five_minutes"), "account", "region", part).agg(
        F.count("*").alias("payments"),
        F.sum("cents").alias("cents"),
        F.size(F.collect_set("payer")).cast("long").alias("payers"),
    )
    start, end = F.col("five_minutes.start").alias("window_start"), F.col("five_minutes.end").alias("window_end")
    return totals.select(start, end, "account", "region", "salt", "payments", "cents", "payers")


@stream(source=PAYMENTS, sink=KafkaSink(PARTS, key="account"))
def payment_parts(payments: DataFrame) -> DataFrame:
    """Parts of the totals, each once, when its five minutes are over."""
    return parts(payments, SALTS)


@stream(
    source=PARTS,
    sink=DeltaTable(
        "payment_totals",
        schema=TOTAL,
        keys=["window_start", "account", "region"],
        description="Payments by five minutes, account and region.",
    ),
)
def payment_totals(parts: DataFrame) -> DataFrame:
    """The parts of each total added up, updated with each of its parts."""
    return parts.groupBy("window_start", "window_end", "account", "region").agg(
        F.sum("payments").alias("payments"),
        F.sum("cents").alias("cents"),
        F.sum("payers").alias("payers"),
        F.count("*").alias("parts"),
    )


@truth(payment_totals)
def true_totals_of_parts(parts: Iterable[Record]) -> list[dict[str, Any]]:
    """The totals, added up without Spark: for `recourse verify`."""
    totals: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in (record.value for record in parts):
        group = {name: part[name] for name in ("window_start", "window_end", "account", "region")}
        total = totals.setdefault(tuple(group.values()), group | dict.fromkeys(TOTAL.fieldNames()[4:], 0))
        for name in ("payments", "cents", "payers"):
            total[name] += part[name]
        total["parts"] += 1
    return list(totals.values())
