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
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import Observation
from pyspark.sql import functions as F

from streaming_jobs.declare.columns import REASON_COLUMN
from streaming_jobs.errors import PermanentError
from streaming_jobs.sinks.base import PendingWrite
from streaming_jobs.sinks.delta import refused_rows, upsert_order_frames
from streaming_jobs.sinks.delta import remembered_deletes as deletes
from streaming_jobs.sinks.delta.direct_writers import ArrowAppend, ArrowMerge, ParquetAppend
from streaming_jobs.sinks.delta.fitting import ORDER, PLACE, as_returned, has_place, named, without_place
from streaming_jobs.sinks.delta.judging import Judging
from streaming_jobs.sinks.delta.parquet import add_actions
from streaming_jobs.sinks.delta.quarantine import NO_JUDGE, Judge
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.spark_writers import SparkAppend, SparkMerge
from streaming_jobs.sinks.delta.upsert_order import ROW_COLUMN, last_events, order_of
from streaming_jobs.sinks.delta.upsert_rows import last_per_key, split_null_keys
from streaming_jobs.sinks.row_rules import BROKEN_COLUMN, NOTHING_BROKEN, Judged
from streaming_jobs.text.spelling import counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def prepare_write(
    sink: DeltaSink,
    rows: DataFrame,
    *,
    driver: bool,
    spark_commits: bool,
    batch: tuple[int, int],
    topics: Sequence[str] = (),
    delete_table: DeltaSink | None = None,
    judge: Judge = NO_JUDGE,
) -> PendingWrite:
    """Compute the rows for the table; `rows` is a frame as `fitted` makes it.

    `driver`: through the driver's memory. `spark_commits`: delta-spark makes the commit (then rows never pass
    the driver). `batch` is (generation, batch id), for the names of files. `topics` are the stream's, for positions;
    `delete_table` remembers the table's deletes; `judge` has its row rules.
    """
    judging = Judging(sink, judge, batch, topics)
    if sink.declared.mode == "append":
        if spark_commits:
            return _spark_rows(judging, rows)
        if driver:
            fine, unheld = refused_rows.split(sink.declared, sink.schema, rows.toArrow())
            written, judged = judging.split(fine)
            return ArrowAppend(sink, without_place(written), named(_without_verdict(unheld), topics), judged)
        return _parquet(judging, rows)
    if driver and not spark_commits:
        return merged(sink, rows.toArrow(), delete_table, by_position=has_place(rows), judging=judging)
    return _spark_merge(judging, rows, delete_table, by_position=has_place(rows))


def merged(
    sink: DeltaSink,
    rows: pa.Table,
    delete_table: DeltaSink | None = None,
    *,
    by_position: bool,
    judging: Judging | None = None,
) -> ArrowMerge:
    """Prepare an upsert of rows in the driver's memory: refused rows set aside, one event per key."""
    keys = sink.declared.keys
    rows, unheld = refused_rows.split(sink.declared, sink.schema, rows)
    table, null_keys = split_null_keys(rows, keys)
    if unheld.num_rows:
        null_keys = pa.concat_tables([unheld, refused_rows.with_bytes(null_keys)], promote_options="default")
    table, judged = (table, NOTHING_BROKEN) if judging is None else judging.split(table)
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
    null_keys = _without_verdict(null_keys)
    return ArrowMerge(sink, unique, as_returned(sink, null_keys), order.by_position, noted, judged)


def _without_verdict(rows: pa.Table) -> pa.Table:
    return rows.drop_columns([name for name in rows.column_names if name == BROKEN_COLUMN])


def _parquet(judging: Judging, rows: DataFrame) -> ParquetAppend:
    sink, (generation, number) = judging.sink, judging.batch
    folder = sink.path / f"g{generation:04d}"
    _remove_leftovers(sink, folder, f"b{number:09d}-")
    target = folder / f"b{number:09d}-{uuid.uuid4().hex[:8]}"
    partition_by = list(sink.declared.partition_by)
    unheld, judged, expected = _write_parquet(judging, rows, target)
    for marker in (target / "_SUCCESS", target / "._SUCCESS.crc"):
        marker.unlink(missing_ok=True)
    actions, count = add_actions(sink.path, target, partition_by, sink.bounded)
    if count != expected:
        raise PermanentError(
            f"the executors wrote {counted(expected, 'row')} for table {sink.name}, and the files in {target} have "
            f"{count:,} as the driver sees them",
            "let the driver and all executors see one file system: they share the folders of tables and of state",
        )
    return ParquetAppend(sink, actions, count, None if unheld is None else named(unheld, judging.topics), judged)


def _remove_leftovers(sink: DeltaSink, folder: Path, prefix: str) -> None:
    """Remove the files of attempts that died before their commit; a folder with a live file is not one of them."""
    if not (attempts := list(folder.glob(f"{prefix}*"))):
        return
    sink.refresh()
    live = {tuple(path.split("/")[:2]) for path in sink.handle.get_add_actions()["path"].to_pylist()}
    for attempt in attempts:
        if (folder.name, attempt.name) not in live:
            shutil.rmtree(attempt)


