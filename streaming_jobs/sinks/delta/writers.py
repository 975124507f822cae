"""The five ways of a batch's rows into a table, each in two steps: prepare (nothing visible), then commit.

| class          | rows travel                    | committed by | for                                        |
|----------------|--------------------------------|--------------|--------------------------------------------|
| ArrowAppend    | through the driver (`toArrow`) | deltalake    | appends that fit the driver                |
| ParquetAppend  | executors write Parquet        | deltalake    | large appends                              |
| ArrowMerge     | through the driver             | deltalake    | upserts that fit the driver                |
| SparkAppend    | executors, delta-spark         | delta-spark  | appends to tables outside our profile      |
| SparkMerge     | executors, delta-spark         | delta-spark  | large upserts, and such tables             |

Preparing runs the stream's plan, once. So bad records are counted in the same pass and written out before the primary
table commits. All five write the same ledger entry.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.transaction import AddAction
from pyspark.sql import Observation
from pyspark.sql import functions as F

from streaming_jobs.ledger import LedgerEntry
from streaming_jobs.sinks.base import Committer, PendingWrite
from streaming_jobs.sinks.delta import column_bounds, refused_rows, upsert_order_frames
from streaming_jobs.sinks.delta import remembered_deletes as deletes
from streaming_jobs.sinks.delta.fitting import ORDER, PLACE, as_returned, has_place, named, without_place
from streaming_jobs.sinks.delta.parquet import add_actions
from streaming_jobs.sinks.delta.refused_rows import REASON_COLUMN
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.spark_writers import SparkAppend, SparkMerge
from streaming_jobs.sinks.delta.upsert_order import (
    FLAGS,
    ROW_COLUMN,
    clauses,
    last_events,
    order_of,
)
from streaming_jobs.sinks.delta.upsert_rows import last_per_key, split_null_keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass
class ArrowAppend:
    """Rows in the driver's memory, appended by deltalake."""

    committer: ClassVar[Committer] = "direct"
    sink: DeltaSink
    table: pa.Table
    null_keys: pa.Table | None = None
    deletes: ClassVar[None] = None

    @property
    def rows(self) -> int:
        """The number of prepared rows."""
        return int(self.table.num_rows)

    def commit(self, entry: LedgerEntry) -> int | None:
        """Make the rows visible once, with the entry."""

        def write(handle: DeltaTable, properties: CommitProperties) -> None:
            if self.rows:
                written = column_bounds.writer_properties(self.sink.schema)
                write_deltalake(
                    handle, self.table, mode="append", writer_properties=written, commit_properties=properties
                )

        return self.sink.commit(entry, write)

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class ParquetAppend:
    """Parquet files below the table's folder that no version lists yet, committed by deltalake."""

    committer: ClassVar[Committer] = "direct"
    sink: DeltaSink
    actions: Sequence[AddAction]
    rows: int
    null_keys: pa.Table | None = None
    deletes: ClassVar[None] = None

    def commit(self, entry: LedgerEntry) -> int | None:
        """Make the rows visible once, with the entry."""
        return self.sink.commit(entry, lambda _, properties: self.sink.commit_actions(list(self.actions), properties))

    def close(self) -> None:
        """Nothing is held; the next attempt of the batch removes files that were not committed."""


@dataclass
class ArrowMerge:
    """Rows in the driver's memory, one per key, merged by deltalake."""

    committer: ClassVar[Committer] = "direct"
    sink: DeltaSink
    table: pa.Table
    null_keys: pa.Table | None
    by_position: bool = False
    deletes: PendingWrite | None = None

    @property
    def rows(self) -> int:
        """The number of prepared rows."""
        return int(self.table.num_rows)

    def commit(self, entry: LedgerEntry) -> int | None:
        """Make the rows visible once, with the entry."""

        def write(handle: DeltaTable, properties: CommitProperties) -> None:
            if not self.rows:
                return
            order = order_of(self.sink.schema, self.sink.declared.order_by, by_position=self.by_position)
            does = clauses(order, self.table.column_names)
            values = {f"`{c}`": f"s.`{c}`" for c in self.table.column_names if c not in FLAGS}
            merge = handle.merge(
                self.table,
                predicate=" AND ".join(f"t.`{k}` = s.`{k}`" for k in self.sink.declared.keys),
                source_alias="s",
                target_alias="t",
                writer_properties=column_bounds.writer_properties(self.sink.schema),
                commit_properties=properties,
            )
            if does.delete is not None:
                merge = merge.when_matched_delete(does.delete)
            merge.when_matched_update(values, does.update).when_not_matched_insert(values, does.insert).execute()

        return self.sink.commit(entry, write)

    def close(self) -> None:
        """Nothing is held."""


