"""The four ways a batch's rows get into a table, each in two steps: stage (nothing visible), then commit.

| class          | rows travel                    | committed by | for                                        |
|----------------|--------------------------------|--------------|--------------------------------------------|
| ArrowAppend    | through the driver (`toArrow`) | deltalake    | appends that fit the driver                |
| ParquetAppend  | executors write Parquet        | deltalake    | large appends                              |
| ArrowMerge     | through the driver             | deltalake    | upserts that fit the driver                |
| SparkAppend    | executors, delta-spark         | delta-spark  | appends to tables outside our profile      |
| SparkMerge     | executors, delta-spark         | delta-spark  | large upserts, and such tables             |

Staging runs the stream's plan, once. That is why bad records can be counted on the way and written out before
the primary table commits. All of them leave the same ledger entry.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.transaction import AddAction
from pyspark.sql import functions as F

from streaming_jobs.errors import LedgerConflict, OutputMismatch
from streaming_jobs.ledger import LedgerEntry
from streaming_jobs.sinks.delta import DeltaSink
from streaming_jobs.sinks.parquet import add_actions
from streaming_jobs.sinks.rows import last_per_key, split_null_keys
from streaming_jobs.stream import SOURCE_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

DELETE_COLUMN = "__delete"
_ORDER = ("__partition", "__offset")
_PLACE = ("__topic", *_ORDER)


class Staged(Protocol):
    """Rows of one batch for one table, computed and not yet visible."""

    committer: ClassVar[Literal["direct", "spark"]]

    @property
    def rows(self) -> int:
        """How many rows are staged."""

    @property
    def null_keys(self) -> pa.Table | None:
        """Rows of an upsert with a null in a key: they are not written, they are dead letters."""

    def commit(self, entry: LedgerEntry) -> int | None:
        """Make them visible once, with the entry; the table's version, or None if the batch is in it already."""

    def close(self) -> None:
        """Free what staging holds."""


@dataclass
class ArrowAppend:
    """Rows in the driver's memory, appended by deltalake."""

    committer: ClassVar[Literal["direct", "spark"]] = "direct"
    sink: DeltaSink
    table: pa.Table
    null_keys: pa.Table | None = None

    @property
    def rows(self) -> int:
        """How many rows are staged."""
        return int(self.table.num_rows)

    def commit(self, entry: LedgerEntry) -> int | None:
        """Make the rows visible once, with the entry."""

        def write(handle: DeltaTable, properties: CommitProperties) -> None:
            if self.rows:
                write_deltalake(handle, self.table, mode="append", commit_properties=properties)

        return self.sink.commit(entry, write)

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class ParquetAppend:
    """Parquet files below the table's folder that no version lists yet, committed by deltalake."""

    committer: ClassVar[Literal["direct", "spark"]] = "direct"
    sink: DeltaSink
    actions: Sequence[AddAction]
    rows: int
    null_keys: pa.Table | None = None

    def commit(self, entry: LedgerEntry) -> int | None:
        """Make the rows visible once, with the entry."""
        return self.sink.commit(entry, lambda _, properties: self.sink.commit_actions(list(self.actions), properties))

    def close(self) -> None:
        """Nothing is held; files of a batch that was not committed go when the batch is tried again."""


@dataclass
class ArrowMerge:
    """Rows in the driver's memory, one a key, merged by deltalake."""

    committer: ClassVar[Literal["direct", "spark"]] = "direct"
    sink: DeltaSink
    table: pa.Table
    null_keys: pa.Table | None

    @property
    def rows(self) -> int:
        """How many rows are staged."""
        return int(self.table.num_rows)

    def commit(self, entry: LedgerEntry) -> int | None:
        """Make the rows visible once, with the entry."""

        def write(handle: DeltaTable, properties: CommitProperties) -> None:
            if not self.rows:
                return
            columns = [c for c in self.table.column_names if c != DELETE_COLUMN]
            values = {f"`{c}`": f"s.`{c}`" for c in columns}
            merge = handle.merge(
                self.table,
                predicate=" AND ".join(f"t.`{k}` = s.`{k}`" for k in self.sink.declared.keys),
                source_alias="s",
                target_alias="t",
                commit_properties=properties,
            )
            kept = None
            if DELETE_COLUMN in self.table.column_names:
                merge, kept = merge.when_matched_delete(f"s.`{DELETE_COLUMN}`"), f"NOT s.`{DELETE_COLUMN}`"
            merge.when_matched_update(values, kept).when_not_matched_insert(values, kept).execute()

        return self.sink.commit(entry, write)

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class SparkAppend:
    """A cached frame, appended by delta-spark."""

    committer: ClassVar[Literal["direct", "spark"]] = "spark"
    sink: DeltaSink
    frame: DataFrame
    rows: int
    null_keys: pa.Table | None = None

    def commit(self, entry: LedgerEntry) -> int | None:
        """Make the rows visible once, with the entry."""
        return _spark_commit(self.sink, entry, lambda: _spark_append(self.sink, self.frame, entry))

    def close(self) -> None:
        """Free the cached frame."""
        self.frame.unpersist()


