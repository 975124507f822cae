"""Streams that write topics and whose tasks fail at first: each first attempt fails after it has made all its rows."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs.formats import Json
from streaming_jobs.kafka_sink import KafkaSink
from streaming_jobs.stream import KafkaTopic, stream
from tests.support.things import THINGS
from tests.support.topic_flows import COPY

FAILURES = "FAILED_ATTEMPTS"
"""The variable that names the folder in which each failed attempt leaves an empty file."""
BY_DRIVER, BY_EXECUTORS = KafkaTopic("by-driver", value=Json(COPY)), KafkaTopic("by-executors", value=Json(COPY))


def _failing_at_first(blocks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    count = 0
    for block in blocks:
        count += block.num_rows
        yield block
    context = TaskContext.get()
    if context is not None and context.attemptNumber() == 0 and count:
        (Path(os.environ[FAILURES]) / f"{count}-{uuid.uuid4().hex}").touch()
        raise RuntimeError("the first attempt fails after its last row")


def _copy(things: DataFrame) -> DataFrame:
    place = (F.col("_source.partition").alias("part"), F.col("_source.offset").alias("off"))
    rows = things.select("k", "n", "t", *place)
    return rows.mapInArrow(_failing_at_first, rows.schema)


@stream(source=THINGS, sink=KafkaSink(BY_DRIVER, key="k"))
def retried_by_driver(things: DataFrame) -> DataFrame:
    """Every record in a topic, by way of the driver's memory."""
    return _copy(things)


@stream(source=THINGS, sink=KafkaSink(BY_EXECUTORS, key="k"))
def retried_by_executors(things: DataFrame) -> DataFrame:
    """Every record in a topic, by way of files that the executors write."""
    return _copy(things)
