"""A stream in its session without Spark: its clock and queries, and what Spark and the pipeline report of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchReport
from streaming_jobs.runtime.lag import Ends
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.stream import Stream
from streaming_jobs.testing import MemoryQueries, MemoryQuery, MemoryRuntime
from tests.support.worlds import STREAM, TOPIC, TOPIC_ID


def progress(batch: int = 7, *, ran: bool = True, dropped: int = 0, **changes: Any) -> dict[str, Any]:
    """A report as Spark 4.2 writes it; one that did not run a batch is of an idle moment before `batch`."""
    steps = ("addBatch", "commitOffsets", "getBatch", "latestOffset", "queryPlanning", "triggerExecution", "walCommit")
    return {
        "batchId": batch,
        "inputRowsPerSecond": 1999.96,
        "processedRowsPerSecond": 4000.04,
        "durationMs": dict.fromkeys(steps if ran else ("latestOffset", "triggerExecution"), 3),
        "eventTime": {"watermark": "2013-01-01T05:00:00.000Z"},
        "stateOperators": [{"numRowsTotal": 5, "memoryUsedBytes": 2**20, "numRowsDroppedByWatermark": dropped}],
        "sources": [{"endOffset": {TOPIC: {"0": 40, "1": 20}}, "latestOffset": {TOPIC: {"0": 100, "1": 20}}}],
        **changes,
    }


@dataclass
class Clock:
    """Both clocks of the session, moved by hand."""

    now: float = 1_000_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


SPARK = MemoryRuntime().start("tests")
Make = Callable[..., StreamRunner]


@dataclass
class Queries(MemoryQueries):
    """Queries that run until the test ends them; `at_launch` is called before each start."""

    at_launch: Callable[[], object] = lambda: None
    seen: list[Ends] = field(default_factory=list)
    """Looks at the ends of the topics, the newest last."""

    def query(self, stream: Stream) -> MemoryQuery:
        self.at_launch()
        return MemoryQuery()

    def ends(self, stream: Stream) -> Ends | None:
        return self.seen[-1] if self.seen else None


def query_of(running: StreamRunner) -> MemoryQuery:
    assert isinstance(running.query, MemoryQuery)
    return running.query


def pipeline_of(running: StreamRunner) -> BatchPipeline:
    assert running.pipeline is not None
    return running.pipeline


def queries_of(running: StreamRunner) -> Queries:
    assert isinstance(running.queries, Queries)
    return running.queries


def reported(batch: int, note: str | None = None, **changes: Any) -> BatchReport:
    """The pipeline's report of a batch of 15 records, 10 rows and a dead letter."""
    offsets = OffsetRange(TOPIC, TOPIC_ID, {0: batch * 15, 1: 0}, {0: batch * 15 + 15, 1: 0})
    rows = {"written": 10, "dead_letters": 1}
    entry = LedgerEntry("batch", STREAM, "evens", 1, batch, (offsets,), rows, note=note)
    return replace(BatchReport(entry, "driver", "direct", 120, 1), **changes)


def ended(running: StreamRunner, **state: Any) -> StreamRunner:
    """The query has ended, with the pipeline in this state."""
    query_of(running).active = False
    for name, value in state.items():
        setattr(running.pipeline, name, value)
    running.poll(SPARK)
    return running
