"""Two states are the same by key, value and partition, but for the rounding of sums."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame, SparkSession

from streaming_jobs.inspection.carried_state import _others

STATE = "key struct<id: int>, value struct<total: double, seen: map<string, int>, note: string>, partition_id int"
Key = tuple[tuple[int | None], tuple[float | None, dict[str, int] | None, str | None], int]
ROWS: list[Key] = [((1,), (0.1 + 0.2, {"a": 1}, "x"), 0), ((None,), (None, None, None), 1), ((3,), (7.0, {}, "y"), 1)]


@pytest.fixture
def state(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(ROWS, STATE)


@pytest.mark.parametrize(
    ("row", "others"),
    [
        (((3,), (7.0, {}, "y"), 1), 0),
        (((3,), (7.0 + 1e-14, {}, "y"), 1), 0),
        (((3,), (7.1, {}, "y"), 1), 1),
        (((3,), (None, {}, "y"), 1), 1),
        (((3,), (7.0, None, "y"), 1), 1),
        (((3,), (7.0, {"b": 1}, "y"), 1), 1),
        (((3,), (7.0, {}, "z"), 1), 1),
        (((3,), (7.0, {}, "y"), 0), 2),
        (((4,), (7.0, {}, "y"), 1), 2),
    ],
)
def test_a_key_with_another_value_or_place_is_counted(
    spark: SparkSession, state: DataFrame, row: Key, others: int
) -> None:
    again = spark.createDataFrame([((1,), (0.3, {"a": 1}, "x"), 0), ROWS[1], row], STATE)
    assert _others(state, again) == _others(again, state) == others
    assert _others(state, spark.createDataFrame(ROWS[:1], STATE)) == 2