def prepare_write(
    sink: DeltaSink,
    rows: DataFrame,
    *,
    driver: bool,
    spark_commits: bool,
    batch: tuple[int, int],
    topics: Sequence[str] = (),
    delete_table: DeltaSink | None = None,
) -> PendingWrite:
    """Compute the rows for the table; `rows` is a frame as `fitted` makes it.

    `driver`: through the driver's memory. `spark_commits`: delta-spark makes the commit (then rows never pass
    the driver). `batch` is (generation, batch id), for the names of files. `topics` are the stream's, for positions;
    `delete_table` remembers the table's deletes.
    """
    if sink.declared.mode == "append":
        if spark_commits:
            return _spark_rows(sink, rows, topics)
        if driver:
            fine, unheld = refused_rows.split(sink.declared, sink.schema, rows.toArrow())
            return ArrowAppend(sink, without_place(fine), named(unheld, topics))
        return _parquet(sink, rows, batch, topics)
    if driver and not spark_commits:
        return merged(sink, rows.toArrow(), delete_table, by_position=has_place(rows))
    return _spark_merge(sink, rows, delete_table, by_position=has_place(rows))


def merged(sink: DeltaSink, rows: pa.Table, delete_table: DeltaSink | None = None, *, by_position: bool) -> ArrowMerge:
    """Prepare an upsert of rows in the driver's memory: refused rows set aside, one event per key."""
    keys = sink.declared.keys
    rows, unheld = refused_rows.split(sink.declared, sink.schema, rows)
    table, null_keys = split_null_keys(rows, keys)
    if unheld.num_rows:
        null_keys = pa.concat_tables([unheld, refused_rows.with_bytes(null_keys)], promote_options="default")
    order = order_of(sink.schema, sink.declared.order_by, by_position=by_position)
    noted = None
    if order.columns:
        unique = last_events(table, keys, order)
        if delete_table is not None:
            unique, notes = deletes.split(unique, delete_table, order)
            noted = ArrowMerge(delete_table, notes, None, order.by_position)
    else:
        unique = last_per_key(table, keys, [c for c in ORDER if c in table.column_names])
    unique = unique.drop_columns([c for c in PLACE if c in unique.column_names])
    return ArrowMerge(sink, unique, as_returned(sink, null_keys), order.by_position, noted)


def _parquet(sink: DeltaSink, rows: DataFrame, batch: tuple[int, int], topics: Sequence[str] = ()) -> ParquetAppend:
    generation, number = batch
    folder = sink.path / f"g{generation:04d}"
    _remove_leftovers(sink, folder, f"b{number:09d}-")
    target = folder / f"b{number:09d}-{uuid.uuid4().hex[:8]}"
    partition_by = list(sink.declared.partition_by)
    unheld = _write_parquet(sink, rows, target)
    for marker in (target / "_SUCCESS", target / "._SUCCESS.crc"):
        marker.unlink(missing_ok=True)
    actions, count = add_actions(sink.path, target, partition_by, sink.bounded)
    return ParquetAppend(sink, actions, count, None if unheld is None else named(unheld, topics))


