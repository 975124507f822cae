"""The three works, declared as streams: what a user of the product writes.

The topic's name comes from the environment, because each run has a topic of its own.
"""

from __future__ import annotations

import os

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

TOPIC = os.environ.get("BENCHMARK_TOPIC", "payments")
PAYMENT = schema_of(
    {
        "id": "bigint not null",
        "account": "string not null",
        "amount": "bigint not null",
        "at": "timestamp not null",
        "kind": "string not null",
        "currency": "string not null",
        "country": "string not null",
    }
)
PAYMENTS = KafkaTopic(TOPIC, value=Json(PAYMENT))


@stream(source=PAYMENTS, sink=DeltaTable("stateless"))
def stateless(payments: DataFrame) -> DataFrame:
    """Every payment but the tests, with what is left of it after a fee of one percent."""
    kept = payments.where("kind != 'test'")
    return kept.select("id", "account", "amount", "at", "kind", F.expr("amount - amount div 100").alias("net"))


@stream(
    source=KafkaTopic(TOPIC, value=Json(PAYMENT), event_time="at", lateness="5 seconds"), sink=DeltaTable("windowed")
)
def windowed(payments: DataFrame) -> DataFrame:
    """Count and sum by account and ten seconds, once they are over."""
    sums = payments.groupBy(F.window("at", "10 seconds"), "account")
    totals = sums.agg(F.count(F.lit(1)).alias("count"), F.sum("amount").alias("total"))
    return totals.select(F.col("window.start").alias("start"), "account", "count", "total")


@stream(source=PAYMENTS, sink=DeltaTable("running", keys=["account"]))
def running(payments: DataFrame) -> DataFrame:
    """Count and sum by account so far."""
    return payments.groupBy("account").agg(F.count(F.lit(1)).alias("count"), F.sum("amount").alias("total"))
