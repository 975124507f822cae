"""Whether Spark would take a stream's state for new code, told by Spark's own planner without a batch and its data.

At the first batch of a start, Spark compares the operators of its plan, and the schema of each state store, with those
in the checkpoint (`state/<operator>/_metadata`, `_stateSchema`). The check plans such a batch, without records, over a
copy of these small files: the state itself is neither read nor copied, and nothing is written to the checkpoint.

Spark compares the columns of a store by position and type. A join of streams keeps the columns of both sides, so two
columns of a type that change their places would pass, and the values of kept records would be mixed up. The names
of the columns of joins are compared here.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streaming_jobs.platform.spark_jvm import new_object
from streaming_jobs.platform.spark_on_store import hadoop_path
from streaming_jobs.storage.locations import files_below

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from streaming_jobs.state.checkpoint import Checkpoint

_STATE_FIT = """
import java.util.UUID;
import org.apache.spark.sql.catalyst.plans.logical.LocalRelation;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.execution.streaming.checkpointing.OffsetSeqMetadata;
import org.apache.spark.sql.execution.streaming.runtime.IncrementalExecution;
import org.apache.spark.sql.execution.streaming.runtime.WatermarkPropagator$;
import org.apache.spark.sql.streaming.OutputMode;
import scala.Option;
import scala.collection.Iterator;
import scala.collection.immutable.Nil$;
import scala.collection.mutable.HashMap;
import scala.collection.mutable.ListBuffer;

public class StateFit {
    public LogicalPlan withoutRecords(LogicalPlan plan) {
        if (plan.children().isEmpty())
            return plan.isStreaming()
                ? new LocalRelation(plan.output(), Nil$.MODULE$, true, Option.empty()) : plan;
        ListBuffer children = new ListBuffer();
        for (Iterator each = plan.children().iterator(); each.hasNext();)
            children.addOne(withoutRecords((LogicalPlan) each.next()));
        return (LogicalPlan) plan.withNewChildren(children.toIndexedSeq());
    }

    public void plan(SparkSession session, LogicalPlan plan, OutputMode mode, String state, long batch,
            String metadata) {
        OffsetSeqMetadata last = OffsetSeqMetadata.apply(metadata);
        new IncrementalExecution(session, withoutRecords(plan), mode, state, UUID.randomUUID(), UUID.randomUUID(),
            batch, Option.apply(last), last, WatermarkPropagator$.MODULE$.noop(), true, new HashMap(), new HashMap(),
            IncrementalExecution.$lessinit$greater$default$14(), false).executedPlan();
    }
}
"""

_LONGEST = 400
_KEPT_ROWS = "keyWithIndexToValue"
"""In the names of the stores in which a join keeps the rows of its sides."""
_NAME = re.compile(r'"name":"((?:[^"\\]|\\.)*)","type":')
_SCHEMAS = re.compile(r"(Existing|existing) (\w+)_schema=(.*?) and new \w+_schema=(.*?)\. If you want")


_OF_STATE = re.compile(r"\[(STATE_STORE_|STREAMING_STATEFUL_OPERATOR_|TRANSFORM_WITH_STATE_|STATEFUL_PROCESSOR_)\w*")
"""Spark's classes of errors about state that another plan has written."""


class NotPlanned(Exception):
    """Spark does not plan the query, for a reason that is not its state."""


def refusal(frame: DataFrame, checkpoint: Checkpoint, *, updates: bool) -> str:
    """Why the checkpoint's state does not fit this query, in Spark's words; empty if it fits.

    Raises NotPlanned with Spark's words. The session has the options of a query.
    """
    last = checkpoint.last_committed
    if last is None:
        return ""
    with tempfile.TemporaryDirectory(prefix="recourse-state-") as folder:
        there, anew = (Path(folder) / name / "state" for name in ("there", "anew"))
        try:
            _copy_descriptions(checkpoint, last, there)
        except FileNotFoundError as error:  # the stream runs on, and removes what is old
            raise NotPlanned(f"a file of the checkpoint was removed meanwhile: {error.filename}") from error
        metadata = json.dumps(checkpoint.metadata(last))
        before = _columns_of_joins(there)
        try:
            _plan(frame, there, last + 1, metadata, updates=updates)
            if before:
                _plan(frame, anew, 0, metadata, updates=updates)
        except Exception as error:
            if not _OF_STATE.search(str(error)):
                raise NotPlanned(_words(error)) from error
            return _words(error)
        after = _columns_of_joins(anew)
    for store, names in before.items():
        if names != after.get(store, names):
            return f"a join keeps the columns {', '.join(names)} in this order, and now {', '.join(after[store])}"
    return ""


def _plan(frame: DataFrame, state: Path, batch: int, metadata: str, *, updates: bool) -> None:
    spark = frame.sparkSession
    jvm: Any = spark._jvm
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    mode = modes.Update() if updates else modes.Append()
    plan = frame._jdf.queryExecution().analyzed()
    state.mkdir(parents=True, exist_ok=True)
    java = new_object(spark, "StateFit", _STATE_FIT)
    java.plan(spark._jsparkSession, plan, mode, hadoop_path(state), batch, metadata)


def _copy_descriptions(checkpoint: Checkpoint, last: int, target: Path) -> None:
    """Copy what says which state there is: the files below a folder whose name begins with an underscore.

    A processor's metadata are found by the logs of the batches, that of the planned one included; they lie beside it.
    """
    source = checkpoint.folder / "state"
    for name, _ in files_below(source):
        if any(part.startswith("_") for part in Path(name).parts[:-1]):
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((source / name).read_bytes())
    for log, batch in (("offsets", last), ("offsets", last + 1), ("commits", last)):
        (target.parent / log).mkdir(parents=True, exist_ok=True)
        (target.parent / log / str(batch)).write_bytes((checkpoint.folder / log / str(last)).read_bytes())


def _columns_of_joins(state: Path) -> dict[str, list[str]]:
    """The names in the schemas of the rows that joins keep, by the file of the schema."""
    files = (each for each in state.rglob("schema") if _KEPT_ROWS in each.as_posix())
    return {
        file.relative_to(state).as_posix(): _NAME.findall(file.read_bytes().decode(errors="replace")) for file in files
    }


def _words(error: Exception) -> str:
    """The error in one line, of which Spark's advice to switch the check off is no part."""
    text = " ".join(str(getattr(error, "java_exception", None) or error).split())
    if schemas := _SCHEMAS.search(text):
        return f"the {schemas[2]} columns of the state: {schemas[3]} -> {schemas[4]}"[: 2 * _LONGEST]
    return text[:_LONGEST]
