"""Salted parts of totals: the same for the same payments, and of the same sum whatever the number of salts."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from streaming_jobs.examples.payments.payments import payments
from streaming_jobs.examples.payments.streams import HOT_ACCOUNTS, PAYMENT, SALTS, parts, payment_totals
from streaming_jobs.runtime.spark_plan import state_fingerprint

TOTALS = ["window_start", "account", "region", "payments", "cents", "payers"]


@pytest.fixture(scope="module")
def paid(spark: SparkSession) -> DataFrame:
    """Payments as a frame."""
    return spark.createDataFrame([tuple(vars(payment).values()) for payment in payments(3000)], PAYMENT)


def sorted_rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.collect())


def test_a_repeated_batch_makes_the_same_parts_however_its_payments_lie(paid: DataFrame) -> None:
    again = paid.repartition(5, F.rand(1)).orderBy(F.desc("payment"))
    assert sorted_rows(parts(again, SALTS)) == sorted_rows(parts(paid, SALTS))


def test_totals_are_the_same_with_salts_and_without(paid: DataFrame) -> None:
    divided = parts(paid, SALTS)
    salted, plain = (payment_totals(each).select(*TOTALS) for each in (divided, parts(paid, 1)))
    assert sorted_rows(salted) == sorted_rows(plain)
    hot = F.col("account").isin(*HOT_ACCOUNTS)
    assert divided.where(hot & F.col("salt").between(0, SALTS - 1)).select("salt").distinct().count() == SALTS
    assert divided.where(~hot & (F.col("salt") != 0)).isEmpty()


def test_the_greatest_part_of_a_hot_account_is_a_fraction_of_its_total(paid: DataFrame) -> None:
    salted, plain = (int(parts(paid, salts).agg(F.max("payers")).collect()[0][0]) for salts in (SALTS, 1))
    assert salted < plain / 4


def test_another_number_of_salts_does_not_fit_the_state(spark: SparkSession) -> None:
    ticks = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    coming = ticks.select(
        F.col("timestamp").alias("at"), *(F.lit("0").cast(f.dataType).alias(f.name) for f in PAYMENT.fields[:-1])
    )
    assert state_fingerprint(parts(coming, SALTS)) != state_fingerprint(parts(coming, SALTS // 2)) != {}
