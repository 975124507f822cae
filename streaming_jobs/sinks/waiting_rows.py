"""Rows of a large batch on their way to a sink outside of the tables' store: executors write them, the driver reads."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from streaming_jobs.errors import TransientError
from streaming_jobs.sinks.base import BatchOfRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class WaitingRows:
    """The folder of the Parquet files in which the rows of one sink wait."""

    folder: Path

    def write(self, frame: DataFrame, rows: BatchOfRows) -> Path:
        """Have the executors write the rows; returns the folder of the batch's files."""
        self.remove_leftovers()
        target = self.folder / f"g{rows.generation:04d}-b{rows.batch:09d}-{uuid.uuid4().hex[:8]}"
        frame.write.parquet(str(target))
        return target

    def remove_leftovers(self) -> None:
        """Remove the files of attempts that died."""
        shutil.rmtree(self.folder, ignore_errors=True)


def listed(folder: Path) -> list[Path]:
    """The files, in the order of the frame's partitions: Spark writes at least one, also of no rows."""
    if files := sorted(folder.glob("part-*.parquet")):
        return files
    raise _gone(folder)


def read(files: Sequence[Path]) -> Iterator[pa.RecordBatch]:
    """The rows of the files; raises TransientError if one of them is gone."""
    for file in files:
        try:
            opened = pq.ParquetFile(file)
        except FileNotFoundError as error:
            raise _gone(file) from error
        with opened:
            yield from opened.iter_batches()


def _gone(path: Path) -> TransientError:
    return TransientError(
        f"the rows of a batch, waiting in {path}, are gone: another driver of the stream, or a clean-up, removed them",
        "the batch is repeated; if this comes back, look for a second driver, and for clean-ups of that folder",
    )
