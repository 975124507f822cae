"""Plans that are made once, run on parts of their records: a part raises if and only if it has a record that raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from py4j.protocol import Py4JError
from pyspark.errors import ArithmeticException, PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

from streaming_jobs.errors import FunctionRaised
from streaming_jobs.platform.failures import classify
from streaming_jobs.runtime.planned_once import PlannedOnce, RowsCounted, Stopped, _Run

COUNT, BAD = 40, 23
NUMBERS = np.arange(COUNT)
PARTS = [
    [(0, COUNT)],
    [(0, BAD)],
    [(BAD, COUNT)],
    [(BAD, BAD + 1)],
    [(BAD + 1, COUNT)],
    [(0, 5), (20, 30)],
    [(20, 30), (35, 40)],
]


@F.udf(LongType(), useArrow=True)
def picky(number, bad):  # type: ignore[no-untyped-def]  # Spark reads type hints, and not those of `annotations`
    if bad:
        raise ValueError(f"no place for {number}")
    return number


pickled = F.udf(picky.func, LongType(), useArrow=False)


def _kept(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    for frame in frames:
        if frame["bad"].any():
            raise ValueError("a bad record")
        yield frame[["n"]]


def _kept_in_arrow(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if sum(batch["bad"].to_pylist()):
            raise ValueError("a bad record")
        yield batch.select(["n"])


def _kept_after_others(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Raises on no record alone."""
    before = 0
    for frame in frames:
        before += len(frame)
        if before > 1 and frame["bad"].any():
            raise ValueError("a bad record after others")
        yield frame[["n"]]


@F.pandas_udf(LongType())
def picky_series(number: pd.Series, bad: pd.Series) -> pd.Series:
    if bad.any():
        raise ValueError("a bad record")
    return number


@F.pandas_udf(LongType())
def picky_iterator(pairs: Iterator[tuple[pd.Series, pd.Series]]) -> Iterator[pd.Series]:
    for number, bad in pairs:
        yield picky_series.func(number, bad)


@F.arrow_udf(LongType())
def picky_array(number: pa.Array, bad: pa.Array) -> pa.Array:
    if sum(bad.to_pylist()):
        raise ValueError("a bad record")
    return number


def divided(records: DataFrame) -> DataFrame:
    return records.selectExpr("n", "n div (1 - bad) AS m")


FUNCTIONS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "division": divided,
    "cast": lambda a: a.selectExpr("CAST(IF(bad = 1, 'none', CAST(n AS STRING)) AS BIGINT) AS m"),
    "python": lambda a: a.select(picky("n", "bad")),
    "pickled": lambda a: a.select(pickled("n", "bad")),
    "filtered": lambda a: a.where("n > 2").select(pickled("n", "bad")),
    "exploded": lambda a: a.select("bad", F.explode(F.sequence(F.lit(0), F.col("n") % 4)).alias("n")).mapInPandas(
        _kept, "n bigint"
    ),
    "divided_python": lambda a: divided(a.withColumn("n", picky("n", F.lit(0)))),
    "pandas": lambda a: a.mapInPandas(_kept, "n bigint"),
    "arrow": lambda a: a.mapInArrow(_kept_in_arrow, "n bigint"),
    "series": lambda a: a.select(picky_series("n", "bad")),
    "iterator": lambda a: a.select(picky_iterator("n", "bad")),
    "array": lambda a: a.select(picky_array("n", "bad")),
    "united": lambda a: divided(a).unionByName(divided(a.where("n % 2 = 0"))),
    "joined": lambda a: divided(a).join(divided(a).withColumnRenamed("m", "other"), "n"),
    "grouped": lambda a: divided(a).groupBy("n").agg(F.max("m")),
    "looked_up": lambda a: divided(a.join(F.broadcast(a.sparkSession.range(1_000).toDF("n")), "n")),
}


def held(spark: SparkSession, begin: int = 0, count: int = COUNT, bad: int = BAD) -> DataFrame:
    numbers = range(begin, begin + count)
    return spark.createDataFrame(pa.table({"n": list(numbers), "bad": [int(n == bad) for n in numbers]}))


