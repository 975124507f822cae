"""Outputs that share what their query computes: its state once, and each output equal to a query of its own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from streaming_jobs import DeltaTable, Json, KafkaTopic, stream
from streaming_jobs.errors import ConfigurationError
from streaming_jobs.runtime.shared_plan import SharedPlan
from streaming_jobs.testing import StreamTest

SCHEMA = "k INT, n INT, at TIMESTAMP"


def source(spark: SparkSession, folder: Path) -> DataFrame:
    folder.mkdir(exist_ok=True)
    for number, numbers in enumerate((range(20), range(20, 50))):
        lines = (json.dumps({"k": n % 3, "n": n, "at": f"2026-01-01T00:00:{n:02d}Z"}) for n in numbers)
        (folder / f"{number}.json").write_text("\n".join(lines))
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(folder))


def totals(frame: DataFrame) -> dict[str, DataFrame]:
    """A filter, a Python function beside a table that does not change, and the state's rows as they are."""
    sums = frame.groupBy("k").agg(F.sum("n").alias("total"), F.count("*").alias("count"))
    names = frame.sparkSession.createDataFrame([(0, "zero"), (1, "one")], "k INT, name STRING")
    odd = F.udf(lambda total: total % 2 == 1, "boolean")
    return {
        "large": sums.where("total > 100").select("k", (F.col("total") * 2).alias("twice")),
        "named": sums.join(names, "k", "left").withColumn("odd", odd("total")),
        "all": sums,
    }


def windows(frame: DataFrame) -> dict[str, DataFrame]:
    counts = frame.withWatermark("at", "2 seconds").groupBy(F.window("at", "10 seconds"), "k").agg(F.count("*"))
    flat = counts.select("window.start", "k", "count(1)")
    return {"k0": flat.where("k = 0"), "rows": counts.drop("k")}


def join(frame: DataFrame) -> dict[str, DataFrame]:
    other = frame.select(F.col("k").alias("o"), F.col("n").alias("m"), F.col("at").alias("then"))
    other = other.withWatermark("then", "1 second")
    near = F.expr("k = o AND at BETWEEN then - INTERVAL 1 SECONDS AND then + INTERVAL 4 SECONDS")
    both = frame.withWatermark("at", "1 second").join(other, near)
    return {"pairs": both.select("n", "m"), "apart": both.where("n <> m").select((F.col("n") - F.col("m")).alias("d"))}


def run(frame: DataFrame, folder: Path, mode: str, take: Any) -> None:
    """A query that is ended and started again after each batch."""
    for _ in range(2):
        writer = frame.writeStream.outputMode(mode).option("checkpointLocation", str(folder))
        writer.foreachBatch(lambda batch, _: take(batch)).trigger(availableNow=True).start().awaitTermination()


def rows(frame: DataFrame) -> Counter[str]:
    return Counter(str(row) for row in frame.collect())


@pytest.mark.parametrize(("outputs", "mode"), [(totals, "update"), (windows, "append"), (join, "append")])
def test_each_output_has_the_rows_that_a_query_of_its_own_has(
    spark: SparkSession, tmp_path: Path, outputs: Any, mode: str
) -> None:
    frame = source(spark, tmp_path / "in")
    declared: Mapping[str, DataFrame] = outputs(frame)
    shared = SharedPlan.of("s", declared)
    assert shared.frame.isStreaming
    together: dict[str, Counter[str]] = {name: Counter() for name in declared}

    def take(batch: DataFrame) -> None:
        for name, made in shared.outputs_of(batch.persist()).items():
            assert not made.isStreaming and made.schema == declared[name].schema
            together[name] += rows(made)
        batch.unpersist()

    run(shared.frame, tmp_path / "together", mode, take)
    for name, alone in declared.items():
        seen: Counter[str] = Counter()
        run(alone, tmp_path / f"alone-{name}", mode, lambda batch, seen=seen: seen.update(rows(batch)))
        assert together[name] == seen and seen


def test_outputs_with_states_of_their_own_are_refused_with_what_to_do(spark: SparkSession, tmp_path: Path) -> None:
    frame = source(spark, tmp_path / "in")
    twice = {name: frame.groupBy("k").count() for name in ("a", "b")}
    chained = {"a": (sums := frame.groupBy("k", "n").count()), "b": sums.groupBy("k").count()}
    beside = {"a": frame.groupBy("k").count(), "b": frame.where("k = 1")}
    for outputs in (twice, chained, beside):
        with pytest.raises(ConfigurationError, match="outputs a and b are not made of one frame") as refused:
            SharedPlan.of("s", outputs)
        assert "assign it to a variable" in str(refused.value.next_step)


@stream(
    source=KafkaTopic("numbers", value=Json({"n": "bigint not null"})),
    sink={"twice": DeltaTable("twice"), "once": DeltaTable("once")},
)
def used_twice(numbers: DataFrame) -> dict[str, DataFrame]:
    """Outputs for which a query would have to read the topic twice."""
    each = numbers.select("n")
    return {"twice": each.union(each), "once": each}


def test_without_state_each_batch_makes_the_outputs_whatever_they_do_with_its_records(
    stream_test: Callable[..., StreamTest],
) -> None:
    test = stream_test(used_twice)
    for n in range(3):
        test.send({"n": n})
    test.run()
    assert [row["n"] for row in test.rows("twice")] == [0, 0, 1, 1, 2, 2]
    assert [row["n"] for row in test.rows("once")] == [0, 1, 2]
