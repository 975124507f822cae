"""Prepared writes to a Delta table, committed by the driver itself, deltalake or delta-spark (`writers.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.transaction import AddAction

from streaming_jobs.errors import LedgerConflict
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.sinks.base import Committer, PendingWrite
from streaming_jobs.sinks.delta import column_bounds
from streaming_jobs.sinks.delta.parquet import checked_actions
from streaming_jobs.sinks.delta.row_engine import Files
from streaming_jobs.sinks.delta.upsert_order import FLAGS, Clauses, clauses, order_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from streaming_jobs.sinks.delta.sink import DeltaSink


@dataclass
class DeltaWrite(PendingWrite):
    sink: DeltaSink

    @property
    def name(self) -> str:
        return self.sink.name


@dataclass
class ArrowAppend(DeltaWrite):
    """Rows in the driver's memory, written and committed by the driver, or by deltalake (`DeltaSink.appends`)."""

    table: pa.Table

    @property
    def rows(self) -> int:
        return int(self.table.num_rows)

    def commit(self, entry: LedgerEntry) -> int | None:
        if self.sink.appends and set(self.table.column_names) <= set(self.sink.arrow_schema.names):
            return self.sink.append_files(entry, self._files)

        def write(handle: DeltaTable, properties: CommitProperties) -> None:
            if self.rows:
                written = column_bounds.writer_properties(self.sink.schema)
                with self.writing():
                    write_deltalake(
                        handle, self.table, mode="append", writer_properties=written, commit_properties=properties
                    )

        return self.sink.commit(entry, write)

    def _files(self) -> Sequence[AddAction]:
        """The rows in a new file; one that no version lists is removed by maintenance."""
        if not self.rows:
            return []
        files, schema = Files(self.sink.path, self.sink.path), self.sink.arrow_schema
        columns = [
            self.table[field.name] if field.name in self.table.column_names else pa.nulls(self.rows, field.type)
            for field in schema
        ]
        with self.writing():
            files.add("", pa.Table.from_arrays(columns, names=schema.names).cast(schema))
            actions, _ = checked_actions(self.sink.path, files.close(), (), self.sink.bounded, self.rows)
        return actions


@dataclass
class ParquetAppend(DeltaWrite):
    """Parquet files below the table's folder that no version lists yet, committed by the driver or by deltalake.

    The next attempt of the batch removes files that were not committed.
    """

    actions: Sequence[AddAction]
    count: int

    @property
    def rows(self) -> int:
        return self.count

    def commit(self, entry: LedgerEntry) -> int | None:
        return self.sink.append_files(entry, lambda: self.actions)


@dataclass
class ArrowMerge(DeltaWrite):
    """Rows in the driver's memory, one per key, merged by deltalake."""

    table: pa.Table
    by_position: bool = False

    @property
    def rows(self) -> int:
        return int(self.table.num_rows)

    def commit(self, entry: LedgerEntry) -> int | None:
        def write(handle: DeltaTable, properties: CommitProperties) -> None:
            if not self.rows:
                return
            does = merge_clauses(self.sink, self.table.column_names, by_position=self.by_position)
            values = {f"`{c}`": f"s.`{c}`" for c in self.table.column_names if c not in FLAGS}
            merge = handle.merge(
                self.table,
                predicate=_same_key(self.sink),
                source_alias="s",
                target_alias="t",
                writer_properties=column_bounds.writer_properties(self.sink.schema),
                commit_properties=properties,
            )
            if does.delete is not None:
                merge = merge.when_matched_delete(does.delete)
            merge = merge.when_matched_update(values, does.update).when_not_matched_insert(values, does.insert)
            with self.writing():
                merge.execute()

        return self.sink.commit(entry, write)


@dataclass
class CommittedBefore(DeltaWrite):
    """Rows of a batch that an earlier attempt has committed: their number is known, and nothing is written."""

    count: int

    @property
    def rows(self) -> int:
        return self.count

    def commit(self, entry: LedgerEntry) -> None:
        """Have the earlier commit on disk; raises LedgerConflict if the table has lost the batch."""
        if not self.sink.holds(entry):
            raise LedgerConflict(
                f"table {self.sink.name} had {entry.txn} when the batch was computed, and is at {self.sink.position}",
                "look for a second driver with another state folder on the same tables",
            )
        self.sink.sync()


@dataclass
class SparkAppend(DeltaWrite):
    """Rows of a frame, appended by delta-spark; `cached` is freed with the write."""

    committer: ClassVar[Committer] = "spark"
    frame: DataFrame
    count: int
    cached: DataFrame | None = None

    @property
    def rows(self) -> int:
        return self.count

    def commit(self, entry: LedgerEntry) -> int | None:
        def append() -> None:
            with self.writing():
                _spark_append(self.sink, self.frame, entry)

        return _spark_commit(self.sink, entry, append)

    def close(self) -> None:
        if self.cached is not None:
            self.cached.unpersist()


@dataclass
class SparkMerge(SparkAppend):
    """A frame with one row per key, merged by delta-spark."""

    by_position: bool = False

    def commit(self, entry: LedgerEntry) -> int | None:
        return _spark_commit(self.sink, entry, lambda: self._merge(entry), lambda: self._append_nothing(entry))

    def _append_nothing(self, entry: LedgerEntry) -> None:
        columns = [c for c in self.frame.columns if c not in FLAGS]
        _spark_append(self.sink, self.frame.select(*(f"`{c}`" for c in columns)).limit(0), entry)

    def _merge(self, entry: LedgerEntry) -> None:
        from delta.tables import DeltaTable as SparkDeltaTable

        session = self.frame.sparkSession
        does = merge_clauses(self.sink, self.frame.columns, by_position=self.by_position)
        values: dict[str, str | Column] = {f"`{c}`": f"s.`{c}`" for c in self.frame.columns if c not in FLAGS}
        table = SparkDeltaTable.forPath(session, str(self.sink.path)).alias("t")
        merge = table.merge(self.frame.alias("s"), _same_key(self.sink))
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
            with self.writing():
                merge.execute()
        finally:
            for key in confs:
                session.conf.unset(key)


def _same_key(sink: DeltaSink) -> str:
    return " AND ".join(f"t.`{key}` = s.`{key}`" for key in sink.declared.keys)


def merge_clauses(sink: DeltaSink, columns: Sequence[str], *, by_position: bool) -> Clauses:
    return clauses(order_of(sink.schema, sink.declared.order_by, by_position=by_position), columns)


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
            sink.update()
        if sink.position == entry.txn:
            return sink.committed()
        if sink.position != at:
            break
    if (now := sink.position) is not None and now.generation > entry.generation:
        raise sink.fenced(now, entry)
    sink.check_epoch()
    raise LedgerConflict(
        f"delta-spark left table {sink.name} at {now} when it should have written {entry.txn}",
        "look for a second driver with another state folder on the same tables",
    )
