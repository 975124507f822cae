"""Streams for `benchmarks.planning`, with topics between them: a chain, and a tree in which two read each topic."""

from __future__ import annotations

from typing import Any

from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.formats import Json
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream

STREAMS = 20
ROWS = StructType([StructField("id", LongType()), StructField("place", StringType())])


def passed_on(value: Any) -> Any:
    """The function of every stream; no batch is run."""
    return value


def source_of(shape: str, number: int) -> str:
    """The topic that a stream reads: in a chain of the one before it, in a tree of number (n - 1) / 2."""
    return f"{shape}_in" if number == 0 else f"{shape}_out_{number - 1 if shape == 'chain' else (number - 1) // 2:02d}"


def _stream(shape: str, number: int) -> Stream:
    out = KafkaTopic(f"{shape}_out_{number:02d}", Json(ROWS))
    sinks: dict[str, Any] = {"rows": DeltaTable(f"{shape}_rows_{number:02d}"), "out": KafkaSink(out, key="place")}
    read = KafkaTopic(source_of(shape, number), Json(ROWS))
    return Stream(f"{shape}_{number:02d}", passed_on, {"value": read}, sinks)


chain = [_stream("chain", number) for number in range(STREAMS)]
tree = [_stream("tree", number) for number in range(STREAMS)]
globals().update({each.name: each for each in (*chain, *tree)})
