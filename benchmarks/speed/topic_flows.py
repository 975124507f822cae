"""The three works of flows.py from topic to topic, exactly once: the records that Kafka Streams writes for them.

Input and output are named by the environment, because each run has topics of its own.
"""

from __future__ import annotations

import os

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from benchmarks.speed.flows import PAYMENT, PAYMENTS, TOPIC
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.formats import Json
from streaming_jobs.stream import KafkaTopic, stream

RUN = os.environ.get("BENCHMARK_RUN", "run")
NET_PAYMENT = StructType([*PAYMENT.fields, StructField("net", LongType(), nullable=False)])
TOTAL = StructType(
    [
        StructField("account", StringType(), nullable=False),
        StructField("count", LongType(), nullable=False),
        StructField("total", LongType(), nullable=False),
    ]
)
WINDOW_TOTAL = StructType([StructField("start", LongType(), nullable=False), *TOTAL.fields])
"""`start` of the window in ms since 1970."""


def _output(work: str, schema: StructType) -> KafkaTopic:
    return KafkaTopic(f"{RUN}.{work}", value=Json(schema))


@stream(source=PAYMENTS, sink=KafkaSink(_output("stateless", NET_PAYMENT), key="account", timestamp="at"))
def stateless(payments: DataFrame) -> DataFrame:
    """Every payment but the tests, with what is left of it after a fee of one percent."""
    net = F.expr("amount - amount div 100").alias("net")
    return payments.where("kind != 'test'").select(*PAYMENT.fieldNames(), net)


@stream(
    source=KafkaTopic(TOPIC, value=Json(PAYMENT), event_time="at", lateness="5 seconds"),
    sink=KafkaSink(_output("windowed", WINDOW_TOTAL), key="account"),
)
def windowed(payments: DataFrame) -> DataFrame:
    """Count and sum by account and ten seconds, once they are over."""
    sums = payments.groupBy(F.window("at", "10 seconds"), "account")
    totals = sums.agg(F.count(F.lit(1)).alias("count"), F.sum("amount").alias("total"))
    return totals.select(F.unix_millis("window.start").alias("start"), "account", "count", "total")


@stream(source=PAYMENTS, sink=KafkaSink(_output("running", TOTAL), key="account", emit="update"))
def running(payments: DataFrame) -> DataFrame:
    """Count and sum by account so far, whenever they change."""
    return payments.groupBy("account").agg(F.count(F.lit(1)).alias("count"), F.sum("amount").alias("total"))
