"""Streams that look up a table, without state, with state and with several sinks, for tests."""

from __future__ import annotations

import os

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs import DeltaTable, Json, KafkaTopic, Lookup, stream

SALES = KafkaTopic("sales_with_rates", value=Json({"id": "bigint not null", "currency": "string"}))
RATES = Lookup("rates", schema={"currency": "string", "rate": "bigint"})
MARK = int(os.environ.get("LOOKUP_MARK", "0"))
"""Added to each rate: stands for a bug."""


def with_rates(sales: DataFrame, rates: DataFrame) -> DataFrame:
    rate = (F.col("rate") + MARK).alias("rate")
    return sales.join(rates, "currency", "left").select("id", "currency", rate)


@stream(source=SALES, lookups={"rates": RATES}, sink=DeltaTable("valued"))
def valued(sales: DataFrame, rates: DataFrame) -> DataFrame:
    """Each sale with its rate; null for a currency without one."""
    return with_rates(sales, rates)


@stream(source=SALES, lookups={"rates": RATES}, sink=DeltaTable("value_sums", keys=["currency"]))
def value_sums(sales: DataFrame, rates: DataFrame) -> DataFrame:
    """The sum of the rates of each currency: a rate that changes counts for later sales."""
    joined = with_rates(sales, rates).where("rate IS NOT NULL")
    return joined.groupBy("currency").agg(F.sum("rate").alias("total"), F.count("*").alias("n"))


@stream(source=SALES, lookups={"rates": RATES}, sink={"known": DeltaTable("known"), "unknown": DeltaTable("unknown")})
def by_knowledge(sales: DataFrame, rates: DataFrame) -> dict[str, DataFrame]:
    """Sales of currencies that have a rate, and the others."""
    joined = with_rates(sales, rates)
    return {"known": joined.where("rate IS NOT NULL"), "unknown": joined.where("rate IS NULL").drop("rate")}
