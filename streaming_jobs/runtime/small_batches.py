"""How Spark plans a small batch of a state with one partition: one stage with one task, and without compiled code.

**One stage.** The records of a small batch are one partition (`sources/data_source.py`), which a state of one partition
could take as it is: all rows of every key are there. But the scan of a data source does not say that it has one
partition (Spark 4.2), so Spark puts an exchange in between: a second stage that waits for the first, and files for the
shuffle. Here a scan with one partition is planned below a `coalesce(1)`, which does nothing but say so. A watermark
forgets it again (`EventTimeWatermarkExec` has no partitioning of its own), so the `coalesce(1)` comes above it. A batch
that several tasks read keeps its exchange.

**Interpreted.** For each batch Spark would write the source of the code that its plan is compiled to, look it up among
the compiled, and wrap it for the task. With a few hundred records that takes longer than to interpret the plan's
expressions. A batch with more records is compiled, and so is one that reads anything else, such as a table that is
looked up: Spark reads Parquet by columns in compiled plans only. Options of a user's own hold
(`spark.extra`: spark.sql.codegen.wholeStage, spark.sql.codegen.factoryMode).

Strategies of the planner see scans through a private interface of Spark; without it, a batch has two stages of compiled
code, and one line in the log says so. A batch of a state with more partitions is planned as Spark does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from streaming_jobs.platform.spark_jvm import new_object

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WITHOUT_CLOSURES = {"spark.sql.execution.usePartitionEvaluator": "true"}
"""Operators send their tasks objects, not closures, whose classes Spark would read and serialise for each batch."""

log = structlog.get_logger()

_STRATEGY = """
import org.apache.spark.SparkEnv;
import org.apache.spark.sql.ExperimentalMethods;
import org.apache.spark.sql.catalyst.plans.logical.CollectMetrics;
import org.apache.spark.sql.catalyst.plans.logical.EventTimeWatermark;
import org.apache.spark.sql.catalyst.plans.logical.Filter;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import org.apache.spark.sql.catalyst.plans.logical.ReturnAnswer;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.execution.CoalesceExec;
import org.apache.spark.sql.execution.CollectMetricsExec;
import org.apache.spark.sql.execution.FilterExec;
import org.apache.spark.sql.execution.ProjectExec;
import org.apache.spark.sql.execution.SparkPlan;
import org.apache.spark.sql.execution.SparkStrategy;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Strategy;
import org.apache.spark.sql.execution.datasources.v2.MicroBatchScanExec;
import org.apache.spark.sql.execution.datasources.v2.StreamingDataSourceV2ScanRelation;
import org.apache.spark.sql.execution.datasources.v2.python.PythonStreamingInputPartition;
import org.apache.spark.sql.execution.streaming.operators.stateful.EventTimeWatermarkExec;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.internal.SQLConf$;
import org.apache.spark.storage.BlockId;
import org.apache.spark.storage.BlockStatus;
import scala.Option;
import scala.collection.Iterator;
import scala.collection.immutable.Nil$;
import scala.collection.immutable.Seq;

public class SmallBatches extends SparkStrategy {
    private static final Seq NOTHING = (Seq) (Object) Nil$.MODULE$;
    private static final String WHOLE = SQLConf$.MODULE$.WHOLESTAGE_CODEGEN_ENABLED().key();
    private static final String PARTS = SQLConf$.MODULE$.CODEGEN_FACTORY_MODE().key();
    private static final String CODE = "recourse.code"; // what has been chosen: interpreted or compiled
    private static final long MOST_BYTES = 256L << 10; // of records as Spark keeps them: some 2,500
    private DataSourceV2Strategy spark;

    public void of(Object object) { // once for all queries of a session: each has the strategies of its start
        SparkSession session = (SparkSession) object;
        ExperimentalMethods methods = session.experimental();
        Iterator there = methods.extraStrategies().iterator();
        while (there.hasNext()) if (there.next() instanceof SmallBatches) return;
        spark = new DataSourceV2Strategy(session);
        methods.extraStrategies_$eq((Seq) methods.extraStrategies().appended(this));
    }

    private static String statePartitions(SQLConf conf) { // those of the checkpoint, or of a query's first run
        String key = SQLConf$.MODULE$.STATEFUL_SHUFFLE_PARTITIONS_INTERNAL().key();
        return conf.getConfString(key, Integer.toString(conf.numShufflePartitions()));
    }

