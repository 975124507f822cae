"""The six ways of a batch's rows into a table, each in two steps: prepare (nothing visible), then commit.

| class          | rows travel                    | committed by | for                                        |
|----------------|--------------------------------|--------------|--------------------------------------------|
| ArrowAppend    | through the driver (`toArrow`) | the driver   | appends that fit the driver                |
| ParquetAppend  | executors write Parquet        | the driver   | large appends                              |
| ArrowMerge     | through the driver             | deltalake    | upserts that fit the driver                |
| SparkAppend    | executors, delta-spark         | delta-spark  | appends to tables outside our profile      |
| SparkMerge     | executors, delta-spark         | delta-spark  | large upserts, and such tables             |
| ParquetMerge   | executors rewrite files        | deltalake    | large upserts into tables on a store       |

Where `DeltaSink.appends` is false, deltalake commits appends too: to tables with partitions and on stores, for example.

Preparing runs the stream's plan, once, and divides the rows by `row_engine.py`. So bad records are counted in the same
pass and written out before the primary table commits. All six write the same ledger entry.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DoubleType, FloatType

from streaming_jobs.declare.rules import NO_RULES, RowRules
from streaming_jobs.errors import CommitImpossible, RuleBroken
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.platform.collected import to_arrow
from streaming_jobs.sinks.base import PendingWrite
from streaming_jobs.sinks.delta.executor_merge import ParquetMerge, partition_text, written_files
from streaming_jobs.sinks.delta.fitting import has_place
from streaming_jobs.sinks.delta.parquet import checked_actions
from streaming_jobs.sinks.delta.pending_writes import (
    ArrowAppend,
    ArrowMerge,
    CommittedBefore,
    ParquetAppend,
    SparkAppend,
    SparkMerge,
)
from streaming_jobs.sinks.delta.remembered_deletes import RememberedDeletes, notes
from streaming_jobs.sinks.delta.row_engine import (
    FAILING,
    KIND_COLUMN,
    NOTED,
    PARTITION_COLUMN,
    QUARANTINED,
    REJECTED,
    TALLY,
    TALLY_COLUMN,
    WRITTEN,
    Divided,
    Files,
    RowEngine,
    RowTask,
    TaskTally,
    told_schema,
)
from streaming_jobs.sinks.delta.upsert_order import DELETE_COLUMN, FLAGS, ROW_COLUMN, order_of
from streaming_jobs.storage.locations import Location, StorePath, folders_beginning, remove_tree

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from streaming_jobs.sinks.delta.sink import DeltaSink

_TASKS_PER_CORE = 4
"""Tasks that divide the keys of an upsert: a task holds all its rows in the memory of a Python process."""


def prepare_write(
    sink: DeltaSink,
    rows: DataFrame,
    *,
    driver: bool,
    spark_commits: bool,
    batch: tuple[int, int],
    topics: Sequence[str] = (),
    deletes_table: DeltaSink | None = None,
    rules: RowRules = NO_RULES,
    quarantine: DeltaSink | None = None,
) -> PendingWrite:
    """Compute the rows for the table; `rows` is a frame as `fitted` makes it.

    Raises RuleBroken, OutputMismatch, and CommitImpossible for a table on a store that delta-spark had to commit to.

    `driver`: through the driver's memory. `spark_commits`: delta-spark makes the commit (then rows never pass
    the driver). `batch` is (generation, batch id), for the names of files. `topics` are the stream's, for positions;
    `deletes_table` remembers the table's deletes, `quarantine` takes the rows that its rules set aside.
    """
    if spark_commits and isinstance(sink.path, StorePath):
        raise not_by_spark(sink.name)
    order = order_of(sink.schema, sink.declared.order_by, by_position=has_place(rows))
    remembered = None if deletes_table is None else remembered_in(deletes_table)
    engine = RowEngine(sink.declared, sink.schema, order, rules, batch, tuple(topics), remembered)
    preparation = Preparation(sink, engine, quarantine, deletes_table)
    if driver and not spark_commits:
        return preparation.in_memory(to_arrow(rows))
    return preparation.by_spark(rows) if spark_commits or engine.upserts else preparation.in_files(rows)


def not_by_spark(table: str) -> CommitImpossible:
    """The error for a table on an object store that only delta-spark could commit to."""
    return CommitImpossible(
        f"table {table} is on an object store and would need delta-spark to commit, which overwrites commits of others "
        "there",
        'set stream.committer = "auto", and keep the table free of constraints and of other features',
    )


def remembered_in(deletes_table: DeltaSink) -> RememberedDeletes:
    """The version of remembered deletes that the open table has loaded."""
    handle, keys = deletes_table.handle, tuple(deletes_table.declared.keys)
    return RememberedDeletes(deletes_table.path, int(handle.version()), keys, deletes_table.bounded, handle)


@dataclass(frozen=True)
class Preparation:
    """One batch for one table, with the open companions of the table."""

    sink: DeltaSink
    engine: RowEngine
    quarantine: DeltaSink | None = None
    deletes_table: DeltaSink | None = None

    def in_memory(self, rows: pa.Table) -> ArrowAppend | ArrowMerge:
        made = self.engine.divide(rows)
        outcome = self.engine.outcome(made.numbers, made.dropped, made.failing)
        before: list[PendingWrite] = [*self._noted(made.noted)]
        if made.quarantined is not None:
            assert self.quarantine is not None
            before.append(ArrowAppend(self.quarantine, self.engine.aside(made.quarantined)))
        if not self.engine.upserts:
            return ArrowAppend(self.sink, made.written, rejected=made.rejected, before=before, outcome=outcome)
        return ArrowMerge(
            self.sink,
            made.written,
            self.engine.order.by_position,
            rejected=made.rejected,
            before=before,
            outcome=outcome,
        )

    def in_files(self, rows: DataFrame) -> ParquetAppend:
        """Rows of an append that executors write to files, in one pass."""
        values = {f"{PARTITION_COLUMN}{n}": partition_text(c) for n, c in enumerate(self.sink.declared.partition_by)}
        marked = self._marked(rows).withColumns(values).sortWithinPartitions(*values) if values else self._marked(rows)
        files, aside = self._files(self.sink), None
        if self.quarantine is not None and not self._has_batch(self.quarantine):
            aside = self._files(self.quarantine)
        task = partial(RowTask(self.engine).written_to_files, files, aside)
        told = marked.mapInArrow(task, told_schema(marked.schema)).toArrow()
        tally, rest = _tallied(told)
        try:
            outcome = self.engine.outcome(tally.numbers, tally.dropped, rest.failing)
        except RuleBroken:
            for written in (files, aside):
                if written is not None:
                    remove_tree(written.folder)
            raise
        before: list[PendingWrite] = []
        if tally.aside:
            assert self.quarantine is not None
            before.append(
                CommittedBefore(self.quarantine, tally.aside)
                if aside is None
                else _append_of(self.quarantine, tally.aside_files, tally.aside)
            )
        began = time.monotonic()
        made = _append_of(self.sink, tally.files, tally.written)
        made.rejected, made.before, made.outcome = self._returned(rest), before, outcome
        made.write_s = tally.write_s / max(tally.tasks, 1) + time.monotonic() - began
        return made

    def by_spark(self, rows: DataFrame) -> SparkAppend | ParquetMerge:
        """Rows on the executors, computed once, that delta-spark commits; of an upsert on a store, deltalake."""
        if self.engine.upserts:  # numbered first: of rows of equal order the later one wins
            rows = rows.withColumn(ROW_COLUMN, F.monotonically_increasing_id())
        marked = self._marked(rows)
        if self.engine.upserts:
            marked = _together(marked, self.sink.declared.keys)
        task = RowTask(self.engine)
        cached = marked.mapInArrow(task.yielded, told_schema(marked.schema)).persist()
        try:
            tally, rest = _tallied(cached.where(F.col(KIND_COLUMN).isin(REJECTED, NOTED, FAILING, TALLY)).toArrow())
            outcome = self.engine.outcome(tally.numbers, tally.dropped, rest.failing)
            before: list[PendingWrite] = [*self._noted(rest.noted)]
            if tally.aside:
                assert self.quarantine is not None
                before.append(self._aside(task, cached, tally.aside))
            flags = FLAGS if DELETE_COLUMN in rows.columns and self.engine.order.columns else (DELETE_COLUMN,)
            columns = [*self.sink.schema.fieldNames(), *(flag for flag in flags if flag in cached.columns)]
            written = cached.where(F.col(KIND_COLUMN) == WRITTEN).select(*(f"`{column}`" for column in columns))
            if self.engine.upserts:
                written = written.coalesce(_cores(rows))  # a task of the merge writes a file
            if isinstance(self.sink.path, StorePath):
                write: SparkAppend | ParquetMerge = ParquetMerge(
                    self.sink, written, tally.written, cached, self._files(self.sink)
                )
            else:
                write = (SparkMerge if self.engine.upserts else SparkAppend)(self.sink, written, tally.written, cached)
            write.rejected, write.before, write.outcome = self._returned(rest), before, outcome
            if isinstance(write, SparkMerge | ParquetMerge):
                write.by_position = self.engine.order.by_position
            return write
        except BaseException:
            cached.unpersist()
            raise

    def _aside(self, task: RowTask, cached: DataFrame, count: int) -> PendingWrite:
        """The quarantined rows among those that tasks have divided."""
        assert self.quarantine is not None
        if self._has_batch(self.quarantine):
            return CommittedBefore(self.quarantine, count)
        columns = to_arrow_schema(self.quarantine.schema, timezone="UTC")
        quarantined = cached.where(F.col(KIND_COLUMN) == QUARANTINED)
        rows = quarantined.mapInArrow(partial(task.aside, columns), self.quarantine.schema)
        if isinstance(self.quarantine.path, StorePath):
            return ParquetAppend(self.quarantine, *written_files(rows, self.quarantine, self._files(self.quarantine)))
        return SparkAppend(self.quarantine, rows, count)

    def _marked(self, rows: DataFrame) -> DataFrame:
        """The rows, with those marked that break a rule on the rows of a batch together."""
        for bit, rule in self.engine.rules.unique:
            task = partial(RowTask(self.engine).marked, rule.columns, bit)
            rows = _together(rows, rule.columns).mapInArrow(task, rows.schema)
        return rows

    def _files(self, sink: DeltaSink) -> Files:
        """New files of the batch; files of failed attempts are removed."""
        generation, number = self.engine.batch
        folder = sink.path / f"g{generation:04d}"
        _remove_leftovers(sink, folder, f"b{number:09d}-")
        return Files(sink.path, folder / f"b{number:09d}-{uuid.uuid4().hex[:8]}")

    def _has_batch(self, quarantine: DeltaSink) -> bool:
        """True if an earlier attempt has committed the batch's quarantined rows: new files would be in no version."""
        quarantine.update()
        return (at := quarantine.position) is not None and at >= Txn(*self.engine.batch)

    def _noted(self, noted: pa.Table | None) -> list[ArrowMerge]:
        if noted is None:
            return []
        assert self.deletes_table is not None
        order = self.engine.order
        return [ArrowMerge(self.deletes_table, notes(noted, self.sink.declared.keys, order), order.by_position)]

    def _returned(self, told: Divided) -> pa.Table | None:
        return None if told.rejected is None else self.engine.returned(told.rejected)