def raised(stopped: Stopped | None) -> str | None:
    if stopped is None:
        return None
    found = classify(stopped.error)
    assert isinstance(found, FunctionRaised), found
    return found.found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_part_raises_if_and_only_if_it_has_a_record_that_does(spark: SparkSession, name: str) -> None:
    planned = PlannedOnce.of(spark, {"a": held(spark)}, lambda records: [FUNCTIONS[name](records["a"])], {"a": NUMBERS})
    assert planned is not None
    for part in PARTS:
        found = raised(planned.run(part))
        assert (found is not None) == any(begin <= BAD < end for begin, end in part), (part, found)


def test_each_source_has_its_part(spark: SparkSession) -> None:
    def both(records: dict[str, DataFrame]) -> Sequence[DataFrame]:
        return [divided(records["a"]).unionByName(divided(records["b"])), divided(records["b"])]

    numbers = {"a": NUMBERS + COUNT, "b": NUMBERS}
    planned = PlannedOnce.of(spark, {"a": held(spark, COUNT), "b": held(spark)}, both, numbers)
    assert planned is not None
    assert raised(planned.run([(0, BAD), (COUNT, 2 * COUNT)])) is None
    assert raised(planned.run([(BAD, BAD + 1)])) is not None


def test_a_frame_of_the_function_with_the_columns_of_the_records_is_left_whole(spark: SparkSession) -> None:
    def with_own(records: dict[str, DataFrame]) -> Sequence[DataFrame]:
        own = spark.sql("SELECT * FROM VALUES (7L, 0L), (8L, 0L), (9L, 1L) AS own(n, bad)")
        return [records["a"].select("n", "bad").unionByName(own)]

    planned = PlannedOnce.of(spark, {"a": held(spark)}, with_own, {"a": NUMBERS})
    assert planned is not None
    assert sorted(row.n for row in planned.frames([(0, 2)])[0].collect()) == [0, 1, 7, 8, 9]


def planned_of(spark: SparkSession, function: Callable[[DataFrame], DataFrame], frame: DataFrame) -> PlannedOnce:
    numbers = {"a": np.arange(frame.count())}
    planned = PlannedOnce.of(spark, {"a": frame}, lambda records: [function(records["a"])], numbers)
    assert planned is not None
    return planned


@pytest.mark.parametrize("name", ["division", "pandas", "united", "joined"])
def test_the_plan_of_a_batch_holds_for_the_records_of_a_later_one(spark: SparkSession, name: str) -> None:
    kept = planned_of(spark, FUNCTIONS[name], held(spark)).without_records()
    bad = COUNT + 3  # the record that raises is another one
    later = kept.on({"a": held(spark, COUNT, COUNT - 1, bad)}, {"a": np.arange(COUNT - 1) + 7})
    assert later is not None
    for part in PARTS:
        shifted = [(begin + 7, end + 7) for begin, end in part]
        found = raised(later.run(shifted))
        assert (found is not None) == any(begin <= 3 < end for begin, end in part), (part, found)
    rows = later.frames([(7, 7 + 3), (7 + 4, 7 + 6)])[0].collect()
    assert {row[0] for row in rows} <= {COUNT, COUNT + 1, COUNT + 2, COUNT + 4, COUNT + 5} and rows
    assert kept.on({"a": held(spark, count=COUNT + 1)}, {"a": np.arange(COUNT + 1)}) is None, "more than were planned"


def test_a_plan_that_is_kept_holds_no_record(spark: SparkSession) -> None:
    def leaves(node: Any) -> Iterator[Any]:
        assert not node.plan.logicalLink().isDefined()
        for child in node.children:
            yield from leaves(child)
        if not node.children:
            yield node.plan

    planned = planned_of(spark, FUNCTIONS["united"], held(spark))
    found = [leaf for node in planned.plans for leaf in leaves(node)]
    assert len(found) == 2 and all(leaf.rows().isEmpty() for leaf in found)
    assert not planned.without_records().rows


def test_a_plan_of_its_time_or_with_more_than_records_is_made_for_each_batch(
    spark: SparkSession, tmp_path: Path
) -> None:
    spark.range(3).write.parquet(str(tmp_path / "other"))
    functions: dict[str, Callable[[DataFrame], DataFrame]] = {
        "time": lambda a: a.withColumn("at", F.current_timestamp()),
        "day": lambda a: a.where(F.current_date() > F.lit("2020-01-01").cast("date")),
        "random": lambda a: a.withColumn("r", F.rand()),
        "id": lambda a: a.withColumn("u", F.expr("uuid()")),
        "file": lambda a: a.join(spark.read.parquet(str(tmp_path / "other")).toDF("n"), "n"),
    }
    for name, function in functions.items():
        kept = planned_of(spark, function, held(spark))
        assert raised(kept.run([(0, COUNT)])) is None
        assert kept.on({"a": held(spark)}, {"a": NUMBERS}) is None, name


