"""What a batch's rows must satisfy before a Delta table takes them, defined once, on Arrow tables.

In this order: rows that the table cannot hold, and rows of an upsert without their key, are rejected
(`refused_rows.py`). Row rules count the others, drop some, set some aside, or stop the stream (`row_rules.py`). Of an
upsert, one event per key remains (`upsert_order.py`), unless a remembered delete is newer (`remembered_deletes.py`).

`RowEngine.divide` does it in the driver's memory. `RowTask` runs the same function in Spark's Python processes
(`mapInArrow`). It writes the rows to Parquet files itself, since rows that go back to the JVM take twice as long, or
yields them if delta-spark makes the commit. Besides, it yields what the driver has to know, told apart by `__kind`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import BooleanType, IntegerType, StringType, StructField, StructType

from streaming_jobs.declare.columns import REASON_COLUMN
from streaming_jobs.declare.rules import NO_RULES, RowRules
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.sinks import row_rules
from streaming_jobs.sinks.base import RuleOutcome
from streaming_jobs.sinks.delta import refused_rows
from streaming_jobs.sinks.delta.fitting import ORDER, PLACE, as_returned, named
from streaming_jobs.sinks.delta.parquet import partition_folder
from streaming_jobs.sinks.delta.upsert_order import (
    DELETE_COLUMN,
    RESET_COLUMN,
    ROW_COLUMN,
    EventOrder,
    last_events,
    last_per_key,
    split_null_keys,
)
from streaming_jobs.sinks.row_rules import BROKEN_COLUMN
from streaming_jobs.sinks.schemas import is_position
from streaming_jobs.storage.locations import Location, opened_for_writing, path_below

if TYPE_CHECKING:
    from streaming_jobs.sinks.delta.remembered_deletes import RememberedDeletes

KIND_COLUMN, TALLY_COLUMN, PARTITION_COLUMN = "__kind", "__tally", "__partition_value"
WRITTEN, REJECTED, QUARANTINED, NOTED, FAILING, TALLY = range(6)
_INDEX_COLUMN = "__index"
_ROW_GROUP, _ROW_GROUP_BYTES = 1 << 17, 64 << 20
"""Rows and bytes of a row group, which a task holds in memory."""


@dataclass(frozen=True)
class Divided:
    """Rows of a batch by what happens to them.

    `written` of an upsert still have their flags, `quarantined` rows the column `__broken`; `noted` are the events
    that change the table's remembered deletes. If `failing` rows stop the stream, nothing else is to be used.
    """

    written: pa.Table
    rejected: pa.Table | None = None
    quarantined: pa.Table | None = None
    noted: pa.Table | None = None
    failing: pa.Table | None = None
    numbers: Sequence[int] = ()
    """Rows by broken rule; empty if no row breaks any."""
    dropped: int = 0


@dataclass(frozen=True)
class RowEngine:
    """The rows of one batch for one table; picklable. `batch` is (generation, batch id), `topics` are the stream's."""

    declared: DeclaredTable
    schema: StructType
    order: EventOrder
    rules: RowRules = NO_RULES
    batch: tuple[int, int] = (0, 0)
    topics: Sequence[str] = ()
    remembered: RememberedDeletes | None = None

    @property
    def upserts(self) -> bool:
        return self.declared.mode == "upsert"

    def divide(self, rows: pa.Table, *, with_unique: bool = True) -> Divided:
        """Divide rows as `fitted` makes them; of an upsert, all rows of their keys. Raises OutputMismatch."""
        rows, rejected = self._held(rows)
        made = row_rules.evaluate(rows, self.rules, DELETE_COLUMN, with_unique=with_unique)
        if made.failing is not None:
            return Divided(made.written, failing=made.failing, numbers=made.numbers)
        written, noted = self._reduced(made.written) if self.upserts else (made.written, None)
        return Divided(
            _without(written, PLACE),
            self.returned(rejected) if rejected.num_rows else None,
            made.quarantined,
            noted if noted is not None and noted.num_rows else None,
            numbers=made.numbers,
            dropped=made.dropped,
        )

    def aside(self, quarantined: pa.Table) -> pa.Table:
        """Quarantined rows in the quarantine's columns."""
        rows = named(as_returned(self.schema, quarantined), self.topics)
        place = [rows[name] if name in rows.column_names else None for name in PLACE]
        columns = [field.name for field in self.schema.fields if not is_position(field)]
        return row_rules.set_aside(rows.select([*columns, BROKEN_COLUMN]), self.rules, self.batch, place)

    def outcome(self, numbers: Sequence[int], dropped: int, failing: pa.Table | None) -> RuleOutcome:
        """The outcome of the rules; raises RuleBroken if rows stop the stream."""
        if failing is not None:
            row_rules.refuse(self.declared.name, self.rules, failing, numbers, self.declared.keys)
        return row_rules.outcome(self.rules, numbers, dropped)

    def mark_equal(self, rows: pa.Table, columns: Sequence[str], bit: int) -> pa.Table:
        """Set a bit in `__broken` of rows that are equal in these columns; rejected rows equal none."""
        held, _ = self._held(rows.append_column(_INDEX_COLUMN, pa.array(np.arange(rows.num_rows))))
        verdicts = np.array(rows[BROKEN_COLUMN].to_numpy(), np.int64)
        verdicts[held[_INDEX_COLUMN].to_numpy()[row_rules.equal_rows(held, columns, DELETE_COLUMN)]] |= bit
        return rows.set_column(rows.column_names.index(BROKEN_COLUMN), BROKEN_COLUMN, pa.array(verdicts))

    def _held(self, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
        """The rows that the table can hold, and the others, with a reason unless it is a null key."""
        rows, rejected = refused_rows.split(self.declared, self.schema, rows)
        if self.upserts:
            rows, null_keys = split_null_keys(rows, self.declared.keys)
            both = [rejected, null_keys]
            rejected = pa.concat_tables(both, promote_options="default") if rejected.num_rows else null_keys
        return rows, rejected

    def returned(self, rejected: pa.Table) -> pa.Table:
        """Rejected rows as the function returned them, with the place of their records and the reason."""
        rows = named(as_returned(self.schema, rejected), self.topics)
        added = (BROKEN_COLUMN, RESET_COLUMN, KIND_COLUMN, TALLY_COLUMN)
        return rows.drop_columns([c for c in rows.column_names if c in added or c.startswith(PARTITION_COLUMN)])

    def _reduced(self, rows: pa.Table) -> tuple[pa.Table, pa.Table | None]:
        """One event per key, and the events that change the remembered deletes."""
        keys = self.declared.keys
        if not self.order.columns:
            return last_per_key(rows, keys, [c for c in ORDER if c in rows.column_names]), None
        events = last_events(rows, keys, self.order)
        return (events, None) if self.remembered is None else self.remembered.split(events, self.order)


def _without(rows: pa.Table, columns: Iterable[str]) -> pa.Table:
    return rows.drop_columns([name for name in columns if name in rows.column_names])


@dataclass
class TaskTally:
    """What tasks have done with the rows of a batch: numbers of rows, and the files written, relative to the table."""

    written: int = 0
    aside: int = 0
    dropped: int = 0
    numbers: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    aside_files: list[str] = field(default_factory=list)
    tasks: int = 1
    write_s: float = 0.0
    """Seconds that the tasks have spent on writing files, together."""

    def add(self, made: Divided) -> None:
        """Count divided rows."""
        self.written += made.written.num_rows
        self.aside += 0 if made.quarantined is None else made.quarantined.num_rows
        self.dropped += made.dropped
        self._count(made.numbers)

    def plus(self, other: Mapping[str, Any]) -> None:
        """Add the tally of another task, as JSON has it."""
        for name in ("written", "aside", "dropped", "files", "aside_files", "tasks", "write_s"):
            setattr(self, name, getattr(self, name) + other[name])
        self._count(other["numbers"])

    def _count(self, numbers: Sequence[int]) -> None:
        if numbers:
            self.numbers = [a + b for a, b in zip(self.numbers or [0] * len(numbers), numbers, strict=True)]


@dataclass(frozen=True)
class RowTask:
    """The engine for the rows of a task.

    Of an append it takes one Arrow batch after another; of an upsert all rows of the task at once, which are all rows
    of their keys, ordered by `__row`. Rules on the rows of a batch together are in `__broken` already.
    """

    engine: RowEngine

    def yielded(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields all rows but dropped ones."""
        tally, shape = TaskTally(), None
        for rows in self._tables(batches):
            shape = shape or _shape(rows.schema)
            made = self.engine.divide(rows, with_unique=False)
            tally.add(made)
            if made.failing is None:
                yield from _of_kind(shape, WRITTEN, made.written)
                yield from _of_kind(shape, QUARANTINED, made.quarantined)
            yield from self._told(shape, made)
        if shape is not None:
            yield _tally(shape, tally)

    def written_to_files(
        self, files: Files, aside: Files | None, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Write the rows; yields the rejected and failing ones. Without `aside`, quarantined rows are only counted.

        The rows come ordered by the table's partitions, whose values as text are in `__partition_value0` and so on.
        """
        tally, shape = TaskTally(), None
        values = [f"{PARTITION_COLUMN}{number}" for number in range(len(self.engine.declared.partition_by))]
        columns = self.engine.schema.fieldNames()
        for rows in self._tables(batches):
            shape = shape or _shape(rows.schema)
            made = self.engine.divide(rows, with_unique=False)
            tally.add(made)
            if made.failing is None:
                for folder, part in partitions_of(made.written, self.engine.declared.partition_by, values):
                    files.add(folder, part.select([c for c in columns if c not in self.engine.declared.partition_by]))
                if aside is not None and made.quarantined is not None:
                    aside.add("", self.engine.aside(made.quarantined))
            yield from self._told(shape, made)
        if shape is not None:
            tally.files, tally.aside_files = files.close(), [] if aside is None else aside.close()
            tally.write_s = files.seconds + (0.0 if aside is None else aside.seconds)
            yield _tally(shape, tally)

    def aside(self, quarantine: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields quarantined rows in the quarantine's columns and their order, by which Spark matches them.

        A column that only one of the two tables has is null, or left out.
        """
        for batch in batches:
            if batch.num_rows:
                rows = self.engine.aside(pa.Table.from_batches([batch]))
                names, count = set(rows.column_names), rows.num_rows
                columns = [rows[f.name] if f.name in names else pa.nulls(count, f.type) for f in quarantine]
                yield from pa.table(columns, names=quarantine.names).to_batches()

    def marked(self, columns: Sequence[str], bit: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields all rows of the task, with those marked that are equal in these columns."""
        if listed := list(batches):
            yield from self.engine.mark_equal(pa.Table.from_batches(listed), columns, bit).to_batches()

    def _tables(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        if not self.engine.upserts:
            yield from (pa.Table.from_batches([batch]) for batch in batches)
        elif listed := list(batches):
            rows = pa.Table.from_batches(listed)
            yield rows.take(pc.sort_indices(rows[ROW_COLUMN])).drop_columns([ROW_COLUMN])

    def _told(self, shape: pa.Schema, made: Divided) -> Iterator[pa.RecordBatch]:
        for kind, rows in ((REJECTED, made.rejected), (NOTED, made.noted), (FAILING, made.failing)):
            yield from _of_kind(shape, kind, rows)


def told_schema(rows: StructType) -> StructType:
    """The columns that tasks yield: the columns of the rows, then the columns that classify a row."""
    fields = [StructField(f.name, f.dataType) for f in rows.fields if f.name != ROW_COLUMN]
    return StructType([*fields, *(StructField(name, kind) for name, kind, _ in _TOLD)])


_TOLD = (
    (RESET_COLUMN, BooleanType(), pa.bool_()),
    (REASON_COLUMN, StringType(), pa.string()),
    (KIND_COLUMN, IntegerType(), pa.int32()),
    (TALLY_COLUMN, StringType(), pa.string()),
)


def _shape(rows: pa.Schema) -> pa.Schema:
    """`told_schema` in Arrow."""
    return pa.schema([*(f.with_nullable(True) for f in rows), *((name, kind) for name, _, kind in _TOLD)])


def _of_kind(shape: pa.Schema, kind: int, rows: pa.Table | None) -> Iterator[pa.RecordBatch]:
    """The rows in the columns of the shape, null where they have none."""
    if rows is None or not rows.num_rows:
        return
    rows = rows.append_column(KIND_COLUMN, pa.repeat(pa.scalar(kind, pa.int32()), rows.num_rows))
    names, count = set(rows.column_names), rows.num_rows
    columns = [rows[f.name] if f.name in names else pa.nulls(count, f.type) for f in shape]
    yield from pa.Table.from_arrays(columns, schema=shape).to_batches()


def _tally(shape: pa.Schema, tally: TaskTally) -> pa.RecordBatch:
    (batch,) = _of_kind(shape, TALLY, pa.table({TALLY_COLUMN: [json.dumps(asdict(tally))]}))
    return batch


@dataclass
class Files:
    """Parquet files of one task below a folder of the table; one is open at a time."""

    table: Location
    folder: Location
    _written: list[str] = field(default_factory=list)
    _at: str | None = None
    _writer: pq.ParquetWriter | None = None
    _output: Path | BinaryIO | None = None
    _waiting: list[pa.Table] = field(default_factory=list)
    seconds: float = field(default=0.0, init=False)
    """The time that encoding and writing have taken."""

    def add(self, partition: str, rows: pa.Table) -> None:
        """Write rows of a partition; rows of another one begin a new file."""
        if partition != self._at:
            self._end_file()
            self._at = partition
        self._waiting.append(rows)
        waiting = self._waiting
        if sum(t.num_rows for t in waiting) >= _ROW_GROUP or sum(t.nbytes for t in waiting) >= _ROW_GROUP_BYTES:
            self._flush()

    def close(self) -> list[str]:
        """End the last file; the paths of all of them."""
        self._end_file()
        return self._written

    def _flush(self) -> None:
        if not self._waiting:
            return
        began, rows = time.monotonic(), pa.concat_tables(self._waiting)
        if self._writer is None:
            path = self.folder / (self._at or "") / f"part-{len(self._written):05d}-{uuid.uuid4().hex}.snappy.parquet"
            # As in `column_bounds.writer_properties`: statistics of floats would hide NaN, and of nested ones too.
            plain = [f.name for f in rows.schema if not pa.types.is_nested(f.type) and not pa.types.is_floating(f.type)]
            self._output = opened_for_writing(path)
            self._writer = pq.ParquetWriter(self._output, rows.schema, compression="snappy", write_statistics=plain)
            self._written.append(path_below(path, self.table))
        self._writer.write_table(rows)
        self._waiting.clear()
        self.seconds += time.monotonic() - began

    def _end_file(self) -> None:
        self._flush()
        began = time.monotonic()
        if self._writer is not None:
            self._writer.close()
            if not isinstance(self._output, Path | None):
                self._output.close()
            self._writer = self._output = None
        self.seconds += time.monotonic() - began


def partitions_of(rows: pa.Table, names: Sequence[str], values: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """The rows by partition, in their order, each with the partition's folder; `values` are the columns of its text."""
    if not names or not rows.num_rows:
        yield from [("", rows)] if rows.num_rows else []
        return
    numbered = rows.select(values).append_column(ROW_COLUMN, pa.array(np.arange(rows.num_rows)))
    groups = numbered.group_by(values, use_threads=False).aggregate([(ROW_COLUMN, "list")])
    for group in groups.to_pylist():
        folder = partition_folder({name: group[value] for name, value in zip(names, values, strict=True)})
        yield folder, rows.take(pa.array(group[f"{ROW_COLUMN}_list"]))
