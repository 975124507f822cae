"""What a batch asks its running query: the counts of each source, and what the state dropped (`batch_hooks.Query`)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from streaming_jobs.errors import TransientError
from streaming_jobs.sources.base import Observed

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery


class QueryHandle:
    """The running query, once there is one: the pipeline's first batch can come before `start` returns."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._query: StreamingQuery | None = None

    def bind(self, query: StreamingQuery) -> None:
        """Set the query, once it has started."""
        self._query = query
        self._ready.set()

    def observed(self, observation: str) -> Observed:
        """The counts of one source in the plan that ran last (`Dataset.observe`)."""
        metrics = self._execution().observedMetrics().get(observation)
        if not metrics.isDefined():
            return Observed()
        # One call over the gateway, not one per field: each takes a fifth of a millisecond.
        counts = str(metrics.get().mkString(",")).split(",")
        return Observed(*(None if count == "null" else int(count) for count in counts))  # type: ignore[arg-type]

    def dropped_behind(self) -> int | None:
        """The watermark (ms) behind which the plan that ran last dropped rows of its state; None if it dropped none."""
        waiting, dropped, watermarks = [self._execution().executedPlan()], 0, [0]
        while waiting:
            node = waiting.pop()
            children = node.children()
            waiting += [children.apply(i) for i in range(children.size())]
            metric = node.metrics().get("numRowsDroppedByWatermark")
            if metric.isDefined():
                dropped += int(metric.get().value())
                mark = node.eventTimeWatermarkForLateEvents()
                watermarks += [int(mark.get())] if mark.isDefined() else []
        return max(watermarks) if dropped else None

    def _execution(self) -> Any:
        if not self._ready.wait(30) or self._query is None:
            raise TransientError("the query did not report itself within 30 s")
        return self._query._jsq.streamingQuery().lastExecution()
