"""An upsert that executors carry out and deltalake commits, for tables on a store: delta-spark may not commit there.

Both steps run on the executors. The keys of the table's files show which files hold a key of the batch; these files are
read whole, merged with the batch's events, and written anew. One commit removes them and adds the new ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.transaction import AddAction
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.delta_log import names_on_disk
from streaming_jobs.platform.table_rows import dataset
from streaming_jobs.sinks.delta.column_bounds import within
from streaming_jobs.sinks.delta.parquet import checked_actions
from streaming_jobs.sinks.delta.pending_writes import DeltaWrite, merge_clauses
from streaming_jobs.sinks.delta.row_engine import PARTITION_COLUMN, Files, partitions_of
from streaming_jobs.sinks.delta.table_files import table_files
from streaming_jobs.storage.locations import Location, delta_table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from streaming_jobs.sinks.delta.sink import DeltaSink

_FILE, _THERE, _EVENT = "__file", "__there", "__event"


@dataclass
class ParquetMerge(DeltaWrite):
    """Events in a frame, one per key, that executors merge into files of the table; `cached` is freed with the write.

    Files that were written and not committed are removed by the next attempt of the batch.
    """

    frame: DataFrame
    count: int
    cached: DataFrame
    files: Files
    by_position: bool = False

    @property
    def rows(self) -> int:
        return self.count

    def commit(self, entry: LedgerEntry) -> int | None:
        self.sink.update()  # a commit on a store does not look for others first, and this one takes long

        def write(handle: DeltaTable, properties: CommitProperties) -> None:
            if not self.count:
                return
            there = table_files(self.sink.path, handle.version())
            known = {name: file for path, file in there.items() for name in names_on_disk(path)}
            touched = self._touched(handle)
            with self.writing():
                adds = written_files(self._merged(handle, touched), self.sink, self.files)[0]
            now = int(time.time() * 1000)
            if touched or adds:
                self.sink.commit_actions([*(known[path].remove(now) for path in touched), *adds], properties)

        return self.sink.commit(entry, write)

    def close(self) -> None:
        self.cached.unpersist()

    def _touched(self, handle: DeltaTable) -> list[str]:
        """The files that hold a key of the batch.

        Executors read the keys of all files whose bounds do not exclude them, each file whole.
        """
        keys, near = list(self.sink.declared.keys), within(self._bounds())
        paths = [fragment.path for fragment in dataset(handle, self.sink.path).get_fragments(filter=near)]
        if not paths:
            return []
        rows = self._rows(handle, paths, [self.sink.schema[key] for key in keys]).alias("t")
        held = rows.join(self.frame.select(*(f"`{key}`" for key in keys)).alias("s"), self._same_key(), "left_semi")
        return sorted(row[0] for row in held.select(_FILE).distinct().collect())

    def _bounds(self) -> dict[str, tuple[pa.Scalar, pa.Scalar]]:
        """The least and the greatest of the batch's keys, for keys with bounds in every file of the table."""
        keys = [key for key in self.sink.declared.keys if key in self.sink.bounded]
        if not keys:
            return {}
        ends = self.frame.agg(
            *(end(f"`{key}`").alias(f"{end.__name__} {key}") for key, end in product(keys, (F.min, F.max)))
        ).toArrow()
        types = to_arrow_schema(self.sink.schema, timezone="UTC")

        def scalar(end: str, key: str) -> pa.Scalar:
            return ends[f"{end} {key}"].cast(types.field(key).type)[0]

        return {key: (scalar("min", key), scalar("max", key)) for key in keys}

    def _merged(self, handle: DeltaTable, touched: Sequence[str]) -> DataFrame:
        """The rows of these files and of the batch after the merge."""
        rows = self._rows(handle, touched, self.sink.schema.fields).withColumn(_THERE, F.lit(True)).alias("t")
        events = self.frame.withColumn(_EVENT, F.lit(True)).alias("s")
        does = merge_clauses(self.sink, self.frame.columns, by_position=self.by_position)
        there, event = F.col(f"t.{_THERE}").isNotNull(), F.col(f"s.{_EVENT}").isNotNull()
        gone = there & event & (_holds(does.delete) if does.delete is not None else F.lit(False))
        changed = there & event & ~gone & _holds(does.update)
        added = ~there & event & _holds(does.insert)
        taken = (changed | added).alias("taken")
        columns = [
            F.when(taken, F.expr(f"s.`{name}`")).otherwise(F.expr(f"t.`{name}`")).alias(name)
            for name in self.sink.schema.fieldNames()
        ]
        merged = rows.join(events, self._same_key(), "full_outer")
        return merged.where(taken | (there & ~gone)).select(*columns)

    def _rows(self, handle: DeltaTable, paths: Sequence[str], fields: Sequence[StructField]) -> DataFrame:
        """Columns of files of the version that the handle has loaded, with the path of each row's file."""
        spark = self.frame.sparkSession
        tasks = max(min(len(paths), int(spark.conf.get("spark.sql.shuffle.partitions") or 1)), 1)
        listed = spark.createDataFrame([(path,) for path in paths], "path string").repartition(tasks)
        schema = StructType([*fields, StructField(_FILE, StringType())])
        task = partial(_read, self.sink.path, handle.version(), to_arrow_schema(schema, timezone="UTC"))
        return listed.mapInArrow(task, schema)

    def _same_key(self) -> Column:
        return F.expr(" AND ".join(f"t.`{key}` = s.`{key}`" for key in self.sink.declared.keys))


