"""A Delta table as a source of a stream: its new rows as a streaming frame, and the same versions as a batch.

The planner names the files of each task. Rows of small batches it reads itself and sends them along with the plan
(`sources/data_source.py`). The offset of partition 0 is the version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.sources.data_source import FrameSource, Reading, Split
from streaming_jobs.sources.read_times import ReadTimes
from streaming_jobs.storage.locations import Location
from streaming_jobs.table_sources.planner import FileToRead, RowBlocks, TablePlanner, is_small, tasks
from streaming_jobs.table_sources.versions import TableVersions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class FilesPartition(InputPartition):
    def __init__(self, files: Sequence[FileToRead]) -> None:
        self.files = list(files)


@dataclass(frozen=True, kw_only=True)
class TableReading(Reading[TablePlanner]):
    """A table to read: a range of versions, or with `limits` everything from its start on."""

    blocks: RowBlocks

    @property
    def schema(self) -> StructType:
        return self.blocks.spark_schema

    @property
    def source(self) -> str:
        return self.blocks.versions.name

    def planner(self) -> TablePlanner:
        assert self.limits is not None
        return TablePlanner(self.blocks.versions, self.limits)

    def parts(self) -> Sequence[InputPartition]:
        assert self.ends is not None
        versions = self.blocks.versions.between(self.starts.get(0, 0), self.ends.get(0, 0))
        files = [FileToRead(each.number, each.at, file) for each in versions for file in each.files]
        return [FilesPartition(part) for part in tasks(files, self.workers)]

    def split(self, planner: TablePlanner, starts: dict[int, int], ends: dict[int, int]) -> Split:
        files = planner.files(starts.get(0, 0), ends.get(0, 0))
        times, small = ReadTimes(), files and is_small(files)
        with times.reading():  # a block of Parquet is read and decoded in one call
            rows = list(self.blocks.of_files(files)) if small else None
        times.note_batch(self.times)
        if rows is not None:
            return [FilesPartition(files)], rows
        return [FilesPartition(part) for part in tasks(files, self.tasks)], None

    def read(self, part: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(part, FilesPartition)
        times = ReadTimes()
        yield from times.each_read(self.blocks.of_files(part.files))
        times.note_task(self.times)


@dataclass(frozen=True)
class TableSource(FrameSource):
    declared: DeltaSource
    versions: TableVersions

    kind = "table"

    @property
    def fields(self) -> Sequence[str]:
        return list(self.declared.columns.fieldNames())

    def rows(self, offsets: OffsetRange) -> int:
        """The rows that the versions of a range added."""
        start, end = offsets.start.get(0, 0), offsets.end.get(0, 0)
        return sum(version.rows for version in self.versions.between(start, end))

    def _reading(
        self, name: str, rows: Literal["all", "refused"], start: Mapping[int, int], used: Location | None = None
    ) -> TableReading:
        blocks = RowBlocks(self.declared, self.versions, rows, used)
        return TableReading(name, {0: start.get(0, 0)}, blocks=blocks)
