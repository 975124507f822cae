"""Both engines of a suite give the same outcomes on dirty data, and one raising expectation hides no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import great_expectations.expectations as gxe
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from great_expectations.expectations.row_conditions import Column
from pyspark.sql import SparkSession

from quality import Suite
from quality.runs.runner import RunRequest, run_suite
from quality.validation import CheckOutcome, Validation
from streaming_jobs.settings import Settings
from tests.support.checked_orders import TOPOLOGY

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
DIRTY = pa.schema(
    [
        ("id", pa.int64()),
        ("small", pa.int16()),
        ("price", pa.decimal128(12, 2)),
        ("item", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("day", pa.date32()),
        ("flag", pa.bool_()),
        ("weight", pa.float64()),
        ("month", pa.string()),
    ]
)


def row(n: int) -> dict[str, Any]:
    at = BEGIN + timedelta(hours=n, microseconds=n)
    return {
        "id": n if n % 50 else None,
        "small": None if n % 7 == 0 else n % 40 - 5,
        "price": None if n % 9 == 0 else Decimal(n) / 4,
        "item": None if n % 11 == 0 else "" if n % 13 == 0 else f"itém {n % 60}",
        "at": None if n % 17 == 0 else at,
        "local": None if n % 19 == 0 else at.replace(tzinfo=None),
        "day": None if n % 23 == 0 else date(2026, 1, 1) + timedelta(days=n % 90),
        "flag": None if n % 29 == 0 else n % 2 == 0,
        "weight": None if n % 5 == 0 else float("nan") if n % 31 == 0 else n / 7,
        "month": f"2026-{n % 3 + 1:02d}",
    }


def expectations() -> list[Any]:
    return [
        *(gxe.ExpectColumnValuesToNotBeNull(column=name) for name in DIRTY.names),
        gxe.ExpectColumnValuesToBeBetween(column="small", min_value=0, max_value=30),
        gxe.ExpectColumnValuesToBeBetween(column="small", min_value=-5, mostly=0.5),
        gxe.ExpectColumnValuesToBeBetween(column="price", min_value=1, max_value=60.25),
        gxe.ExpectColumnValuesToBeBetween(column="weight", min_value=1),
        gxe.ExpectColumnValuesToBeBetween(column="at", min_value=BEGIN + timedelta(hours=30)),
        gxe.ExpectColumnValuesToBeBetween(column="day", max_value=date(2026, 2, 1)),
        gxe.ExpectColumnValuesToMatchRegex(column="item", regex="^itém [1-4]"),
        gxe.ExpectColumnValuesToBeInSet(column="flag", value_set=[True]),
        gxe.ExpectColumnValuesToBeInSet(column="month", value_set=["2026-01"]),
        gxe.ExpectColumnValueLengthsToBeBetween(column="item", max_value=6),
        gxe.ExpectColumnValuesToBeUnique(column="id"),
        gxe.ExpectColumnValuesToBeUnique(column="item"),
        gxe.ExpectCompoundColumnsToBeUnique(column_list=["small", "flag"]),
        gxe.ExpectColumnPairValuesAToBeGreaterThanB(
            column_A="price", column_B="small", ignore_row_if="either_value_is_missing"
        ),
        gxe.ExpectColumnValuesToNotBeNull(column="price", row_condition=Column("flag") == True),  # noqa: E712
        gxe.ExpectColumnValuesToBeNull(column="price", row_condition=Column("small").is_null()),
        gxe.ExpectTableRowCountToBeBetween(max_value=10),
        gxe.ExpectTableColumnsToMatchSet(column_set=list(DIRTY.names)),
        gxe.ExpectTableColumnCountToEqual(value=len(DIRTY.names)),
        gxe.ExpectColumnMaxToBeBetween(column="small", max_value=3),
        gxe.ExpectColumnMinToBeBetween(column="at", min_value=BEGIN + timedelta(hours=30)),
        gxe.ExpectColumnMeanToBeBetween(column="price", max_value=3),
        gxe.ExpectColumnMeanToBeBetween(column="weight", max_value=3),
        gxe.ExpectColumnSumToBeBetween(column="small", max_value=3),
        gxe.ExpectColumnUniqueValueCountToBeBetween(column="item", max_value=3),
        gxe.ExpectColumnToExist(column="nothing"),
        gxe.ExpectColumnValuesToNotBeNull(column="nothing"),
    ]


@pytest.fixture
def home(tmp_path: Any) -> Settings:
    settings = Settings.load({"home": tmp_path})
    table = settings.tables / "orders"
    DeltaTable.create(table, schema=DIRTY, partition_by=["month"])
    for begin in (1, 100, 200):
        rows = pa.Table.from_pylist([row(n) for n in range(begin, begin + 90)], schema=DIRTY)
        write_deltalake(table, rows, mode="append")
    return settings


def run(settings: Settings, spark: SparkSession, engine: Any, *made: Any) -> Validation:
    suite = Suite("dirty", "orders", lambda: made, key=["id", "at"], slice="all")
    return run_suite(settings, TOPOLOGY, suite, RunRequest(engine=engine, docs=False, spark=lambda: spark))


def shown(validation: Validation) -> Iterator[CheckOutcome]:
    for outcome in validation.outcomes:
        number = None if outcome.number is None else round(outcome.number, 9)
        yield replace(outcome, number=number, error="error" if outcome.error else "")


def test_both_engines_give_the_same_outcomes(spark: SparkSession, home: Settings) -> None:
    by_pandas, by_spark = (run(home, spark, engine, *expectations()) for engine in ("pandas", "spark"))
    assert (by_pandas.engine, by_spark.engine) == ("pandas", "spark")
    pairs = list(zip(shown(by_pandas), shown(by_spark), strict=True))
    for one, other in pairs:
        assert one == other
    assert sum(one.passed for one, _ in pairs) >= 4 and sum(not one.passed for one, _ in pairs) >= 25
    assert [o.expectation for o in by_spark.outcomes if o.error] == ["nothing_not_null"]
    assert len(max((o.sample for o in by_spark.outcomes), key=len)) == 20


def test_an_expectation_that_raises_in_sparks_job_hides_no_other(spark: SparkSession, home: Settings) -> None:
    # A text that is no number: Spark raises while it evaluates this one together with the others.
    raising = gxe.ExpectColumnValuesToBeBetween(column="item", min_value=1, max_value=2)
    others = [
        gxe.ExpectColumnValuesToBeBetween(column="small", min_value=0),
        gxe.ExpectColumnMaxToBeBetween(column="small", max_value=1000),
    ]
    first, second, third = run(home, spark, "spark", raising, *others).outcomes
    assert not first.passed and first.error
    assert (second.error, third.error, third.passed) == ("", "", True) and second.failing


def test_sql_goes_to_spark_and_shows_its_rows(spark: SparkSession, home: Settings) -> None:
    sql = gxe.UnexpectedRowsExpectation(unexpected_rows_query="SELECT * FROM {batch} WHERE small < -3")
    validation = run(home, spark, "auto", sql)
    (outcome,) = validation.outcomes
    expected = [n for begin in (1, 100, 200) for n in range(begin, begin + 90) if (row(n)["small"] or 0) < -3]
    assert (validation.engine, outcome.passed, outcome.failing) == ("spark", False, len(expected))
    assert {each["id"] for each in outcome.sample} == {row(n)["id"] for n in expected}
    assert list(outcome.sample[0])[:2] == ["id", "at"]