@dataclass
class SparkMerge:
    """A cached frame with one row a key, merged by delta-spark."""

    committer: ClassVar[Literal["direct", "spark"]] = "spark"
    sink: DeltaSink
    frame: DataFrame
    cached: DataFrame
    rows: int
    null_keys: pa.Table | None

    def commit(self, entry: LedgerEntry) -> int | None:
        """Make the rows visible once, with the entry."""
        return _spark_commit(self.sink, entry, lambda: self._merge(entry), lambda: self._append_nothing(entry))

    def _append_nothing(self, entry: LedgerEntry) -> None:
        columns = [c for c in self.frame.columns if c != DELETE_COLUMN]
        _spark_append(self.sink, self.frame.select(*(f"`{c}`" for c in columns)).limit(0), entry)

    def _merge(self, entry: LedgerEntry) -> None:
        from delta.tables import DeltaTable as SparkDeltaTable

        session = self.frame.sparkSession
        columns = [c for c in self.frame.columns if c != DELETE_COLUMN]
        values: dict[str, str | Column] = {f"`{c}`": f"s.`{c}`" for c in columns}
        condition = " AND ".join(f"t.`{k}` = s.`{k}`" for k in self.sink.declared.keys)
        merge = SparkDeltaTable.forPath(session, str(self.sink.path)).alias("t").merge(self.frame.alias("s"), condition)
        kept = None
        if DELETE_COLUMN in self.frame.columns:
            merge, kept = merge.whenMatchedDelete(f"s.`{DELETE_COLUMN}`"), f"NOT s.`{DELETE_COLUMN}`"
        merge = merge.whenMatchedUpdate(kept, values).whenNotMatchedInsert(kept, values)  # type: ignore[arg-type]
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
        """Free the cached frame."""
        self.cached.unpersist()


def stage(sink: DeltaSink, frame: DataFrame, *, driver: bool, spark_commits: bool, batch: tuple[int, int]) -> Staged:
    """Compute the frame's rows for the table.

    `driver`: through the driver's memory. `spark_commits`: delta-spark makes the commit (then rows never pass
    the driver). `batch` is (generation, batch id), for the names of files.
    """
    rows = _fit(sink, frame)
    if sink.declared.mode == "append":
        if spark_commits:
            cached = rows.persist()
            return SparkAppend(sink, cached, cached.count())
        if driver:
            return ArrowAppend(sink, rows.toArrow())
        return _parquet(sink, rows, batch)
    if driver and not spark_commits:
        table, null_keys = split_null_keys(rows.toArrow(), sink.declared.keys)
        order = [c for c in (*sink.declared.order_by, *_ORDER) if c in table.column_names]
        unique = last_per_key(table, sink.declared.keys, order)
        return ArrowMerge(sink, unique.drop_columns([c for c in _PLACE if c in unique.column_names]), null_keys)
    return _spark_merge(sink, rows)


def _parquet(sink: DeltaSink, rows: DataFrame, batch: tuple[int, int]) -> ParquetAppend:
    generation, number = batch
    folder = sink.path / f"g{generation:04d}"
    for leftover in folder.glob(f"b{number:09d}-*"):  # of an attempt that died before its commit
        shutil.rmtree(leftover)
    target = folder / f"b{number:09d}-{uuid.uuid4().hex[:8]}"
    partition_by = list(sink.declared.partition_by)
    rows.write.partitionBy(*partition_by).parquet(str(target))
    for marker in (target / "_SUCCESS", target / "._SUCCESS.crc"):
        marker.unlink(missing_ok=True)
    actions, count = add_actions(sink.path, target, partition_by)
    return ParquetAppend(sink, actions, count)


def _spark_merge(sink: DeltaSink, rows: DataFrame) -> SparkMerge:
    keys, order = sink.declared.keys, [c for c in (*sink.declared.order_by, *_ORDER) if c in rows.columns]
    cached = rows.persist()
    try:
        no_key = F.lit(False)
        for key in keys:
            no_key = no_key | F.col(f"`{key}`").isNull()
        null_keys = cached.where(no_key).toArrow()
        unique = cached.where(~no_key)
        count, distinct = unique.count(), unique.select(*(f"`{k}`" for k in keys)).distinct().count()
        if count != distinct and not order:
            raise OutputMismatch(
                f"a batch has {count} rows for {distinct} keys of table {sink.name} and nothing says which are last",
                "set order_by on the sink, or keep the column _source in the stream's output",
            )
        if count != distinct:
            value = [F.col(f"`{c}`") for c in order]
            last = F.max_by(F.struct(*(F.col(f"`{c}`") for c in unique.columns)), F.struct(*value))
            unique = unique.groupBy(*(f"`{k}`" for k in keys)).agg(last.alias("__row")).select("__row.*")
        return SparkMerge(sink, unique.drop(*_PLACE), cached, distinct, null_keys)
    except BaseException:
        cached.unpersist()
        raise


def _fit(sink: DeltaSink, frame: DataFrame) -> DataFrame:
    """The table's columns in its order and types, plus what ordering and deleting need."""
    columns = [F.col(f"`{f.name}`").cast(f.dataType).alias(f.name) for f in sink.schema.fields]
    if sink.declared.mode == "upsert":
        if SOURCE_COLUMN in frame.columns:
            columns += [F.col(f"{SOURCE_COLUMN}.{name.strip('_')}").alias(name) for name in _PLACE]
        if sink.declared.delete_when:
            columns.append(F.coalesce(F.expr(sink.declared.delete_when), F.lit(False)).alias(DELETE_COLUMN))
    return frame.select(*columns)


def _spark_append(sink: DeltaSink, frame: DataFrame, entry: LedgerEntry) -> None:
    writer = frame.write.format("delta").mode("append").option("userMetadata", entry.encode())
    writer.option("txnAppId", sink.app_id).option("txnVersion", str(entry.txn.version)).save(str(sink.path))


def _spark_commit(
    sink: DeltaSink, entry: LedgerEntry, write: Callable[[], None], write_nothing: Callable[[], None] | None = None
) -> int | None:
    """Commit through delta-spark, which skips silently where deltalake's way raises: so look before and after.

    `write_nothing` commits the transaction alone, for a write that turned out to change nothing.
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
