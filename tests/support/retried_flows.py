"""Streams that write topics and whose tasks Spark repeats.

`retried_*`: each first attempt of a task fails after it has made all its rows. `hurried_*`: the first attempt of one
task in each batch makes half of its rows and then takes so long that Spark starts a second one beside it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.formats import Json
from streaming_jobs.stream import KafkaTopic, stream
from tests.support.things import THINGS
from tests.support.topic_flows import COPY

FAILURES = "FAILED_ATTEMPTS"
"""The variable that names the folder in which failed, slow and second attempts leave an empty file each."""
SLOW = 30.0
"""Seconds that a slow attempt waits, if nobody ends it."""
BY_DRIVER, BY_EXECUTORS = KafkaTopic("by-driver", value=Json(COPY)), KafkaTopic("by-executors", value=Json(COPY))
HURRIED_BY_DRIVER = KafkaTopic("hurried-by-driver", value=Json(COPY))
HURRIED_BY_EXECUTORS = KafkaTopic("hurried-by-executors", value=Json(COPY))


def _failing_at_first(blocks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    count = 0
    for block in blocks:
        count += block.num_rows
        yield block
    context = TaskContext.get()
    if context is not None and context.attemptNumber() == 0 and count:
        (Path(os.environ[FAILURES]) / f"{count}-{uuid.uuid4().hex}").touch()
        raise RuntimeError("the first attempt fails after its last row")


def _slow_at_first(blocks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    attempt = context.attemptNumber() if context is not None and context.partitionId() == 0 else None
    for block in blocks:
        half = block.num_rows // 2
        yield block.slice(0, half)
        if attempt is not None and half:
            (Path(os.environ[FAILURES]) / f"{'second' if attempt else 'slow'}-{uuid.uuid4().hex}").touch()
        if attempt == 0 and half:
            time.sleep(SLOW)
        yield block.slice(half)


def _rows(things: DataFrame) -> DataFrame:
    place = (F.col("_source.partition").alias("part"), F.col("_source.offset").alias("off"))
    return things.select("k", "n", "t", *place)


def _copy(things: DataFrame) -> DataFrame:
    rows = _rows(things)
    return rows.mapInArrow(_failing_at_first, rows.schema)


def _hurried(things: DataFrame) -> DataFrame:
    rows = _rows(things)
    return rows.repartition(4, "n").mapInArrow(_slow_at_first, rows.schema)


@stream(source=THINGS, sink=KafkaSink(BY_DRIVER, key="k"))
def retried_by_driver(things: DataFrame) -> DataFrame:
    """Every record in a topic, by way of the driver's memory."""
    return _copy(things)


@stream(source=THINGS, sink=KafkaSink(BY_EXECUTORS, key="k"))
def retried_by_executors(things: DataFrame) -> DataFrame:
    """Every record in a topic, by way of files that the executors write."""
    return _copy(things)


@stream(source=THINGS, sink=KafkaSink(HURRIED_BY_DRIVER, key="k"))
def hurried_by_driver(things: DataFrame) -> DataFrame:
    """Every record in a topic, in any order, by way of the driver's memory."""
    return _hurried(things)


@stream(source=THINGS, sink=KafkaSink(HURRIED_BY_EXECUTORS, key="k"))
def hurried_by_executors(things: DataFrame) -> DataFrame:
    """Every record in a topic, in any order, by way of files that the executors write."""
    return _hurried(things)
