"""The writes that delta-spark commits: large upserts, and tables outside our profile (`writers.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from streaming_jobs.errors import LedgerConflict
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.sinks.base import Committer, PendingWrite
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.upsert_order import (
    FLAGS,
    clauses,
    order_of,
)
from streaming_jobs.sinks.row_rules import NOTHING_BROKEN, Judged

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


@dataclass
class SparkAppend:
    """Rows of a cached frame, appended by delta-spark."""

    committer: ClassVar[Committer] = "spark"
    sink: DeltaSink
    frame: DataFrame
    cached: DataFrame | None
    rows: int
    null_keys: pa.Table | None = None
    deletes: ClassVar[None] = None
    judged: Judged = NOTHING_BROKEN

    def commit(self, entry: LedgerEntry) -> int | None:
        return _spark_commit(self.sink, entry, lambda: _spark_append(self.sink, self.frame, entry))

    def close(self) -> None:
        """Free the cached frame, if it is this write's own."""
        if self.cached is not None:
            self.cached.unpersist()


@dataclass
class SparkMerge:
    """A cached frame with one row per key, merged by delta-spark."""

    committer: ClassVar[Committer] = "spark"
    sink: DeltaSink
    frame: DataFrame
    cached: Sequence[DataFrame]
    rows: int
    null_keys: pa.Table | None
    by_position: bool = False
    deletes: PendingWrite | None = None
    judged: Judged = NOTHING_BROKEN

    def commit(self, entry: LedgerEntry) -> int | None:
        return _spark_commit(self.sink, entry, lambda: self._merge(entry), lambda: self._append_nothing(entry))

    def _append_nothing(self, entry: LedgerEntry) -> None:
        columns = [c for c in self.frame.columns if c not in FLAGS]
        _spark_append(self.sink, self.frame.select(*(f"`{c}`" for c in columns)).limit(0), entry)

    def _merge(self, entry: LedgerEntry) -> None:
        from delta.tables import DeltaTable as SparkDeltaTable

        session = self.frame.sparkSession
        order = order_of(self.sink.schema, self.sink.declared.order_by, by_position=self.by_position)
        does = clauses(order, self.frame.columns)
        values: dict[str, str | Column] = {f"`{c}`": f"s.`{c}`" for c in self.frame.columns if c not in FLAGS}
        condition = " AND ".join(f"t.`{k}` = s.`{k}`" for k in self.sink.declared.keys)
        merge = SparkDeltaTable.forPath(session, str(self.sink.path)).alias("t").merge(self.frame.alias("s"), condition)
        if does.delete is not None:
            merge = merge.whenMatchedDelete(does.delete)
        merge = merge.whenMatchedUpdate(does.update, values).whenNotMatchedInsert(does.insert, values)  # type: ignore[arg-type]
        # MERGE takes its transaction only from the session, where any other Delta write would take it too.
        confs = {
            "spark.databricks.delta.write.txnAppId": self.sink.app_id,
            "spark.databricks.delta.write.txnVersion": str(entry.txn.version),
            "spark.databricks.delta.commitInfo.userMetadata": entry.encode(),
        }
        try:
            for key, value in confs.items():
                session.conf.set(key, value)
            merge.execute()
        finally:
            for key in confs:
                session.conf.unset(key)

    def close(self) -> None:
        """Free the cached frames."""
        for frame in self.cached:
            frame.unpersist()


def _spark_append(sink: DeltaSink, frame: DataFrame, entry: LedgerEntry) -> None:
    writer = frame.write.format("delta").mode("append").option("userMetadata", entry.encode())
    writer.option("txnAppId", sink.app_id).option("txnVersion", str(entry.txn.version)).save(str(sink.path))


def _spark_commit(
    sink: DeltaSink, entry: LedgerEntry, write: Callable[[], None], write_nothing: Callable[[], None] | None = None
) -> int | None:
    """Commit through delta-spark. It skips silently where deltalake raises: check the position before and after.

    `write_nothing` commits the transaction alone, if the write changed nothing.
    """
    if sink.holds(entry):
        sink.sync()
        return None
    at = sink.position
    for attempt in (write, write_nothing):
        if attempt is not None:
            attempt()
            sink.refresh()
        if sink.position == entry.txn:
            return sink.committed()
        if sink.position != at:
            break
    if (now := sink.position) is not None and now.generation > entry.generation:
        raise sink.fenced(now, entry)
    raise LedgerConflict(
        f"delta-spark left table {sink.name} at {now} when it should have written {entry.txn}",
        "look for a second driver with another state folder on the same tables",
    )
