"""Further works: a join of two streams, session windows and a processor."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from benchmarks.speed.flows import PAYMENT, PAYMENTS, TOPIC
from benchmarks.speed.records import inputs
from streaming_jobs.declare.interval_join import interval_join
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, stream

_TIMED, _CONFIRMATIONS = (
    KafkaTopic(name, value=Json(PAYMENT), event_time="at", lateness="5 seconds") for name in inputs(TOPIC, "joined")
)


@stream(source={"payments": _TIMED, "confirmations": _CONFIRMATIONS}, sink=DeltaTable("joined"))
def joined(payments: DataFrame, confirmations: DataFrame) -> DataFrame:
    """Each payment with the confirmations of its account within a second after it."""
    after = confirmations.selectExpr("account", "id AS confirmation", "at AS confirmed_at")
    pairs = interval_join(payments, after, "account", times=("at", "confirmed_at"), after="1 second")
    return pairs.select("id", "account", "confirmation")


@stream(source={"payments": _TIMED, "confirmations": _CONFIRMATIONS}, sink=DeltaTable("joined_by_bound"))
def joined_by_bound(payments: DataFrame, confirmations: DataFrame) -> DataFrame:
    """The same as Spark's join with the bound in its condition."""
    after = confirmations.selectExpr("account AS confirmed", "id AS confirmation", "at AS confirmed_at")
    within = F.expr("confirmed = account AND confirmed_at BETWEEN at AND at + INTERVAL 1 SECOND")
    return payments.join(after, within).select("id", "account", "confirmation")


@stream(source=_TIMED, sink=DeltaTable("sessions"))
def sessions(payments: DataFrame) -> DataFrame:
    """Count and sum by account of payments that are at most a second apart."""
    sums = payments.groupBy(F.session_window("at", "1 second"), "account")
    totals = sums.agg(F.count(F.lit(1)).alias("count"), F.sum("amount").alias("total"))
    return totals.select(F.col("session_window.start").alias("start"), "account", "count", "total")


class Previous(StatefulProcessor):
    """Keeps the amount of an account's last payment."""

    row = Row("id", "account", "amount", "previous")

    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", "amount bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: ARG002, N802, N803
        previous = (self.last.get() or (0,))[0]
        for account, _, id_, amount in sorted(rows, key=itemgetter(1)):
            yield self.row(id_, account, amount, previous)
            previous = amount
        self.last.update((previous,))

    def close(self) -> None:
        """Nothing is open."""


@stream(source=PAYMENTS, sink=DeltaTable("previous"))
def previous(payments: DataFrame) -> DataFrame:
    """Each payment with the amount of the payment of its account before it, 0 for the first."""
    keyed = payments.select("account", F.col("_source.offset").alias("offset"), "id", "amount").groupBy("account")
    columns = "id bigint, account string, amount bigint, previous bigint"
    return keyed.transformWithState(Previous(), columns, "Append", "None")
