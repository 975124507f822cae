"""The rows of a Delta table on local disk, as Arrow.

`DeltaTable.to_pyarrow_dataset` reads through a file system that is written in Python. Arrow's threads still close its
files while the interpreter ends, and such a thread ends the whole process: SIGABRT, "terminate called without an active
exception", after all results were printed. So the dataset uses Arrow's file system, which needs no Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import DeltaTable

if TYPE_CHECKING:
    from pyarrow.dataset import FileSystemDataset


def dataset(handle: DeltaTable, table: Path) -> FileSystemDataset:
    """The version that the handle has loaded, as a dataset; `table` is its folder."""
    return handle.to_pyarrow_dataset(filesystem=pafs.SubTreeFileSystem(str(table), pafs.LocalFileSystem()))


def rows(table: Path, version: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of a version, the newest by default, in these columns or all."""
    source = dataset(DeltaTable(table, version=version), table)
    return source.to_table(columns=None if columns is None else list(columns))