    public Seq apply(LogicalPlan plan) {
        SQLConf conf = SQLConf$.MODULE$.get();
        boolean one = statePartitions(conf).equals("1");
        if (plan instanceof ReturnAnswer) choose(conf, one && readsRecordsAlone(plan)); // the root: first
        if (!one || plan instanceof ReturnAnswer) return NOTHING;
        boolean watermark = plan instanceof EventTimeWatermark; // which would forget how many partitions it has
        SparkPlan planned = watermark || leaf(plan) instanceof StreamingDataSourceV2ScanRelation ? planned(plan) : null;
        if (planned == null) return NOTHING;
        SparkPlan scan = planned;
        while (scan.children().size() == 1) scan = (SparkPlan) scan.children().head();
        if (!(scan instanceof MicroBatchScanExec)) return (Seq) NOTHING.prepended(planned);
        Seq parts = ((MicroBatchScanExec) scan).inputPartitions();
        if (!areFew(parts)) choose(conf, false);
        return (Seq) NOTHING.prepended(parts.size() == 1 ? new CoalesceExec(1, planned) : planned);
    }

    private static boolean readsRecordsAlone(LogicalPlan plan) {
        Iterator leaves = plan.collectLeaves().iterator();
        while (leaves.hasNext()) if (!(leaves.next() instanceof StreamingDataSourceV2ScanRelation)) return false;
        return true;
    }

    private static boolean areFew(Seq parts) {
        if (parts.isEmpty()) return true;
        if (parts.size() > 1 || !(parts.head() instanceof PythonStreamingInputPartition)) return false;
        Option block = ((PythonStreamingInputPartition) parts.head()).blockId();
        Option status = block.isEmpty() ? block : SparkEnv.get().blockManager().getStatus((BlockId) block.get());
        if (status.isEmpty()) return false;
        return ((BlockStatus) status.get()).memSize() <= MOST_BYTES && ((BlockStatus) status.get()).diskSize() == 0L;
    }

    private static void choose(SQLConf conf, boolean interpreted) {
        if (!conf.contains(CODE)) {
            if (!interpreted || conf.contains(WHOLE) || conf.contains(PARTS)) return;
        } else if (conf.getConfString(CODE).equals("interpreted") == interpreted) return;
        // Not unset: what is planned within the batch would inherit the options of the batch.
        conf.setConfString(WHOLE, Boolean.toString(!interpreted));
        conf.setConfString(PARTS, interpreted ? "NO_CODEGEN" : "FALLBACK");
        conf.setConfString(CODE, interpreted ? "interpreted" : "compiled");
    }

    private static LogicalPlan leaf(LogicalPlan plan) {
        while (plan instanceof Project || plan instanceof Filter) plan = (LogicalPlan) plan.children().head();
        return plan;
    }

    private SparkPlan planned(LogicalPlan plan) { // null if there is something else above the scan, or several scans
        if (leaf(plan) instanceof StreamingDataSourceV2ScanRelation) {
            Seq found = spark.apply(plan); // in place of Spark's own strategy, not beside it
            return found.isEmpty() ? null : (SparkPlan) found.head();
        }
        if (plan.children().size() != 1) return null;
        SparkPlan child = planned((LogicalPlan) plan.children().head());
        if (child == null) return null;
        if (plan instanceof Project) return new ProjectExec(((Project) plan).projectList(), child);
        if (plan instanceof Filter) return new FilterExec(((Filter) plan).condition(), child);
        if (plan instanceof CollectMetrics) {
            CollectMetrics of = (CollectMetrics) plan;
            return new CollectMetricsExec(of.name(), of.metrics(), child);
        }
        if (plan instanceof EventTimeWatermark) {
            EventTimeWatermark of = (EventTimeWatermark) plan;
            return new EventTimeWatermarkExec(of.nodeId(), of.eventTime(), of.delay(), child);
        }
        return null;
    }
}
"""


def plan_small_batches(spark: SparkSession) -> None:
    """Let queries that start from now on, with one partition of state, run small batches as one stage, interpreted."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    try:
        new_object(spark, "SmallBatches", _STRATEGY).of(spark._jsparkSession)
    except Py4JError as error:
        log.info("small batches are planned as large ones", reason=str(error)[:300])
