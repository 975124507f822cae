"""A query that is ready to start, and what its batches request from it while it runs (`batch_hooks.Query`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streaming_jobs.errors import TransientError
from streaming_jobs.platform.spark_jvm import new_object
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_watermark import WatermarkServer
from streaming_jobs.sources.base import SourceCounts
from streaming_jobs.sources.read_times import BatchReadTimes
from streaming_jobs.state.stream_record import StreamRecord

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_DROPPED, _WATERMARK = "numRowsDroppedByWatermark", "eventTimeWatermarkForLateEvents"
_BATCH_FIGURES = f"""
public class BatchFigures {{
    private Object query;
    private long dropped, watermark;

    public void of(Object query) {{
        this.query = query;
    }}

    private org.apache.spark.sql.execution.QueryExecution ranLast() throws Exception {{
        Object found = query.getClass().getMethod("lastExecution", new Class[0]).invoke(query, new Object[0]);
        return (org.apache.spark.sql.execution.QueryExecution) found;
    }}

    public Object counts(Object observation) throws Exception {{ // null: it has no counts
        scala.Option counts = ranLast().observedMetrics().get(observation);
        return counts.isEmpty() ? null : ((org.apache.spark.sql.Row) counts.get()).mkString(",");
    }}

    public synchronized String dropped() throws Exception {{
        dropped = watermark = 0;
        add(ranLast().executedPlan());
        return dropped + " " + watermark;
    }}

    private void add(org.apache.spark.sql.execution.SparkPlan node) throws Exception {{
        scala.Option metric = node.metrics().get("{_DROPPED}");
        if (metric.isDefined()) {{
            dropped += ((Number) ((org.apache.spark.util.AccumulatorV2) metric.get()).value()).longValue();
            scala.Option mark = (scala.Option) node.getClass().getMethod("{_WATERMARK}", new Class[0])
                .invoke(node, new Object[0]);
            if (mark.isDefined()) watermark = Math.max(watermark, ((Number) mark.get()).longValue());
        }}
        for (scala.collection.Iterator nodes = node.children().iterator(); nodes.hasNext();)
            add((org.apache.spark.sql.execution.SparkPlan) nodes.next());
    }}
}}
"""


class QueryHandle:
    """The running query, once there is one: the pipeline's first batch can begin before `start` returns."""

    def __init__(self, spark: SparkSession | None = None, times: Sequence[Path] = ()) -> None:
        """`times` are the files in which the sources of the query note the times of a batch."""
        self._spark = spark
        self._times = times
        self._ready = threading.Event()
        self._figures: Any = None

    def bind(self, query: StreamingQuery) -> None:
        assert self._spark is not None
        self._figures = new_object(self._spark, "BatchFigures", _BATCH_FIGURES)
        self._figures.of(query._jsq.streamingQuery())
        self._ready.set()

    def observed(self, observation: str) -> SourceCounts:
        """The counts of one source in the plan that ran last (`Dataset.observe`)."""
        # One call over the gateway for all of it: each takes a third of a millisecond.
        if (counts := self._bound().counts(observation)) is None:
            return SourceCounts()
        return SourceCounts(*(None if count == "null" else int(count) for count in str(counts).split(",")))  # type: ignore[arg-type]

    def dropped_behind(self) -> int | None:
        """The watermark (ms) behind which the plan that ran last dropped rows of its state; None if it dropped none."""
        dropped, watermark = str(self._bound().dropped()).split()
        return int(watermark) if int(dropped) else None

    def read_times(self) -> BatchReadTimes:
        return BatchReadTimes.of(self._times)

    def _bound(self) -> Any:
        """What gives the figures, once the query has said which one it is."""
        if not self._ready.wait(30):
            raise TransientError("the query did not report itself within 30 s")
        return self._figures


@dataclass(frozen=True)
class BuiltQuery:
    """A stream ready to start; `start` starts the query and binds it to the pipeline."""

    record: StreamRecord
    pipeline: BatchPipeline
    writer: DataStreamWriter
    handle: QueryHandle
    conf: AbstractContextManager[None]
    watermarks: WatermarkServer

    def start(self) -> StreamingQuery:
        """Start the query; it keeps the session's configuration of this moment."""
        with self.conf:
            query = self.writer.start()
        self.handle.bind(query)
        self.watermarks.bind(query)
        return query