def _append_of(sink: DeltaSink, written: Iterable[str], expected: int) -> ParquetAppend:
    """The append of files; raises PermanentError if the driver does not see all their rows."""
    partition_by = list(sink.declared.partition_by)
    return ParquetAppend(sink, *checked_actions(sink.path, written, partition_by, sink.bounded, expected))


def _remove_leftovers(sink: DeltaSink, folder: Location, prefix: str) -> None:
    """Remove the files of attempts that died before their commit; a folder with a live file is not one of them."""
    attempts = folders_beginning(folder, prefix)
    if not attempts:
        return
    sink.check_epoch()
    live = {tuple(path.split("/")[:2]) for path in sink.handle.get_add_actions()["path"].to_pylist()}
    for attempt in attempts:
        if (folder.name, attempt.name) not in live:
            remove_tree(attempt)  # a writer may outlive its killed JVM by moments


def _tallied(told: pa.Table) -> tuple[TaskTally, Divided]:
    """The sum of what the tasks have counted, and the rows that they yielded besides those to be written."""
    tally = TaskTally(tasks=0)
    for task in told.filter(pc.equal(told[KIND_COLUMN], TALLY))[TALLY_COLUMN].to_pylist():
        tally.plus(json.loads(task))

    def of_kind(kind: int) -> pa.Table | None:
        rows = told.filter(pc.equal(told[KIND_COLUMN], kind))
        return rows if rows.num_rows else None

    return tally, Divided(told.slice(0, 0), of_kind(REJECTED), noted=of_kind(NOTED), failing=of_kind(FAILING))


def _together(rows: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The rows in tasks that each have all rows with equal values in these columns."""
    return rows.repartition(_cores(rows) * _TASKS_PER_CORE, *(_normal(rows, column) for column in columns))


def _cores(rows: DataFrame) -> int:
    return int(rows.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)


def _normal(rows: DataFrame, name: str) -> Column:
    """A value whose equals have the same hash: -0.0 is 0.0."""
    floating = isinstance(rows.schema[name].dataType, (DoubleType, FloatType))
    return F.col(f"`{name}`") + F.lit(0.0) if floating else F.col(f"`{name}`")
