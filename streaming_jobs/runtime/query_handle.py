"""What a batch asks its running query: the counts of each source, and what the state dropped (`batch_hooks.Query`)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from streaming_jobs.errors import TransientError
from streaming_jobs.platform.spark_jvm import new_object
from streaming_jobs.runtime.stream_queries import RunningQuery
from streaming_jobs.sources.base import SourceCounts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


log = structlog.get_logger()

_DROPPED, _WATERMARK = "numRowsDroppedByWatermark", "eventTimeWatermarkForLateEvents"
_DROPPED_ROWS = f"""
public class DroppedRows implements java.util.function.Function {{
    private long dropped, watermark;

    public synchronized Object apply(Object plan) throws Exception {{
        dropped = watermark = 0;
        add((org.apache.spark.sql.execution.SparkPlan) plan);
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
    """The running query, once there is one: the pipeline's first batch can come before `start` returns."""

    def __init__(self, spark: SparkSession | None = None) -> None:
        self._spark = spark
        self._ready = threading.Event()
        self._query: StreamingQuery | None = None
        self._dropped_rows: Any = None

    def bind(self, query: StreamingQuery) -> None:
        """Set the query, once it has started."""
        self._query = query
        self._ready.set()

    def observed(self, observation: str) -> SourceCounts:
        """The counts of one source in the plan that ran last (`Dataset.observe`)."""
        metrics = self._execution().observedMetrics().get(observation)
        if not metrics.isDefined():
            return SourceCounts()
        # One call over the gateway, not one per field: each takes a fifth of a millisecond.
        counts = str(metrics.get().mkString(",")).split(",")
        return SourceCounts(*(None if count == "null" else int(count) for count in counts))  # type: ignore[arg-type]

    def dropped_behind(self) -> int | None:
        """The watermark (ms) behind which the plan that ran last dropped rows of its state; None if it dropped none."""
        if self._dropped_rows is None:
            assert self._spark is not None
            self._dropped_rows = new_object(self._spark, "DroppedRows", _DROPPED_ROWS)
        dropped, watermark = self._dropped_rows.apply(self._execution().executedPlan()).split()
        return int(watermark) if int(dropped) else None

    def _execution(self) -> Any:
        if not self._ready.wait(30) or self._query is None:
            raise TransientError("the query did not report itself within 30 s")
        return self._query._jsq.streamingQuery().lastExecution()


# The stop of one stream's query: at a batch border, from outside if it is idle, by force after a deadline.
#
# A query is over when its batch and its thread have ended; Spark calls it terminated before that.

_IDLE_BEFORE_STOP = 1.0
LINGERING = 300.0
"""Seconds that a batch may run on after its query was ended, before the session ends itself and its JVM."""


@dataclass
class QueryStop:
    """A stream's stop; all times in seconds of one monotonic clock.

    `deadline` is the time for a batch to reach its border, `interval` the trigger's time between two batches.
    """

    stream: str
    deadline: float
    interval: float
    lingering: float = LINGERING
    requested: threading.Event = field(default_factory=threading.Event)
    """The pipeline checks it before each batch."""
    requested_at: float = 0.0
    _no_batch_since: float | None = None
    _ending_since: float | None = None

    def request(self, now: float) -> bool:
        """Request a stop at the next batch border; False if one was requested before."""
        if self.requested.is_set():
            return False
        self.requested.set()
        self.requested_at = now
        return True

    def is_stuck(self, now: float) -> bool:
        """True if a batch has outlived the end of its query for too long: only the end of this process ends it."""
        return self._ending_since is not None and now - self._ending_since > self.lingering

    def press(self, query: RunningQuery, now: float, *, in_batch: bool) -> None:
        """Stop the query if it is idle or past the deadline; a busy one stops at its batch border."""
        if in_batch:
            self._no_batch_since = None
        elif self._no_batch_since is None:
            self._no_batch_since = now
        patience = max(_IDLE_BEFORE_STOP, self.interval)
        idle = self._no_batch_since is not None and now - self._no_batch_since > patience
        if idle or now - self.requested_at > self.deadline:
            self._ending(now, in_batch=in_batch)
            try:
                query.stop()
            except Exception as error:  # noqa: BLE001 - it waits stopTimeout at most; the next poll tries again
                log.warning("the query has not stopped yet", stream=self.stream, reason=str(error)[:200])

    def is_over(self, query: RunningQuery, now: float, *, in_batch: bool) -> bool:
        """True if the batch and the thread of an inactive query have ended.

        Spark calls a query terminated as soon as a stop is requested, and waits for its thread afterwards,
        `stopTimeout` at most. A batch that it interrupts runs on in Python to the end of its commit, and then in Spark.
        """
        if in_batch or not query.ended:
            self._ending(now, in_batch=in_batch)
            return False
        self._ending_since = None
        return True

    def _ending(self, now: float, *, in_batch: bool) -> None:
        if self._ending_since is None:
            self._ending_since = now
            if in_batch:
                log.info("the stream is held until its batch is over", stream=self.stream, at_most=self.lingering)
