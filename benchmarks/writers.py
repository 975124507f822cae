"""Ways to write the same frame of Spark, in turns: the seconds and the CPU time of each batch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.processes import cpu_seconds, family
from benchmarks.run import Row, in_turn, median, quantile
from streaming_jobs.declare.columns import SOURCE_COLUMN
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.sinks.base import BatchOfRows, Sink

STREAM = "benchmark"
"""The name of the stream that writes."""

Write = Callable[[DataFrame, int], Row]
"""Writes a frame as the batch with this number; returns further figures. `ms` in them replaces the time taken here."""


@dataclass
class Writer:
    """One way to write a batch, and the figures of each batch: `ms`, `CPU ms` of all processes, and its own."""

    label: str
    write: Write
    batches: list[dict[str, float]] = field(default_factory=list)

    def run(self, frame: DataFrame, batch: int) -> None:
        used, began = _cpu_seconds(), time.perf_counter()
        further = self.write(frame, batch)
        ms = 1000 * (time.perf_counter() - began)
        self.batches.append({"ms": ms, "CPU ms": 1000 * (_cpu_seconds() - used), **further})

    def median(self, figure: str) -> float:
        return median([batch.get(figure, 0.0) for batch in self.batches])

    def figures(self, *further: str) -> Row:
        """Medians, and the ninth tenth of the times."""
        p90 = quantile([batch["ms"] for batch in self.batches], 0.9)
        medians = {name: self.median(name) or "" for name in (*further, "CPU ms")}
        return {"": self.label, "median ms": self.median("ms"), "p90 ms": p90, **medians}


def our_sink(sink: Sink, *, driver: bool = True, after: Callable[[], object] = bool) -> Write:
    """What a stream's batch does with its frame, from the fitted frame to the end of the commit, and `after` it."""

    def write(frame: DataFrame, batch: int) -> Row:
        source = F.struct(
            F.lit("t").alias("topic"), F.lit(0).alias("partition"), F.lit(0).cast("bigint").alias("offset")
        )
        fitted = sink.fit(frame.withColumn(SOURCE_COLUMN, source), ["t"])
        began = time.perf_counter()
        pending = sink.prepare(fitted, BatchOfRows(1, batch, driver=driver, topics=["t"]))
        prepared = time.perf_counter()
        pending.commit(LedgerEntry("batch", STREAM, sink.name, 1, batch, rows={"written": pending.rows}))
        after()
        prepare, commit = 1000 * (prepared - began), 1000 * (time.perf_counter() - prepared)
        pending.close()
        return {"ms": prepare + commit, "prepare ms": prepare, "commit ms": commit}

    return write


def write_in_turns(
    spark: SparkSession, writers: Sequence[Writer], rows_of: Callable[[int], pa.Table], rounds: int, warm_up: int
) -> None:
    """Each writes the rows of each round, which are computed before; the first `warm_up` rounds do not count."""
    for number in range(warm_up + rounds):
        frame = spark.createDataFrame(rows_of(number)).repartition(2).persist()
        frame.count()
        for writer in in_turn(writers, number):
            writer.run(frame, number)
        frame.unpersist()
    for writer in writers:
        del writer.batches[:warm_up]


def _cpu_seconds() -> float:
    """CPU time so far of this process and all below it: the driver, Spark's JVM and Python processes, the broker."""
    return sum(map(cpu_seconds, family(os.getpid())))
