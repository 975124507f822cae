"""A query that is ready to start, and what its batches request from it while it runs (`batch_hooks.Query`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from streaming_jobs.errors import TransientError
from streaming_jobs.platform.processes.failing_row import LOCATES
from streaming_jobs.platform.spark_jvm import new_object
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_watermark import WatermarkServer
from streaming_jobs.runtime.planned_once import CAME_BACK, HANDED_OUT, RowsCounted, rows_of
from streaming_jobs.sources.base import SourceCounts
from streaming_jobs.sources.read_times import BatchReadTimes
from streaming_jobs.state.stream_record import StreamRecord

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

log = structlog.get_logger()

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
_COUNTED_ROWS = f"""
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.datasources.v2.MicroBatchScanExec;
import org.apache.spark.util.AccumulatorMetadata;
import org.apache.spark.util.AccumulatorV2;

public class CountedRows implements java.util.function.BiFunction {{
    public Object apply(Object plan, Object say) {{
        StringBuilder found = new StringBuilder();
        add((SparkPlan) plan, ((Boolean) say).booleanValue(), found);
        return found.toString();
    }}

    private void add(SparkPlan node, boolean say, StringBuilder found) {{
        boolean scan = node instanceof MicroBatchScanExec;
        scala.Option metric = node.metrics().get(scan ? "{HANDED_OUT}" : "{CAME_BACK}");
        boolean keepsState = node.metrics().contains("{_DROPPED}"); // records are looked for ahead of it
        if (metric.isDefined() && !keepsState) {{
            AccumulatorV2 rows = (AccumulatorV2) metric.get();
            if (say) {{
                String of = scan ? ((MicroBatchScanExec) node).end().json() : node.nodeName();
                found.append(rows.value()).append(' ').append(scan).append(' ').append(of).append('\\n');
            }} else {{
                rows.metadata_$eq(new AccumulatorMetadata(rows.id(), rows.name(), true));
            }}
        }}
        for (scala.collection.Iterator nodes = node.children().iterator(); nodes.hasNext();)
            add((SparkPlan) nodes.next(), say, found);
    }}
}}
"""
_SENT_RECORDS = """
import org.apache.spark.MapOutputTrackerMaster;
import org.apache.spark.SparkEnv;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.datasources.v2.MicroBatchScanExec;
import org.apache.spark.sql.execution.datasources.v2.python.PythonStreamingInputPartition;
import org.apache.spark.sql.execution.exchange.BroadcastExchangeExec;
import org.apache.spark.sql.execution.exchange.ShuffleExchangeExec;
import org.apache.spark.sql.execution.streaming.operators.stateful.EventTimeWatermarkExec;
import org.apache.spark.sql.execution.streaming.operators.stateful.StateStoreWriter;
import org.apache.spark.sql.execution.streaming.operators.stateful.join.StreamingSymmetricHashJoinExec;
import org.apache.spark.storage.BlockId;
import org.apache.spark.storage.BlockManager;
import org.apache.spark.storage.StorageLevel;

public class SentRecords {
    private java.util.List found, blocks, shuffles, times, states;
    private SparkPlan whole;

    public String scans(Object plan) { // the end of each scan; null: the plan cannot run again with other records
        whole = (SparkPlan) plan;
        times = new java.util.ArrayList();
        states = new java.util.ArrayList();
        found = new java.util.ArrayList();
        blocks = new java.util.ArrayList();
        shuffles = new java.util.ArrayList();
        if (!look(whole, false)) return null;
        StringBuilder ends = new StringBuilder();
        for (int i = 0; i < found.size(); i++)
            ends.append(((MicroBatchScanExec) found.get(i)).end().json()).append('\\n');
        return ends.toString();
    }

