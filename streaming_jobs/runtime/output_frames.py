"""The frames of a batch, by the sinks that take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from streaming_jobs.sinks.base import SinkSet
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def fitted_outputs(
    stream: Stream, sinks: SinkSet, outputs: Mapping[str, DataFrame], topics: Sequence[str]
) -> dict[str, DataFrame]:
    """The outputs of the stream's function in the columns of their sinks, by the sink's name."""
    named = zip(stream.output_names, sinks.outputs, strict=True)
    return {sink.name: sink.fit(outputs[name], topics) for name, sink in named}


def run_small(frame: DataFrame) -> None:
    """Run the plan of a frame of few rows, to the JVM's memory: Spark itself evaluates it if it has no Python code."""
    frame._jdf.queryExecution().executedPlan().executeCollect()


def run(frame: DataFrame) -> None:
    """Run the frame's plan where no sink needs its rows: its state is computed, and its records are counted."""
    frame.write.format("noop").mode("overwrite").save()