def test_rows_that_a_batch_counted_say_where_it_stopped(spark: SparkSession) -> None:
    planned = planned_of(spark, divided, held(spark))
    in_jvm, in_python = ArithmeticException("[DIVIDE_BY_ZERO]"), PythonException("no place")
    assert planned.near(RowsCounted([("a", BAD + 1)], []), in_jvm) == [(BAD, BAD + 1)]
    assert planned.near(RowsCounted([("a", 40)], [(20, 10)]), in_python) == [(20, 30)]
    named = PythonException("no place\n(row 24 of its task)")
    assert planned.near(RowsCounted([("a", 40)], [(20, 10)]), named) == [(23, 24)], "its worker has counted the rows"
    assert planned.near(RowsCounted([("a", 24)], [(20, 10)]), in_jvm) == [(10, 20), (23, 24)]
    assert planned.near(RowsCounted([("a", 0)], []), in_jvm) == []


PYTHON = ["pickled", "python", "pandas", "arrow", "series", "iterator", "array", "filtered", "exploded"]
ONE = ["division", "cast", "grouped", "looked_up", *PYTHON]
"""Runs of these stop exactly at the record."""


@pytest.mark.parametrize("name", [*ONE, "divided_python", "united", "joined", "after_others"])
def test_a_run_that_raises_says_where_it_stopped(spark: SparkSession, name: str) -> None:
    count, bad = 1_000, 666
    numbers = {"a": np.arange(count) + 7}  # as if the batch had seven offsets without a record before
    frame = held(spark, count=count, bad=bad)
    functions = {**FUNCTIONS, "after_others": lambda a: a.mapInPandas(_kept_after_others, "n bigint")}
    planned = PlannedOnce.of(spark, {"a": frame}, lambda records: [functions[name](records["a"])], numbers)
    assert planned is not None
    spans, sizes = [(0, count + 7)], []
    while sizes[-1:] != [1] and len(sizes) < 4:
        stopped = planned.run(spans)
        assert stopped is not None
        spans = list(stopped.near)
        assert any(begin <= bad + 7 < end for begin, end in spans)
        sizes.append(sum(end - begin for begin, end in spans))
    # A worker that cannot name the row stops within a batch at first.
    expected = [1] if name in ONE else [100, 1] if name == "after_others" else sizes
    assert sizes == expected
    assert sizes[-1] <= 2
    assert spark.sparkContext.getLocalProperty("spark.sql.execution.arrow.maxRecordsPerBatch") is None


def test_records_that_a_plan_hides_or_leaves_out_are_not_run_in_parts(spark: SparkSession) -> None:
    def subquery(records: DataFrame) -> DataFrame:
        records.createOrReplaceTempView("planned_once")
        return records.sparkSession.sql(
            "SELECT n FROM planned_once WHERE n < (SELECT max(n div (1 - bad)) FROM planned_once)"
        )

    def kept(records: DataFrame) -> DataFrame:
        frame = divided(records).persist()
        keeping.append(frame)
        return frame.unionByName(records.selectExpr("n", "bad AS m"))

    def copied(records: DataFrame) -> DataFrame:
        return divided(records.localCheckpoint()).unionByName(records.selectExpr("n", "bad AS m"))

    def none(records: DataFrame) -> DataFrame:
        return divided(records.where("false"))

    keeping: list[DataFrame] = []
    for function in (subquery, kept, copied, none):
        planned = PlannedOnce.of(spark, {"a": held(spark)}, lambda r, f=function: [f(r["a"])], {"a": NUMBERS})  # type: ignore[misc]
        assert planned is None, function.__name__
    for frame in keeping:
        frame.unpersist()


@pytest.mark.parametrize(("of", "name"), [(_Run, "_counted"), (PlannedOnce, "frames")])
def test_each_part_has_a_plan_of_its_own_on_a_spark_without_this_interface(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, of: type, name: str
) -> None:
    def missing(*_: object) -> None:
        raise Py4JError("Method copy([]) does not exist")

    monkeypatch.setattr(of, name, missing)
    assert PlannedOnce.of(spark, {"a": held(spark)}, lambda records: [divided(records["a"])], {"a": NUMBERS}) is None