    private boolean look(SparkPlan node, boolean broadcast) {
        if (node instanceof MicroBatchScanExec) {
            scala.collection.Iterator parts = ((MicroBatchScanExec) node).inputPartitions().iterator();
            scala.Option block = scala.Option.empty();
            if (parts.hasNext()) {
                Object part = parts.next();
                if (broadcast || parts.hasNext() || !(part instanceof PythonStreamingInputPartition)) return false;
                block = ((PythonStreamingInputPartition) part).blockId();
                if (block.isEmpty()) return false;
            }
            found.add(node);
            blocks.add(block);
        }
        // Of several operators with state, one may have written its state before another one's records failed: Spark
        // would commit that one. A semi join has the watermark of the batch before, which counts what it has read.
        if (node instanceof StateStoreWriter && states.add(node) && states.size() > 1) return false;
        if (node instanceof StreamingSymmetricHashJoinExec) return false;
        if (node instanceof EventTimeWatermarkExec) times.add(node);
        if (node instanceof ShuffleExchangeExec) shuffles.add(node);
        boolean below = broadcast || node instanceof BroadcastExchangeExec;
        for (scala.collection.Iterator nodes = node.children().iterator(); nodes.hasNext();)
            if (!look((SparkPlan) nodes.next(), below)) return false;
        return true;
    }

    public boolean send(int scan, Object rows) { // false: Spark could not keep them
        scala.Option block = (scala.Option) blocks.get(scan);
        if (block.isEmpty()) return true; // the batch has no record of the topic
        BlockManager manager = SparkEnv.get().blockManager();
        manager.removeBlock((BlockId) block.get(), true);
        return manager.putIterator((BlockId) block.get(), ((scala.collection.Iterable) rows).iterator(),
            StorageLevel.MEMORY_AND_DISK_SER(), true, scala.reflect.ClassTag$.MODULE$.apply(InternalRow.class));
    }

    public void runAll() { // no task is left out because it has run, and nothing is counted twice
        whole.resetMetrics();
        for (int i = 0; i < times.size(); i++) ((EventTimeWatermarkExec) times.get(i)).eventTimeStats().reset();
        for (int i = 0; i < states.size(); i++) ((StateStoreWriter) states.get(i)).checkpointInfoAccumulator().reset();
        MapOutputTrackerMaster outputs = (MapOutputTrackerMaster) SparkEnv.get().mapOutputTracker();
        for (int i = 0; i < shuffles.size(); i++) {
            int shuffle = ((ShuffleExchangeExec) shuffles.get(i)).shuffleId();
            if (outputs.containsShuffle(shuffle)) outputs.unregisterAllMapAndMergeOutput(shuffle);
        }
    }
}
"""
_PICKLED = "BatchEvalPython"


class QueryHandle:
    """The running query, once there is one: the pipeline's first batch can begin before `start` returns."""

    def __init__(self, spark: SparkSession | None = None, times: Sequence[Path] = ()) -> None:
        """`times` are the files in which the sources of the query note the times of a batch."""
        self._spark = spark
        self._times = times
        self._ready = threading.Event()
        self._query: Any = None
        self._figures: Any = None
        self._counted_rows: Any = None
        self._counts = True

    def bind(self, query: StreamingQuery) -> None:
        assert self._spark is not None
        self._figures = new_object(self._spark, "BatchFigures", _BATCH_FIGURES)
        self._query = query._jsq.streamingQuery()
        self._figures.of(self._query)
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

    def count_failed_rows(self, wanted: bool) -> None:
        """Let tasks of the plan that runs next report the rows of its sources and Python code if they fail, or not.

        Workers of this thread's jobs look for the row that raises in Python code.
        """
        assert self._spark is not None
        self._spark.sparkContext.setLocalProperty(LOCATES, str(wanted).lower())
        if wanted:
            self._look_at_rows(say=False)

    def rows_counted(self) -> RowsCounted | None:
        """The rows that the plan handed out by topic until it failed, and those that came back from Python code."""
        if (found := self._look_at_rows(say=True)) is None:
            return None
        rows = [line.split(" ", 2) for line in found.splitlines()]
        handed_out = [(next(iter(json.loads(of))), int(count)) for count, scan, of in rows if scan == "true"]
        came_back = [(int(count), self._batch_rows(of)) for count, scan, of in rows if scan == "false"]
        return RowsCounted(handed_out, came_back)

    def send_anew(self, records: Mapping[str, DataFrame]) -> bool:
        """Have the plan that failed read these records, by topic, if it runs again; then all of its tasks run anew.

        False if it cannot, and then the query has to begin again. It can where all records were sent along with the
        plan, where it keeps none of them, as for a broadcast, and where at most one operator keeps state, and is no
        join. Waits for tasks that still read the records, which Spark has ended.
        """
        try:
            assert self._spark is not None
            sent = new_object(self._spark, "SentRecords", _SENT_RECORDS)
            ends = sent.scans(self._query.lastExecution().executedPlan())
            topics = [] if ends is None else [next(iter(json.loads(end))) for end in str(ends).splitlines()]
            if not topics or not records.keys() >= {*topics}:
                return False
            rows = {topic: rows_of(records[topic]) for topic in topics}
            if not all(sent.send(number, rows[topic]) for number, topic in enumerate(topics)):
                return False
            sent.runAll()
        except Exception as error:  # noqa: BLE001 - all of it is private; the query begins again
            log.info("a batch cannot run again with other records", reason=str(error)[:300])
            return False
        return True

    def _look_at_rows(self, *, say: bool) -> str | None:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]

        if not self._counts:
            return None
        try:
            self._bound()
            if self._counted_rows is None:
                assert self._spark is not None
                self._counted_rows = new_object(self._spark, "CountedRows", _COUNTED_ROWS)
            return str(self._counted_rows.apply(self._query.lastExecution().executedPlan(), say))
        except Py4JError as error:
            self._counts = False
            log.info("a batch that fails does not say where", reason=str(error)[:300])
            return None

    def _batch_rows(self, operator: str) -> int:
        """The rows that an operator sends to Python code at a time."""
        assert self._spark is not None
        kind = "python.udf" if operator == _PICKLED else "arrow"
        return int(self._spark.conf.get(f"spark.sql.execution.{kind}.maxRecordsPerBatch"))  # type: ignore[arg-type]

    def read_times(self) -> BatchReadTimes:
        return BatchReadTimes.of(self._times)

    def _bound(self) -> Any:
        """What gives the figures, once the query has said which one it is."""
        if not self._ready.wait(30):
            raise TransientError("the query did not report itself within 30 s")
        return self._figures


