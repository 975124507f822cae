"""The Delta table of the tests of sinks: its name, its rows, and partition values that have to be escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.cloudpickle import dumps, loads
from pyspark.sql.types import StructType

from streaming_jobs.sinks.delta.sink import DeltaSink

TABLE = "evens"
ROWS = pa.table({"k": ["x", "y"], "n": [1, 2]})
AWKWARD = ("a b", "c:d", "50%", "e/f", "gö", "x=y", "%20", "日本", "it's", 'a"b', "a?b#c", "a\\b", "[x]{y}", "plain")


Make = Callable[..., DeltaSink]


def rows_in(sink: DeltaSink) -> list[dict[str, Any]]:
    """The table's rows as any reader sees them."""
    rows: list[dict[str, Any]] = DeltaTable(sink.path).to_pyarrow_table().to_pylist()
    return sorted(rows, key=repr)


def files_below(table: Path, folder: Path) -> list[str]:
    """The Parquet files of a folder, relative to the table."""
    return [file.relative_to(table).as_posix() for file in folder.rglob("*.parquet")]


def shorten_log(table: Path, keep: int = 1, *, at: int | None = None) -> None:
    """As log retention leaves it: a checkpoint, of the newest version unless one is given, and the newest commits."""
    DeltaTable(table, version=at).create_checkpoint()
    for commit in sorted((table / "_delta_log").glob("*.json"))[: -keep or None]:
        commit.unlink()


@dataclass(frozen=True)
class InProcess:
    """Rows where Spark has a frame; the tasks of `mapInArrow` run in this process, one for each batch of the rows."""

    rows: pa.Table
    schema: StructType
    after: Callable[[], object] = lambda: None
    """Called when a task has ended."""

    @property
    def columns(self) -> list[str]:
        return list(self.rows.column_names)

    def mapInArrow(
        self, task: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: StructType
    ) -> InProcess:
        sent = dumps(task)
        made = [told for batch in self.rows.to_batches() for told in loads(sent)(iter([batch]))]
        self.after()
        return InProcess(pa.Table.from_batches(made), schema)

    def toArrow(self) -> pa.Table:
        return self.rows
