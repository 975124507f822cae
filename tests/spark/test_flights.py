"""The three shipped streams as plain functions on batch frames, and the closing of windows in a real query."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from streaming_jobs.declare.columns import SOURCE_COLUMN
from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights.content import rank
from streaming_jobs.examples.flights.streams import FLIGHT, STREAMS, airport_hours
from streaming_jobs.examples.flights.truth import KEYS, as_frame, differences, truth, watermark
from streaming_jobs.stream import Stream

SHARE = 0.04
SOURCE = StructType([StructField("partition", IntegerType()), StructField("offset", LongType())])
RECORD = StructType([*FLIGHT.fields, StructField(SOURCE_COLUMN, SOURCE)])


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Records as the source hands them to a stream: the fields, and the place in the topic."""
    records = dataset.records(SHARE)
    partitions = dataset.partitions(4)[: len(records)]
    places = zip(records.values, partitions.tolist(), rank(partitions).tolist(), strict=True)
    return [json.dumps(json.loads(v) | {SOURCE_COLUMN: {"partition": p, "offset": o}}) for v, p, o in places]


@pytest.fixture(scope="module")
def folder(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lines in three files, one a batch for a stream that takes one file at a time."""
    folder = tmp_path_factory.mktemp("flights")
    third = len(lines) // 3 + 1
    for number in range(3):
        file = folder / f"{number}.json"
        file.write_text("\n".join(lines[number * third : (number + 1) * third]))
        # A file source takes files by age; in another order the thirds would be late to each other.
        os.utime(file, (1_000_000 + number, 1_000_000 + number))
    return folder


@pytest.fixture(scope="module")
def flights(spark: SparkSession, folder: Path) -> DataFrame:
    return spark.read.schema(RECORD).json(str(folder))


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name)
def test_a_flow_called_as_a_function_gives_the_truth(stream: Stream, flights: DataFrame) -> None:
    made = as_frame(stream(flights).toArrow())
    expected = truth(stream.primary.name, SHARE)
    assert len(made) == len(expected) > 10
    assert differences(expected, made, KEYS[stream.name]) == []


def test_the_bytes_of_every_record_decode_to_what_was_put_in() -> None:
    [topic] = airport_hours.sources.values()
    decoded = topic.value.reader().read(dataset.records(SHARE).values)
    assert decoded.refused == {}
    received = as_frame(pa.Table.from_batches([decoded.columns]))
    sent = dataset.departures(SHARE)[FLIGHT.fieldNames()]
    assert differences(sent, received, ["sched_dep", "carrier", "flight", "origin"]) == []


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name)
def test_a_flow_returns_the_columns_and_types_it_declares(stream: Stream, flights: DataFrame) -> None:
    declared = stream.primary.schema
    assert declared is not None
    returned = stream(flights).schema
    assert [(f.name, f.dataType) for f in returned] == [(f.name, f.dataType) for f in declared]


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name)
def test_every_column_and_table_says_what_it_is(stream: Stream) -> None:
    assert stream.primary.schema is not None
    assert all(field.metadata.get("comment") for field in stream.primary.schema)
    assert stream.description
    assert stream.primary.description
    assert stream.owners


def test_an_hour_of_cancelled_flights_has_no_mean(spark: SparkSession, lines: list[str]) -> None:
    cancelled = next(line for line in lines if json.loads(line)["cancelled"])
    [row] = airport_hours(spark.createDataFrame([_row(cancelled)], RECORD)).collect()
    assert (row.flights, row.cancelled, row.mean_dep_delay, row.max_dep_delay) == (1, 1, None, None)


def test_windows_close_in_a_query_exactly_where_the_truth_says(
    spark: SparkSession, folder: Path, tmp_path: Path
) -> None:
    """The last data batch is followed by one without data, which emits what the final watermark closes."""
    [topic] = airport_hours.sources.values()
    assert topic.delay == timedelta(days=10)
    assert topic.lateness
    source = spark.readStream.schema(RECORD).option("maxFilesPerTrigger", 1).json(str(folder))
    query = (
        airport_hours(source.withWatermark("sched_dep", topic.lateness))
        .writeStream.format("memory")
        .queryName("closed_hours")
        .outputMode("append")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(120)
        emitted = as_frame(spark.table("closed_hours").toArrow())
    finally:
        query.stop()
    expected = truth("airport_hours", SHARE)
    closed = expected[expected["window_end"] <= watermark(SHARE, topic.delay)]
    assert 0 < len(closed) < len(expected)
    assert differences(closed, emitted, KEYS["airport_hours"]) == []


def _row(line: str) -> tuple[object, ...]:
    record = json.loads(line)
    record["sched_dep"] = datetime.fromisoformat(record["sched_dep"])
    record[SOURCE_COLUMN] = (0, 0)
    return tuple(record[field.name] for field in RECORD.fields)
