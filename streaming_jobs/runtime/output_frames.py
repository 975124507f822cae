"""The frames of a batch, by the sinks that take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from streaming_jobs.sinks.base import SinkSet
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def output_frames(
    stream: Stream, sinks: SinkSet, frame: DataFrame, topics: Sequence[str], held: ExitStack
) -> dict[str, DataFrame]:
    """A fitted frame for each sink of the function's outputs, by the sink's name.

    With one output, Spark's frame is fitted to it already. With several, it is the source's, and computed once for all.
    """
    if len(stream.output_names) == 1:
        return {sinks.primary.name: frame, sinks.first.name: frame}
    held.callback(frame.unpersist)
    outputs = stream.outputs(**{next(iter(stream.sources)): frame.persist()})
    return {sinks.primary.name: frame, **fitted_outputs(stream, sinks, outputs, topics)}


def fitted_outputs(
    stream: Stream, sinks: SinkSet, outputs: Mapping[str, DataFrame], topics: Sequence[str]
) -> dict[str, DataFrame]:
    """The outputs of the stream's function in the columns of their sinks, by the sink's name."""
    names = {sink.name: name for name, sink in stream.sinks.items()}
    names |= {sink.ledger_name: name for name, sink in stream.topic_sinks.items()}
    each = (sinks.primary, *sinks.secondary, *sinks.topics)
    return {sink.name: sink.fit(outputs[names[sink.name]], topics) for sink in each if names[sink.name] in outputs}


def run_small(frame: DataFrame) -> None:
    """Run the plan of a frame of few rows, to the JVM's memory: Spark itself evaluates it if it has no Python code."""
    frame._jdf.queryExecution().executedPlan().executeCollect()


def run(frame: DataFrame) -> None:
    """Run the frame's plan where no sink needs its rows: its state is computed, and its records are counted."""
    frame.write.format("noop").mode("overwrite").save()
