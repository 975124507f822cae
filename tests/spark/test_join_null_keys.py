"""Rows whose keys are null match nothing in a join of two streams, whatever its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from streaming_jobs.runtime.spark_plan import set_to, traits

PROPAGATION = "spark.sql.constraintPropagation.enabled"


def side(spark: SparkSession, folder: Path, prefix: str) -> DataFrame:
    """A stream with keys 1 and null, and one late enough to close the windows of both."""
    rows = "(1, timestamp '2026-01-01 00:00:00'), (null, timestamp '2026-01-01 00:00:01')"
    far = f"({9 if prefix == 'a' else 8}, timestamp '2026-01-02 00:00:00')"
    for number, values in enumerate((rows, far)):
        spark.sql(f"SELECT * FROM VALUES {values} AS t(k, at)").coalesce(1).write.parquet(str(folder / f"n{number}"))
    files = spark.readStream.schema("k INT, at TIMESTAMP").option("maxFilesPerTrigger", 1).parquet(str(folder / "*"))
    named = files.select(F.col("k").alias(f"{prefix}k"), F.col("at").alias(f"{prefix}at"))
    return named.withWatermark(f"{prefix}at", "1 second")


def joined(spark: SparkSession, folder: Path, kind: str, *, ruled_out: bool) -> DataFrame:
    return join(side(spark, folder / "a", "a"), side(spark, folder / "b", "b"), kind, ruled_out=ruled_out)


def join(a: DataFrame, b: DataFrame, kind: str, *, ruled_out: bool) -> DataFrame:
    within = F.expr("bat BETWEEN aat - INTERVAL 1 MINUTE AND aat + INTERVAL 1 MINUTE")
    more = [F.col("ak").isNotNull()] if ruled_out else []
    return a.join(b, [F.col("ak") == F.col("bk"), within, *more], kind)


def rows(spark: SparkSession, frame: DataFrame, folder: Path) -> list[Any]:
    """What a query writes that is started as a session starts one with a join of streams."""
    seen: list[Any] = []
    writer = frame.writeStream.option("checkpointLocation", str(folder / "state")).trigger(availableNow=True)
    writer = writer.foreachBatch(lambda batch, _: seen.extend(tuple(row) for row in batch.collect()))
    assert spark.conf.get(PROPAGATION) == "false", "as all sessions have it"
    with set_to(spark, PROPAGATION, "true"):
        query = writer.start()
    assert spark.conf.get(PROPAGATION) == "false"
    query.awaitTermination()
    return seen


@pytest.mark.parametrize("kind", ["inner", "left", "right", "leftsemi", "full"])
def test_null_keys_match_nothing(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    frame = joined(spark, tmp_path, kind, ruled_out=kind == "full")
    seen = rows(spark, frame, tmp_path)
    if kind == "leftsemi":
        assert [key for key, _ in seen] == [1]
        return
    assert [(row[0], row[2]) for row in seen if row[1] and row[3]] == [(1, 1)], "both times are there only in a match"
    kept = [row for row in seen if row[0] is None and row[1]]
    assert len(kept) == (kind in ("left", "full")), "unmatched"


def test_a_full_outer_join_that_would_match_null_with_null_is_told_by_its_key(spark: SparkSession) -> None:
    a, b = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 1)
        .load()
        .select(F.col("value").alias(f"{prefix}k"), F.col("timestamp").alias(f"{prefix}at"))
        .withWatermark(f"{prefix}at", "1 second")
        for prefix in ("a", "b")
    )
    for kind, ruled_out, null_keys in (("full", False, ("ak = bk",)), ("full", True, ()), ("left", False, ())):
        seen = traits(join(a, b, kind, ruled_out=ruled_out))
        assert seen.joins_streams and seen.null_keys == null_keys
    assert not traits(a).joins_streams
