"""Rows in shards: each key in one of them, in the order of the rows, and the same split each time."""

from __future__ import annotations

from collections import defaultdict

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from streaming_jobs.sinks.kafka.rows import KEY
from streaming_jobs.sinks.kafka.sharded import in_shards

COUNT, SHARDS = 60_000, 5


def split(frame: DataFrame) -> dict[int, list[tuple[bytes | None, int]]]:
    """Key and number of each row by shard, in the order in which they lie there."""
    shards = defaultdict(list)
    for row in in_shards(frame, SHARDS).withColumn("shard", F.spark_partition_id()).collect():
        shards[row["shard"]].append((row[KEY], row["n"]))
    return shards


@pytest.mark.parametrize("nulls", [False, True])
def test_a_key_is_in_one_shard_in_the_order_of_the_rows(spark: SparkSession, nulls: bool) -> None:
    n = F.col("id").alias("n")
    key = F.concat(F.lit("k"), F.col("id") % 97).cast("binary")
    rows = spark.range(0, COUNT, 1, 7).select(n, (F.when(F.col("id") % 3 > 0, key) if nulls else key).alias(KEY))
    assert in_shards(rows, SHARDS).columns == rows.columns
    shards = split(rows)
    assert sorted(number for each in shards.values() for _, number in each) == [*range(COUNT)]
    assert len(shards) == SHARDS
    places = {key: shard for shard, each in shards.items() for key, _ in each}
    assert all(places[key] == shard for shard, each in shards.items() for key, _ in each)
    for each in shards.values():
        assert [number for _, number in each] == sorted(number for _, number in each)


def test_without_keys_equal_rows_are_in_the_same_shard_each_time(spark: SparkSession) -> None:
    rows = spark.range(0, 1000, 1, 3).select((F.col("id") % 50).alias("n"))

    def shards() -> set[tuple[int, int]]:
        made = in_shards(rows, SHARDS).withColumn("shard", F.spark_partition_id())
        return {(row["n"], row["shard"]) for row in made.collect()}

    assert len(first := shards()) == 50 and shards() == first
