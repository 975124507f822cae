"""The three works of flows.py from topic to topic, exactly once: the records that Kafka Streams writes for them.

Input and output are named by the environment, because each run has topics of its own.
"""

from __future__ import annotations

import os

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from benchmarks.speed import flows
from benchmarks.speed.flows import PAYMENT, PAYMENTS, TOPIC
from streaming_jobs.declare.schemas import schema_of
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.formats import Json
from streaming_jobs.stream import KafkaTopic, stream

RUN = os.environ.get("BENCHMARK_RUN", "run")
NET_PAYMENT = StructType([*PAYMENT.fields, *schema_of({"net": "bigint not null"})])
TOTAL = schema_of({"account": "string not null", "count": "bigint not null", "total": "bigint not null"})
WINDOW_TOTAL = StructType([*schema_of({"start": "bigint not null"}), *TOTAL.fields])
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
    totals: DataFrame = flows.windowed.function(payments)
    return totals.select(F.unix_millis("start").alias("start"), "account", "count", "total")


@stream(source=PAYMENTS, sink=KafkaSink(_output("running", TOTAL), key="account", emit="update"))
def running(payments: DataFrame) -> DataFrame:
    """Count and sum by account so far, whenever they change."""
    totals: DataFrame = flows.running.function(payments)
    return totals
