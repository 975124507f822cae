"""Values of every type, by every way that a batch takes with Spark, found again by Spark, DataFusion and pyarrow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DateType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from streaming_jobs.declare.columns import REASON_COLUMN
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.base import PendingWrite
from streaming_jobs.sinks.delta import dead_letters, refused_rows
from streaming_jobs.sinks.delta.maintenance import TableMaintenance
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.sinks.delta.writers import prepare_write
from streaming_jobs.stream import DeltaTable as Declared
from tests.conftest import SettingsFactory
from tests.support import values
from tests.support.worlds import STREAM, entry

PATHS = {
    "driver": {"driver": True, "spark_commits": False},
    "executors": {"driver": False, "spark_commits": False},
    "delta-spark": {"driver": False, "spark_commits": True},
}
PLACES = StructType(
    [
        StructField("id", LongType()),
        StructField("k", StringType()),
        StructField("v", StringType()),
        StructField("day", DateType()),
        StructField("at", TimestampType()),
        StructField("local", TimestampNTZType()),
        StructField("days", ArrayType(DateType())),
    ]
)


@pytest.fixture(scope="module")
def rows(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """The hostile rows, one in each partition of the frame, and all of them once more in one."""
    folder = tmp_path_factory.mktemp("rows")
    pq.write_table(values.rows(), folder / "a.parquet")
    pq.write_table(values.rows(1000), folder / "b.parquet")
    frame = spark.read.schema(values.SCHEMA).parquet(str(folder))
    return frame.where("id < 1000").repartition(4, "id").union(frame.where("id >= 1000").coalesce(1))


def sink_of(settings: Settings, keys: tuple[str, ...] = (), name: str = "odd") -> DeltaSink:
    return ensure_sink(settings, Declared(name, keys=keys), STREAM, values.SCHEMA, generation=1)


def write(
    sink: DeltaSink, frame: DataFrame, path: Mapping[str, bool], batch: int = 0, topics: Sequence[str] = ()
) -> PendingWrite:
    staged = prepare_write(sink, sink.fit(frame, topics), **path, batch=(1, batch), topics=topics)
    try:
        assert staged.commit(entry(batch)) is not None
    finally:
        staged.close()
    sink.refresh()
    return staged


def letters(staged: PendingWrite) -> list[tuple[str, Any]]:
    assert staged.rejected is not None
    rows = dead_letters._from_rows(staged.rejected).to_pylist()
    return sorted((one["reason"], json.loads(one["value"])["id"]) for one in rows)


def broken(spark: SparkSession) -> DataFrame:
    """Rows of which two can be held; the others have something that no table can hold."""
    made = [
        (1, b"a", b"fine", "DATE'0001-01-01'"),
        (2, b"\xff", b"key", "DATE'2024-01-01'"),
        (3, b"b", b"\xed\xa0\x80", "DATE'2024-01-01'"),
        (4, ("日" * 17).encode(), b"long", "DATE'2024-01-01'"),
        (5, b"__HIVE_DEFAULT_PARTITION__", b"null", "DATE'2024-01-01'"),
        (6, "日".encode() * 16, b"fits", "DATE'9999-12-31'"),
        *((7 + number, b"a", b"year", f"DATE'{year}-01-01'") for number, year in enumerate(YEARS)),
    ]
    frame = spark.createDataFrame([row[:3] for row in made], "id bigint, k binary, v binary")
    days = F.expr(f"element_at(array({', '.join(row[3] for row in made)}), cast(id as int))")
    texts = [F.col("k").cast("string").alias("k"), F.col("v").cast("string").alias("v")]
    return frame.select("id", *texts, days.alias("day")).withColumns(
        {
            "at": F.when(F.col("id") > 6, F.col("day")).cast("timestamp"),
            "local": F.col("day").cast("timestamp_ntz"),
            "days": F.array("day"),
        }
    )


YEARS = ("+10000", "0000", "-0001", "+290000")
UNHELD = [
    ("not_utf8", 2),
    ("not_utf8", 3),
    ("partition_value", 4),
    ("partition_value", 5),
    *(("time_out_of_range", 7 + number) for number in range(len(YEARS))),
]


@pytest.mark.parametrize("column", ["day", "at", "local", "days"])
def test_a_year_that_python_has_not_is_found_in_every_type_of_time(spark: SparkSession, column: str) -> None:
    schema = StructType([StructField("id", LongType()), PLACES[column]])
    held, rejected = refused_rows.split(
        Declared("t"), schema, broken(spark).where("id = 1 or id >= 6").select("id", column).toArrow()
    )
    assert held["id"].to_pylist() == [1, 6]
    assert sorted(rejected["id"].to_pylist()) == [7 + number for number in range(len(YEARS))]
    assert set(rejected[REASON_COLUMN].to_pylist()) == {"time_out_of_range"}


@pytest.mark.parametrize(
    ("path", "keys"),
    [("driver", ()), ("executors", ()), ("delta-spark", ()), ("delta-spark", ("id", "k"))],
    ids=lambda part: part if isinstance(part, str) else "upsert" if part else "append",
)
def test_what_a_table_cannot_hold_is_refused_on_every_path(
    spark: SparkSession, settings: SettingsFactory, path: str, keys: tuple[str, ...]
) -> None:
    sink = ensure_sink(settings(), Declared("p", keys=keys, partition_by=["k"]), STREAM, PLACES, generation=1)
    for batch in range(2):
        topics = [["t"], ["t", "u"]][batch]
        source = F.struct(F.lit("t").alias("topic"), F.lit(3).alias("partition"), F.col("id").alias("offset"))
        staged = write(sink, broken(spark).withColumn("_source", source), PATHS[path], batch, topics)
        assert letters(staged) == UNHELD
        assert staged.rejected is not None and {
            (one["topic"], one["partition"], one["offset"])
            for one in dead_letters._from_rows(staged.rejected).to_pylist()
        } == {("t", 3, number) for _, number in UNHELD}
        assert staged.rows == 2
    TableMaintenance(sink, settings().table, 1).compact()
    content = DeltaTable(sink.path).to_pyarrow_table()
    assert sorted(content["id"].to_pylist()) == ([1, 6] if keys else [1, 1, 6, 6])
    assert spark.read.format("delta").load(str(sink.path)).where("k = 'a'").count() == (1 if keys else 2)


def test_a_stateful_batch_with_such_a_row_goes_through_the_executors(
    spark: SparkSession, settings: SettingsFactory, tmp_path: Path
) -> None:
    schema = StructType([StructField("k", StringType()), StructField("count", LongType())])
    sink = ensure_sink(settings(), Declared("s", partition_by=["k"]), STREAM, schema, generation=1)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(2):
        pq.write_table(pa.table({"k": [b"a", b"a", b"\xff"]}), source / f"{number}.parquet")
    null_keys: list[int] = []
    computed = spark.sparkContext.accumulator(0)

    def batch(frame: DataFrame, number: int) -> None:
        staged = write(sink, frame, PATHS["executors"], number)
        null_keys.append(0 if staged.rejected is None else staged.rejected.num_rows)

    stream = spark.readStream.schema("k binary").option("maxFilesPerTrigger", 1).parquet(str(source))
    counted = stream.groupBy(F.col("k").cast("string").alias("k")).count()
    counted = counted.withColumn("count", F.udf(lambda value: computed.add(1) or value, "bigint")("count"))
    query = (
        counted.writeStream.outputMode("update")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .foreachBatch(batch)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert null_keys == [1, 1] and computed.value == 4
    assert sorted(DeltaTable(sink.path).to_pyarrow_table()["count"].to_pylist()) == [2, 4]


WAYS = [("append", "driver"), ("append", "executors"), ("merge", "delta-spark")]
ASKED_OF_SPARK = ["double", "huge", "day", "at"]
LIMITS = ("Spark: day = datetime.date(1582, 10, 10", "Spark: at = datetime.datetime(1582, 10, 10", "= 0.0:", "= -0.0:")
"""What Spark may miss in any Delta table, see docs/values.md: ten days of 1582, and zeros of the other sign."""


@pytest.mark.parametrize(("way", "path"), WAYS, ids=lambda part: part)
def test_every_value_is_stored_and_found_by_three_engines(
    spark: SparkSession, rows: DataFrame, settings: SettingsFactory, way: str, path: str
) -> None:
    sink = sink_of(settings(), keys=("id",) if way == "merge" else ())
    write(sink, rows, PATHS[path])
    expected = values.as_text(pa.concat_tables([values.rows(), values.rows(1000)]))
    assert values.as_text(DeltaTable(sink.path).to_pyarrow_table()) == expected
    missed = [
        *values.missed_by_pyarrow(sink.path),
        *values.missed_by_datafusion(sink.path),
        *values.missed_by_spark(spark, sink.path, ASKED_OF_SPARK, ("=", ">")),
    ]
    assert [each for each in missed if not each.startswith("Spark") or not any(one in each for one in LIMITS)] == []
    filters = sum(1 for _ in values.questions()) * 2 + sum(1 for _ in values.questions(ASKED_OF_SPARK))
    print(f"values: {len(values.COLUMNS)} types, way {way} by {path}, 3 engines, {filters} filters, none missed a row")
