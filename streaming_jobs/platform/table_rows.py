"""The rows of a Delta table as Arrow.

`DeltaTable.to_pyarrow_dataset` reads through a file system that is written in Python. Arrow's threads still close its
files while the interpreter ends, and such a thread ends the whole process: SIGABRT, "terminate called without an active
exception", after all results were printed. So the dataset uses Arrow's file system, which needs no Python, and for a
table on a store one that opens each file as bytes in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import DeltaTable, QueryBuilder
from deltalake.fs import DeltaStorageHandler

from streaming_jobs.errors import TransientError
from streaming_jobs.storage.locations import Location, StorePath, delta_options, delta_table

if TYPE_CHECKING:
    from pyarrow.dataset import FileSystemDataset


def dataset(handle: DeltaTable, table: Location) -> FileSystemDataset:
    """The version that the handle has loaded, as a dataset; `table` is its location."""
    if isinstance(table, StorePath):
        objects = _Objects.of(handle, table)
        return handle.to_pyarrow_dataset(filesystem=pafs.PyFileSystem(objects))
    return handle.to_pyarrow_dataset(filesystem=pafs.SubTreeFileSystem(str(table), pafs.LocalFileSystem()))


def rows(table: Location, version: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of a version, the newest by default, in these columns or all."""
    source = dataset(delta_table(table, version), table)
    return source.to_table(columns=None if columns is None else list(columns))


class _Objects(DeltaStorageHandler):
    """The files of a table on a store, each in memory as long as it is open."""

    table: StorePath

    @classmethod
    def of(cls, handle: DeltaTable, table: StorePath) -> _Objects:
        made: _Objects = cls.from_table(handle._table, delta_options(table), {})  # type: ignore[assignment]
        made.table = table
        return made

    def open_input_file(self, path: str) -> pa.BufferReader:
        _, remote, name = path.partition(":/")  # of a URL deltalake shows one slash
        place = StorePath(f"{path.partition(':/')[0]}://{name.lstrip('/')}", self.table.options) if remote else None
        return pa.BufferReader((place or self.table / path).read_bytes())


def plain_text(kind: pa.DataType) -> pa.DataType:
    """Each writer has a text type of its own, and Arrow cannot filter by all of them; any other type as it is."""
    return pa.string() if pa.types.is_string_view(kind) or pa.types.is_large_string(kind) else kind


# SQL on Delta tables by DataFusion, in bounded memory: what does not fit is spilled to disk.
#
# DataFusion counts the memory of its hash tables and sorts, and spills at the limit. It does not count the decoding
# of Parquet, about 300 MB more. A query must not join large tables: a hash join cannot be spilled. Its hash tables
# and sorts share the memory, and one of them starves while others hold it, so a query runs in one task. A query has
# no deadline: its time is proportional to the rows that it reads.

MEMORY_MB = 512
"""Memory of one query's hash tables and sorts."""
_OPTIONS = {"datafusion.execution.target_partitions": "1"}
_SHARE_OF_DISK = 2
_SURROUNDINGS = (
    "Resources exhausted",
    "Object Store error",
    "Generic LocalFileSystem error",
    "IO error",
    "Io error",
    "Parquet error",
    "No space left",
    "not enough memory",
)
"""Words in the errors that are of memory, disk or files, and not of the SQL."""


class QueryFailed(TransientError):
    """A query on a table failed for lack of memory or disk, or because a file could not be read.

    The message has DataFusion's text. Give the disk more room, or run the command on a machine with more memory; a file
    that is gone was removed by another program.
    """

    code = "REC-018"


def opened(tables: Mapping[str, DeltaTable], spill: Path) -> QueryBuilder:
    """Tables by the names that queries have for them.

    What exceeds the memory goes to the folder `spill`, at most half of the disk's free bytes. DataFusion removes its
    files at the end of each query; after a kill they stay until their owner removes the folder.
    """
    spill.mkdir(parents=True, exist_ok=True)
    data = QueryBuilder(_OPTIONS)
    most = max(shutil.disk_usage(spill).free // _SHARE_OF_DISK, 2**20) // 2**20
    for name, value in (
        ("memory_limit", f"{MEMORY_MB}M"),
        ("temp_directory", f"{spill}"),
        ("max_temp_directory_size", f"{most}M"),
    ):
        text = value.replace("'", "''")
        data.execute(f"SET datafusion.runtime.{name} = '{text}'").read_all()
    for name, table in tables.items():
        data = data.register(name, table)
    return data


def rows_of(data: QueryBuilder, sql: str, table: str) -> list[dict[str, Any]]:
    """The rows of a query; raises QueryFailed with the table's name."""
    try:
        return list(pa.table(data.execute(sql).read_all()).to_pylist())
    except Exception as error:  # errors while a query runs, deltalake raises as a plain Exception
        raise failed(error, table) from error


def failed(error: Exception, table: str) -> QueryFailed:
    """The error for a query that failed for no fault of a person's SQL."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip() != "caused by")
    return QueryFailed(f"a query on table {table} failed: {text[:400]}", "remove the cause, then try again")


def is_of_surroundings(error: Exception) -> bool:
    """True if memory, disk or a file made a query fail, and not its SQL."""
    text = str(error)
    return any(words in text for words in _SURROUNDINGS)