def _write_parquet(judging: Judging, rows: DataFrame, target: Path) -> tuple[pa.Table | None, Judged, int]:
    """Write the rows, and count those that the table cannot hold or rules take out; if any, write again without them.

    The last value is the number of rows that the executors have given to the files.

    In the first pass such a row is written to the partition of nulls, because its value may not be a folder's name.
    Only the second pass carries the places of the rows.
    """
    sink = judging.sink
    partition_by, reason = list(sink.declared.partition_by), refused_rows.reason(sink.declared, sink.schema)
    if reason is None and not judging.judges(rows):
        return None, NOTHING_BROKEN, _write_counted(rows.drop(*PLACE), partition_by, target)
    observed = Observation()
    whole = judging.verdicts(rows.withColumn(REASON_COLUMN, F.lit(None).cast("string") if reason is None else reason))
    first = whole.drop(*PLACE).observe(observed, F.count(REASON_COLUMN).alias("unheld"), *judging.counts(whole))
    fine = F.col(REASON_COLUMN).isNull()
    for column in partition_by:
        first = first.withColumn(column, F.when(fine, F.col(f"`{column}`")))
    number = _write_counted(first.drop(REASON_COLUMN, BROKEN_COLUMN), partition_by, target)
    found = observed.get
    if not found["unheld"] and not judging.takes_out(found):
        return None, judging.only_counted(found), number
    shutil.rmtree(target)
    cached = whole.persist()
    try:
        if judging.judges(rows):  # a function of the user's may have made other rows this time
            found = cached.agg(F.count(REASON_COLUMN).alias("unheld"), *judging.counts(cached)).collect()[0].asDict()
        judging.refuse(cached, found)
        written = judging.remaining(cached.where(fine)).drop(REASON_COLUMN, BROKEN_COLUMN, *PLACE)
        number = _write_counted(written, partition_by, target)
        judged = judging.judged(cached, found, lambda table, aside, _: _parquet(judging.without_rules(table), aside))
        return cached.where(~fine).drop(BROKEN_COLUMN).toArrow(), judged, number
    finally:
        cached.unpersist()


def _write_counted(rows: DataFrame, partition_by: list[str], target: Path) -> int:
    """Write Parquet files; returns the number of rows as the executors have counted them."""
    written = Observation()
    rows.observe(written, F.count(F.lit(1)).alias("rows")).write.partitionBy(*partition_by).parquet(str(target))
    return int(written.get.get("rows", 0))  # no metric: the plan was found to be empty


def _spark_rows(judging: Judging, rows: DataFrame) -> SparkAppend:
    sink = judging.sink
    reason = refused_rows.reason(sink.declared, sink.schema)
    whole = judging.verdicts(rows.withColumn(REASON_COLUMN, F.lit(None).cast("string") if reason is None else reason))
    bad = F.col(REASON_COLUMN).isNotNull()
    kept = bad if not judging.judges(rows) else bad | (F.col(BROKEN_COLUMN) != 0)
    whole = whole.withColumns({c: F.when(kept, F.col(c)) for c in PLACE if c in rows.columns}).persist()
    try:
        found = whole.agg(F.count_if(~bad).alias("fine"), *judging.counts(whole)).collect()[0].asDict()
        judging.refuse(whole, found)
        fine = judging.remaining(whole.where(~bad)).drop(REASON_COLUMN, BROKEN_COLUMN, *PLACE)
        unheld = named(whole.where(bad).drop(BROKEN_COLUMN).toArrow(), judging.topics)
        number = found["fine"] - judging.taken_out(found)
        return SparkAppend(sink, fine, whole, number, unheld, judging.judged(whole, found, _spark_aside))
    except BaseException:
        whole.unpersist()
        raise


def _spark_aside(sink: DeltaSink, rows: DataFrame, number: int) -> SparkAppend:
    """The write of quarantined rows beside a table that delta-spark commits to; the table's write holds their cache."""
    return SparkAppend(sink, rows, None, number)


def _spark_merge(judging: Judging, rows: DataFrame, delete_table: DeltaSink | None, *, by_position: bool) -> SparkMerge:
    sink, keys = judging.sink, judging.sink.declared.keys
    order = order_of(sink.schema, sink.declared.order_by, by_position=by_position)
    with ExitStack() as held:
        reason = refused_rows.reason(sink.declared, sink.schema)
        no_key = F.lit(False)
        for key in keys:
            no_key = no_key | F.col(f"`{key}`").isNull()
        null_key = F.when(no_key, F.lit("null_key"))
        judged_rows = judging.verdicts(
            rows.withColumn(REASON_COLUMN, null_key if reason is None else F.coalesce(reason, null_key))
        )
        cached = [judged_rows.withColumn(ROW_COLUMN, F.monotonically_increasing_id()).persist()]
        held.callback(lambda: [frame.unpersist() for frame in cached])
        refused = F.col(REASON_COLUMN).isNotNull()
        null_keys = cached[0].where(refused).drop(ROW_COLUMN, BROKEN_COLUMN).toArrow()
        judged = NOTHING_BROKEN
        if judging.judges(rows):
            found = cached[0].agg(*judging.counts(cached[0])).collect()[0].asDict()
            judging.refuse(cached[0], found)
            judged = judging.judged(cached[0], found, _spark_aside)
        whole, noted = judging.remaining(cached[0].where(~refused)).drop(REASON_COLUMN, BROKEN_COLUMN), None
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
            sink, unique.drop(*PLACE), cached, count, as_returned(sink, null_keys), order.by_position, noted, judged
        )
        held.pop_all()
        return made