def for_each_batch(writer: DataStreamWriter, function: Callable[[DataFrame, int], None]) -> DataStreamWriter:
    """`DataStreamWriter.foreachBatch`, with one session in Python for all batches, as Spark has one for a query.

    PySpark makes a session for each batch, by nine calls of the JVM.
    """
    from py4j.protocol import Py4JError

    try:
        from py4j.java_gateway import java_import  # type: ignore[import-untyped]
        from pyspark.java_gateway import ensure_callback_server_started
        from pyspark.sql import SparkSession
        from pyspark.sql.classic.dataframe import DataFrame as ClassicFrame
        from pyspark.sql.utils import ForeachBatchFunction

        class OneSession(ForeachBatchFunction):
            of_batches: SparkSession | None = None

            def call(self, jdf: Any, batch_id: int) -> None:
                try:
                    if self.of_batches is None:
                        self.of_batches = SparkSession(self.session.sparkContext, jdf.sparkSession())
                    self.func(ClassicFrame(jdf, self.of_batches), batch_id)
                except Exception as error:
                    self.error = error
                    raise

        gateway: Any = writer._spark.sparkContext._gateway
        java_import(gateway.jvm, "org.apache.spark.sql.execution.streaming.sources.*")
        gateway.jvm.PythonForeachBatchHelper.callForeachBatch(writer._jwrite, OneSession(writer._spark, function))
        ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
    except (ImportError, AttributeError, TypeError, Py4JError) as error:  # all of it is private: only speed is lost
        log.info("each batch has a session of its own in Python", reason=str(error)[:300])
        return writer.foreachBatch(function)
    return writer


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
