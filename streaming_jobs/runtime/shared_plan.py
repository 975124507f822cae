"""The part of a stream's plan that all its outputs share: one query computes it, and each batch goes on from its rows.

    sources -> ... state, join ...  |  -> where  -> table a
              computed once by the  |  -> select -> table b
              query                 |  -> ...    -> topic c

A query has one plan, and Spark would compute a second one's state a second time. So the query runs the plan up to
where the outputs part: the node that keeps state, or that brings the sources together. For each batch, what an output
adds to that node is put onto the batch's rows. A stream without either needs none of this: its function is called on
the records of the batch.

Works on Spark's analysed plans (`QueryExecution.analyzed`), where a frame that two outputs are made of is the same
node in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streaming_jobs.errors import ConfigurationError
from streaming_jobs.platform.spark_jvm import new_object
from streaming_jobs.runtime.spark_plan import STATEFUL_NODE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SHARED_PLAN = """
import org.apache.spark.sql.catalyst.expressions.Alias;
import org.apache.spark.sql.catalyst.expressions.Attribute;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.Project;
import scala.collection.Iterator;
import scala.collection.mutable.ListBuffer;

public class SharedPlan {
    public LogicalPlan parting(LogicalPlan plan, String stateful) {
        while (!plan.nodeName().matches(stateful)) {
            LogicalPlan next = onlyStreaming(plan);
            if (next == null) break;
            plan = next;
        }
        return plan;
    }

    private LogicalPlan onlyStreaming(LogicalPlan plan) {
        LogicalPlan found = null;
        for (Iterator nodes = plan.children().iterator(); nodes.hasNext();) {
            LogicalPlan child = (LogicalPlan) nodes.next();
            if (child.isStreaming()) {
                if (found != null) return null;
                found = child;
            }
        }
        return found;
    }

    public LogicalPlan onto(LogicalPlan plan, LogicalPlan shared, LogicalPlan batch) {
        if (plan.equals(shared)) return named(shared, batch);
        ListBuffer children = new ListBuffer();
        for (Iterator nodes = plan.children().iterator(); nodes.hasNext();)
            children.addOne(onto((LogicalPlan) nodes.next(), shared, batch));
        return (LogicalPlan) plan.withNewChildren(children.toIndexedSeq());
    }

    private LogicalPlan named(LogicalPlan shared, LogicalPlan batch) {
        ListBuffer columns = new ListBuffer();
        Iterator computed = batch.output().iterator();
        for (Iterator wanted = shared.output().iterator(); wanted.hasNext();) {
            Attribute column = (Attribute) wanted.next();
            columns.addOne(new Alias((Attribute) computed.next(), column.name(), column.exprId(), column.qualifier(),
                scala.Option.apply(column.metadata()), scala.collection.immutable.Nil$.MODULE$));
        }
        return new Project(columns.toSeq(), batch);
    }
}
"""


@dataclass(frozen=True)
class SharedPlan:
    """What the outputs of one stream share (`frame`, for the query), and what each adds to it."""

    frame: DataFrame
    _plans: Mapping[str, Any]
    _node: Any
    _java: Any

    @classmethod
    def of(cls, stream: str, outputs: Mapping[str, DataFrame]) -> SharedPlan:
        """Raises ConfigurationError if the outputs part before the state or the join of one of them."""
        spark = next(iter(outputs.values())).sparkSession
        java = new_object(spark, "SharedPlan", _SHARED_PLAN)
        plans = {name: _analysed(frame) for name, frame in outputs.items()}
        partings = {name: java.parting(plan, STATEFUL_NODE) for name, plan in plans.items()}
        (first, node), *others = partings.items()
        for name, other in others:
            if not node.equals(other):
                raise ConfigurationError(
                    f"stream {stream} keeps state or joins sources, and its outputs {first} and {name} are not made "
                    f"of one frame ({node.nodeName()} and {other.nodeName()})",
                    "compute what keeps state or joins once, assign it to a variable, and make every output from that; "
                    "or split the stream: one stream for each state",
                )
        return cls(_frame(spark, node), plans, node, java)

    def outputs_of(self, batch: DataFrame) -> dict[str, DataFrame]:
        """The outputs made of a batch's rows, which are those of `frame`."""
        rows = _analysed(batch)
        return {
            name: _frame(batch.sparkSession, self._java.onto(plan, self._node, rows))
            for name, plan in self._plans.items()
        }


def _analysed(frame: DataFrame) -> Any:
    return frame._jdf.queryExecution().analyzed()


def _frame(spark: SparkSession, plan: Any) -> DataFrame:
    from pyspark.sql.classic.dataframe import DataFrame as ClassicFrame

    assert spark._jvm is not None
    return ClassicFrame(spark._jvm.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, plan), spark)