def written_files(rows: DataFrame, sink: DeltaSink, files: Files) -> tuple[list[AddAction], int]:
    """Let executors write rows in the table's columns to files; returns the actions that add them, and the rows."""
    names = [f"{PARTITION_COLUMN}{n}" for n in range(len(sink.declared.partition_by))]
    values = {name: partition_text(column) for name, column in zip(names, sink.declared.partition_by, strict=True)}
    if values:
        rows = rows.withColumns(values).sortWithinPartitions(*names)
    task = partial(_write, files, list(sink.declared.partition_by), names)
    told = [json.loads(row[0]) for row in rows.mapInArrow(task, "told string").collect()]
    written = [path for each in told for path in each["files"]]
    return checked_actions(
        sink.path, written, list(sink.declared.partition_by), sink.bounded, sum(t["rows"] for t in told)
    )


def partition_text(column: str) -> Column:
    """A partition value as Delta's log has it; an empty text is null there."""
    return F.nullif(F.col(f"`{column}`").cast("string"), F.lit(""))


def _holds(condition: str | None) -> Column:
    return F.lit(True) if condition is None else F.coalesce(F.expr(condition), F.lit(False))


def _read(
    table: Location, version: int, schema: pa.Schema, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The rows of the files whose paths come in, in these columns; runs on an executor."""
    paths = {path for batch in batches for path in batch.column(0).to_pylist()}
    if not paths:
        return
    source = dataset(delta_table(table, version), table)
    columns = [name for name in schema.names if name != _FILE]
    for fragment in source.get_fragments():
        if fragment.path in paths:
            for rows in fragment.to_batches(schema=source.schema, columns=columns):
                named = pa.Table.from_batches([rows]).append_column(_FILE, pa.repeat(fragment.path, rows.num_rows))
                yield from named.select(schema.names).cast(schema).to_batches()


def _write(
    files: Files, partition_by: Sequence[str], values: Sequence[str], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the rows, which come ordered by partition, to files; runs on an executor."""
    count = 0
    for batch in batches:
        rows = pa.Table.from_batches([batch])
        count += rows.num_rows
        for folder, part in partitions_of(rows, partition_by, values):
            files.add(folder, part.drop_columns([*partition_by, *(v for v in values if v in part.column_names)]))
    yield pa.record_batch({"told": [json.dumps({"files": files.close(), "rows": count})]})
