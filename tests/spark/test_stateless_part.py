"""The part of a plan ahead of its state: what is in it, and which streams have none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from streaming_jobs.errors import ConfigurationError
from streaming_jobs.runtime.spark_plan import analysed
from streaming_jobs.runtime.stateless_part import stateless_parts
from streaming_jobs.sources.kafka import KafkaSource
from streaming_jobs.sources.record_blocks import RecordBlocks
from streaming_jobs.stream import DeltaTable, Stream, stream
from streaming_jobs.testing.consumer import record
from tests.support.things import THINGS

OTHERS = replace(THINGS, name="others")
RAISING = "assert_true(n > 0) IS NULL"


def stream_of(function: Callable[..., DataFrame]) -> Stream:
    two = function.__code__.co_argcount == 2
    source: Any = {"things": THINGS, "others": OTHERS} if two else THINGS
    return stream(source=source, sink=DeltaTable("out", keys=["k"]))(function)


def parts(spark: SparkSession, function: Callable[..., DataFrame]) -> list[str]:
    """The analysed plans of what is ahead of the function's state."""
    made = stream_of(function)
    sources = [KafkaSource(p, t, Path("/nowhere/client"), None) for p, t in made.sources.items()]  # type: ignore[arg-type]
    frames = {source.parameter: source.batch(spark, {}, {}) for source in sources}
    return [analysed(frame) for frame in stateless_parts(made, frames)]


def test_records_from_the_drivers_memory_are_a_topics_too(spark: SparkSession) -> None:
    source = KafkaSource("things", THINGS, Path("/nowhere/client"), None)
    value = b'{"k": "x", "n": 1, "t": "2024-01-01T00:00:00Z"}'
    rows = RecordBlocks(THINGS, "all").batch([record(0, 7, value, timestamp=(1, 1_704_067_200_000))])
    frame = source.good(source.held(spark, pa.Table.from_batches([rows])))
    assert frame.select("k", "n", "_source.offset").collect() == [("x", 1, 7)]
    (part,) = stateless_parts(stream_of(windowed), {"things": frame})
    assert "assert_true" in analysed(part) and part.count() == 1


def windowed(things: DataFrame) -> DataFrame:
    key = F.expr(f"IF({RAISING}, k, 'x')").alias("k")
    return things.groupBy(F.window("t", "1 minute"), key).agg((F.sum(10 / F.col("n")) / F.count("n")).alias("x"))


def deduplicated(things: DataFrame) -> DataFrame:
    return things.where(RAISING).dropDuplicates(["k"]).select("k", (F.lit(1) / F.col("n")).alias("after"))


def chained(things: DataFrame) -> DataFrame:
    first = things.where(RAISING).groupBy("k", "n").count()
    return first.groupBy("k").agg(F.sum(1 / F.col("count")).alias("after"))


def joined(things: DataFrame, others: DataFrame) -> DataFrame:
    left = things.where(RAISING)
    return left.join(others.select(F.col("k").alias("o"), (1 / F.col("n")).alias("m")), F.expr("k = o AND m > 0"))


def beside_a_table(things: DataFrame) -> DataFrame:
    rates = things.sparkSession.createDataFrame([("x", 1)], "k string, rate int").groupBy("k").agg(F.max("rate"))
    return things.where(RAISING).join(rates, "k").groupBy("k").count()


def test_of_an_aggregation_it_has_what_is_computed_of_each_record_and_not_of_the_results(spark: SparkSession) -> None:
    (plan,) = parts(spark, windowed)
    assert "Aggregate" not in plan
    assert "assert_true" in plan and "10" in plan.partition("\n")[0], "the keys and the arguments of the functions"
    assert plan.partition("\n")[0].count("/") == 1, "the quotient of the results is not in it"


@pytest.mark.parametrize("function", [deduplicated, chained])
def test_it_ends_below_the_lowest_operator_with_state(spark: SparkSession, function: Any) -> None:
    (plan,) = parts(spark, function)
    assert "assert_true" in plan and "after" not in plan
    assert "Deduplicate" not in plan and "Aggregate" not in plan


def test_of_a_join_of_streams_it_has_both_sides(spark: SparkSession) -> None:
    left, right = parts(spark, joined)
    assert "assert_true" in left and "kafka-all-things" in left
    assert " / " in right and "kafka-all-others" in right and "Join" not in left + right


def test_a_table_that_does_not_change_is_no_state(spark: SparkSession) -> None:
    (plan,) = parts(spark, beside_a_table)
    assert "Join" in plan and "assert_true" in plan


def test_a_function_that_batch_frames_cannot_call_is_refused_with_the_remedy(spark: SparkSession) -> None:
    def only_streaming(things: DataFrame) -> DataFrame:
        if not things.isStreaming:
            raise ValueError("streams only")
        return things

    with pytest.raises(ConfigurationError, match="cannot be called with batch frames: streams only") as refused:
        parts(spark, only_streaming)
    assert "try_cast" in refused.value.next_step