def _remove_leftovers(sink: DeltaSink, folder: Path, prefix: str) -> None:
    """Remove the files of attempts that died before their commit; a folder with a live file is not one of them."""
    if not (attempts := list(folder.glob(f"{prefix}*"))):
        return
    sink.refresh()
    live = {tuple(path.split("/")[:2]) for path in sink.handle.get_add_actions()["path"].to_pylist()}
    for attempt in attempts:
        if (folder.name, attempt.name) not in live:
            shutil.rmtree(attempt)


def _write_parquet(sink: DeltaSink, rows: DataFrame, target: Path) -> pa.Table | None:
    """Write the rows, and count those that the table cannot hold; if there are any, write again without them.

    In the first pass such a row is written to the partition of nulls, because its value may not be a folder's name.
    Only the second pass carries the places of the rows.
    """
    partition_by, reason = list(sink.declared.partition_by), refused_rows.reason(sink.declared, sink.schema)
    plain = rows.drop(*PLACE)
    if reason is None:
        plain.write.partitionBy(*partition_by).parquet(str(target))
        return None
    counted = Observation()
    first = plain.withColumn(REASON_COLUMN, reason).observe(counted, F.count(REASON_COLUMN).alias("unheld"))
    fine = F.col(REASON_COLUMN).isNull()
    for column in partition_by:
        first = first.withColumn(column, F.when(fine, F.col(f"`{column}`")))
    first.drop(REASON_COLUMN).write.partitionBy(*partition_by).parquet(str(target))
    if not counted.get["unheld"]:
        return None
    shutil.rmtree(target)
    cached = rows.withColumn(REASON_COLUMN, reason).persist()
    try:
        cached.where(fine).drop(REASON_COLUMN, *PLACE).write.partitionBy(*partition_by).parquet(str(target))
        return cached.where(~fine).toArrow()
    finally:
        cached.unpersist()


def _spark_rows(sink: DeltaSink, rows: DataFrame, topics: Sequence[str]) -> SparkAppend:
    reason = refused_rows.reason(sink.declared, sink.schema)
    judged = rows.withColumn(REASON_COLUMN, F.lit(None).cast("string") if reason is None else reason)
    bad = F.col(REASON_COLUMN).isNotNull()
    judged = judged.withColumns({c: F.when(bad, F.col(c)) for c in PLACE if c in rows.columns}).persist()
    try:
        fine = judged.where(~bad).drop(REASON_COLUMN, *PLACE)
        return SparkAppend(sink, fine, judged, fine.count(), named(judged.where(bad).toArrow(), topics))
    except BaseException:
        judged.unpersist()
        raise


def _spark_merge(sink: DeltaSink, rows: DataFrame, delete_table: DeltaSink | None, *, by_position: bool) -> SparkMerge:
    keys = sink.declared.keys
    order = order_of(sink.schema, sink.declared.order_by, by_position=by_position)
    with ExitStack() as held:
        reason = refused_rows.reason(sink.declared, sink.schema)
        judged = rows if reason is None else rows.withColumn(REASON_COLUMN, reason)
        cached = [judged.withColumn(ROW_COLUMN, F.monotonically_increasing_id()).persist()]
        held.callback(lambda: [frame.unpersist() for frame in cached])
        no_key = F.lit(False) if reason is None else F.col(REASON_COLUMN).isNotNull()
        for key in keys:
            no_key = no_key | F.col(f"`{key}`").isNull()
        null_keys = cached[0].where(no_key).drop(ROW_COLUMN).toArrow()
        whole, noted = cached[0].where(~no_key).drop(REASON_COLUMN), None
        if order.columns:
            unique = upsert_order_frames.last_events(whole, keys, order)
            if delete_table is not None:
                cached.append(upsert_order_frames.beside(unique, delete_table, order).persist())
                unique, notes = upsert_order_frames.split(cached[1], delete_table, order)
                noted = ArrowMerge(delete_table, notes, None, order.by_position)
            count = unique.count()
        else:
            unique, count = upsert_order_frames.last_per_key(whole, sink, [c for c in ORDER if c in rows.columns])
        made = SparkMerge(
            sink, unique.drop(*PLACE), cached, count, as_returned(sink, null_keys), order.by_position, noted
        )
        held.pop_all()
        return made
