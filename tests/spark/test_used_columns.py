"""The columns that a stream uses, in the plans that the installed Spark makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.formats import Json
from streaming_jobs.runtime.used_columns import used_columns
from streaming_jobs.sources.kafka import KafkaSource
from streaming_jobs.sources.planner import BatchLimits
from streaming_jobs.stream import KafkaTopic

pytestmark = pytest.mark.spark

INNER = StructType([StructField("a b", LongType()), StructField("c", StringType())])
SCHEMA = StructType(
    [
        StructField("id", LongType(), nullable=False),
        StructField("at", TimestampType()),
        StructField("odd `name`, of#1", StringType()),
        StructField("inner", INNER),
        StructField("rest", StringType()),
    ]
)
NAMES = SCHEMA.fieldNames()
TOPIC = KafkaTopic("things", value=Json(SCHEMA), event_time="at", lateness="5 seconds")
Function = Callable[[DataFrame], DataFrame]


def passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def used(spark: SparkSession, function: Function, topic: KafkaTopic = TOPIC) -> frozenset[str] | None:
    source = KafkaSource("things", topic, Path("/nowhere/client.json"), timedelta(seconds=5))
    frame = source.stream(spark, start={0: 0}, limits=BatchLimits(1, 1, 1, 1), owner="used")
    name = source.reading_name("used")
    return used_columns(function(frame), {name: NAMES}).get(name)


def fields(used: frozenset[str] | None) -> set[str]:
    return set(NAMES) if used is None else {name.removeprefix("_record.") for name in used if "_record." in name}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda f: f.select("id"), {"id", "at"}),
        (lambda f: f.where("rest = 'x'").select(F.col("_source.offset")), {"rest", "at"}),
        (lambda f: f.select("inner.c"), {"inner", "at"}),
        (lambda f: f.select("`odd ``name``, of#1`"), {"odd `name`, of#1", "at"}),
        (lambda f: f.groupBy(F.window("at", "1 minute")).agg(F.max("_source.partition")), {"at"}),
        (lambda f: f.select("id").mapInArrow(passed_on, "id long"), {"id", "at"}),
        (lambda f: f.dropDuplicates(["id"]).select("id"), {"id", "at"}),
        (lambda f: f.select(F.to_json(F.struct("*")).alias("j")), set(NAMES)),
        (lambda f: f, set(NAMES)),
        (lambda f: f.select("id", "rest").mapInArrow(passed_on, "id long, rest string"), {"id", "rest", "at"}),
        (lambda f: f.select(F.expr("struct(*) AS all")), set(NAMES)),
    ],
    ids=[
        "a field", "a condition", "an inner field", "an odd name", "a window", "Python", "duplicates", "as JSON",
        "as it is", "two fields through Python", "as a struct",
    ],
)  # fmt: skip
def test_the_fields_that_a_function_uses(spark: SparkSession, function: Function, names: set[str]) -> None:
    assert fields(used(spark, function)) == names


def test_the_columns_of_the_position_that_a_function_uses(spark: SparkSession) -> None:
    plain = KafkaTopic("things", value=Json(SCHEMA))
    assert used(spark, lambda f: f.select("id"), plain) == {"_record", "_record.id", "_bad"}
    placed = used(spark, lambda f: f.select("id", "_source.offset", "_source.partition"), plain)
    assert placed == {"_record", "_record.id", "_bad", "offset", "partition"}


def test_a_join_with_itself_gets_everything(spark: SparkSession) -> None:
    def joined(frame: DataFrame) -> DataFrame:
        other = frame.select(F.col("id").alias("other"), F.col("at").alias("then"))
        return frame.select("id", "at").join(other, F.expr("id = other AND at = then"))

    assert used(spark, joined) is None


def either(condition: str) -> Function:
    return lambda f: f.select(
        "id", F.when(F.expr(condition), F.col("rest")).otherwise(F.col("inner.c")).alias("either")
    )


@pytest.mark.parametrize(
    "condition",
    [
        "current_date() >= date '2999-01-01'",
        "hour(current_timestamp()) < 24",
        "now() > timestamp '2999-01-01'",
        "localtimestamp() > timestamp_ntz '2999-01-01'",
        "unix_timestamp() > 0",
    ],
)
def test_a_condition_on_the_time_is_not_decided_at_the_start(spark: SparkSession, condition: str) -> None:
    assert used(spark, either(condition)) is None


@pytest.mark.parametrize("condition", ["1 = 1", "false", "null > 1"])
def test_no_branch_is_left_out_even_if_it_is_never_taken(spark: SparkSession, condition: str) -> None:
    assert fields(used(spark, either(condition))) >= {"id", "rest", "inner"}


def test_a_static_table_that_is_empty_now_may_have_rows_later(spark: SparkSession) -> None:
    static = spark.createDataFrame([], "key long, flag boolean")

    def joined(frame: DataFrame) -> DataFrame:
        both = frame.join(static, frame["id"] == static["key"], "left")
        return both.select(F.when(F.col("flag"), F.col("rest")).otherwise(F.col("inner.c")).alias("either"))

    assert fields(used(spark, joined)) >= {"id", "rest", "inner"}
    assert spark.conf.get("spark.sql.optimizer.excludedRules", None) is None
