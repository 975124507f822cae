"""A frame's rows in this process, as `DataFrame.toArrow` collects them, in one call of the JVM instead of 24.

PySpark asks the JVM for each setting, for the schema, and for each item of the list that says where the rows are
served; a thread of the JVM serves them. Here the JVM writes them into memory of this process (memfd_create(2)).

The rows of a batch are an RDD when `foreachBatch` is called. Spark would optimise and plan the reading of it once more,
which takes as long as the task that makes a hundred rows; here it is scanned as it is.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import structlog

from streaming_jobs.platform.one_task import IMPORTS, ONE_TASK
from streaming_jobs.platform.spark_jvm import new_object

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

log = structlog.get_logger()

_COLLECTED_ROWS = """
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.classic.Dataset;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.execution.LogicalRDD;
import org.apache.spark.sql.execution.RDDScanExec;
import org.apache.spark.sql.execution.arrow.ArrowBatchStreamWriter;
import org.apache.spark.sql.internal.SQLConf;

public class CollectedRows {
    public boolean canWrite(String file) {
        return new java.io.File(file).canWrite();
    }

    /** Writes the rows as an Arrow stream; returns whether its types are large ones, and the schema in Spark's JSON. */
    public String write(Object of, String file) throws Exception {
        Dataset frame = (Dataset) of;
        SparkSession session = frame.sparkSession();
        SQLConf conf = session.sessionState().conf();
        boolean large = conf.arrowUseLargeVarTypes();
        boolean legacy = conf.pandasStructHandlingMode().equals("legacy");
        java.io.OutputStream out = new java.io.BufferedOutputStream(new java.io.FileOutputStream(file));
        try {
            RDD made = batches(frame, session);
            byte[][] batches = OneTask.suffices(made) ? OneTask.run(made) : (byte[][]) made.collect();
            ArrowBatchStreamWriter writer =
                new ArrowBatchStreamWriter(frame.schema(), out, conf.sessionLocalTimeZone(), legacy, large);
            writer.writeBatches(scala.jdk.javaapi.CollectionConverters.asScala(
                java.util.Arrays.asList((Object[]) batches).iterator()));
            writer.end();
        } finally {
            out.close();
        }
        return large + "\\n" + frame.schema().json();
    }

    private static RDD batches(Dataset frame, SparkSession session) {
        Option before = SparkSession.getActiveSession(); // a plan belongs to the one in which it is made
        SparkSession.setActiveSession(session);
        try {
            LogicalPlan plan = frame.queryExecution().logical();
            if (!(plan instanceof LogicalRDD)) return frame.toArrowBatchRdd(frame.queryExecution().executedPlan());
            LogicalRDD rows = (LogicalRDD) plan;
            return frame.toArrowBatchRdd(new RDDScanExec(rows.output(), rows.rdd(), "ExistingRDD",
                rows.outputPartitioning(), rows.outputOrdering(), rows.stream()));
        } finally {
            if (before.isDefined()) SparkSession.setActiveSession((SparkSession) before.get());
            else SparkSession.clearActiveSession();
        }
    }
}
"""


def to_arrow(frame: DataFrame) -> pa.Table:
    """The rows of a frame; raises what `DataFrame.toArrow` raises.

    It is called for frames that are not Spark's own, and where the JVM lacks the interface, which is private.
    """
    session = getattr(frame, "sparkSession", None)
    collected = None if getattr(frame, "_jdf", None) is None else _collected_rows(session)
    return frame.toArrow() if collected is None else _written(collected, frame)


def _written(collected: Any, frame: DataFrame) -> pa.Table:
    import pyarrow as pa

    with _memory() as (memory, path):
        large, schema = str(collected.write(frame._jdf, path)).split("\n", 1)
        stream = mmap.mmap(memory, 0, prot=mmap.PROT_READ)
    with pa.ipc.open_stream(pa.py_buffer(stream)) as batches:
        return batches.read_all().cast(_arrow_schema(schema, large=large == "true"))


@contextmanager
def _memory() -> Iterator[tuple[int, str]]:
    """Memory of this process: its file descriptor, and the path by which another process opens it."""
    memory = os.memfd_create("rows", os.MFD_CLOEXEC)
    try:
        yield memory, f"/proc/{os.getpid()}/fd/{memory}"
    finally:
        os.close(memory)


@lru_cache(maxsize=64)
def _arrow_schema(schema: str, *, large: bool) -> pa.Schema:
    """That of `DataFrame.toArrow`, for a schema in Spark's JSON."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import _parse_datatype_json_string

    return to_arrow_schema(
        _parse_datatype_json_string(schema),  # type: ignore[arg-type]
        error_on_duplicated_field_names_in_struct=True,
        timezone="UTC",
        prefers_large_types=large,
    )


_BY_GATEWAY: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The object of each JVM; None for a JVM that has no such interface, or may not open this process's memory."""


def _collected_rows(session: Any) -> Any:
    gateway = session.sparkContext._gateway
    if gateway not in _BY_GATEWAY:
        try:
            from pyspark.sql.types import _parse_datatype_json_string  # noqa: F401 - PySpark does not promise it

            collected = new_object(session, "CollectedRows", IMPORTS + _COLLECTED_ROWS + ONE_TASK)
            with _memory() as (_, path):
                if not collected.canWrite(path):
                    raise PermissionError("the JVM may not open the memory of this process")
            _BY_GATEWAY[gateway] = collected
        except Exception as error:  # noqa: BLE001 - only speed is lost
            log.info("rows are collected by PySpark's own way", reason=str(error)[:300])
            _BY_GATEWAY[gateway] = None
    return _BY_GATEWAY[gateway]
