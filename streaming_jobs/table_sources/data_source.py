"""A table as a data source of Spark, in the way of `sources/kafka_data_source.py`: one planner per query, and workers.

The planner decides where a batch ends and names the files of each task. Rows of small batches it reads itself and sends
them along with the plan, so that a live stream does not pay for a task that starts a reader.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from streaming_jobs.sources.planner import Limits
from streaming_jobs.table_sources.planner import TablePlanner, is_small, tasks
from streaming_jobs.table_sources.row_blocks import FileToRead, RowBlocks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class TableReading:
    """A table to read: a range of versions, or with `limits` everything from `start` on."""

    name: str
    blocks: RowBlocks
    start: int
    end: int | None = None
    limits: Limits | None = None
    workers: int = 2


class FilesPartition(InputPartition):
    """The files that one task reads."""

    def __init__(self, files: Sequence[FileToRead]) -> None:
        self.files = list(files)


class TableRows(DataSource):
    """The data source; each source has a subclass of its own with `packed`, a pickled `TableReading`."""

    packed: bytes
    paths: tuple[str, ...]

    @property
    def reading(self) -> TableReading:
        """The reading, in this process."""
        sys.path.extend(path for path in self.paths if path not in sys.path)
        reading = pickle.loads(self.packed)  # noqa: S301 - packed by the driver
        assert isinstance(reading, TableReading)
        return reading

    def schema(self) -> StructType:
        """The columns of `RowBlocks`."""
        return self.reading.blocks.spark_schema

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - it is ours
        """The rows of a range."""
        return RangeReader(self.reading)

    def streamReader(self, schema: StructType) -> TableStreamReader:  # noqa: N802, ARG002 - Spark's name
        """The rows from a start on."""
        return TableStreamReader(self.reading)


def load(spark: SparkSession, reading: TableReading, *, stream: bool) -> DataFrame:
    """The rows as a frame."""
    name = reading.name
    paths = tuple(path for path in sys.path if path)
    named = {"packed": pickle.dumps(reading), "paths": paths, "name": classmethod(lambda _: name)}
    spark.dataSource.register(type(name, (TableRows,), named))
    return (spark.readStream if stream else spark.read).format(name).load()


class RangeReader(DataSourceReader):
    """Reads the range of a batch query."""

    def __init__(self, reading: TableReading) -> None:
        self.reading = reading

    def partitions(self) -> Sequence[InputPartition]:
        """One partition per task."""
        reading = self.reading
        assert reading.end is not None
        versions = reading.blocks.versions.between(reading.start, reading.end)
        files = [FileToRead(each.number, each.at, file) for each in versions for file in each.files]
        return [FilesPartition(part) for part in tasks(files, reading.workers)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of its files."""
        assert isinstance(partition, FilesPartition)
        return self.reading.blocks.of_files(partition.files)


class TableStreamReader(_SimpleStreamReaderWrapper, SupportsTriggerAvailableNow):
    """Reads a stream of versions; the offsets are those of the checkpoint, `{table: {"0": version}}`."""

    def __init__(self, reading: TableReading) -> None:
        self.reading = reading
        self.simple_reader: Any = self  # Spark asks it for `SupportsTriggerAvailableNow`
        self._planner: TablePlanner | None = None
        self._sent: tuple[dict[str, Any], dict[str, Any], list[pa.RecordBatch]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"reading": self.reading, "simple_reader": None, "_planner": None, "_sent": None}

    @property
    def planner(self) -> TablePlanner:
        """The planner, in the process that plans."""
        if self._planner is None:
            assert self.reading.limits is not None
            self._planner = TablePlanner(self.reading.blocks.versions, self.reading.limits)
        return self._planner

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The position of a checkpoint's first batch."""
        return self._named(self.reading.start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """None: the planner decides."""
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802, ARG002
        """The end of the next batch; `start` if there is nothing new."""
        return self._named(self.planner.next_end(self._version(start)))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Note the present end of the table: the query ends there."""
        self.planner.stop_at_present_end()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One partition for rows that are sent along, else one per task."""
        self._sent = None
        files = self.planner.files(self._version(start), self._version(end))
        if not files:
            return []
        if is_small(files):
            self._sent = (start, end, list(self.reading.blocks.of_files(files)))
            return [FilesPartition(files)]
        return [FilesPartition(part) for part in tasks(files, self.reading.workers)]

    def getCache(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[Any] | None:  # noqa: N802 - Spark's name
        """The rows that are sent along with the plan."""
        if self._sent is None or self._sent[:2] != (start, end):
            return None
        batches, self._sent = self._sent[2], None
        return iter(batches)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: the checkpoint has the position."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of its files, in a worker."""
        assert isinstance(partition, FilesPartition)
        return self.reading.blocks.of_files(partition.files)

    def stop(self) -> None:
        """Nothing: no connection is open."""

    @property
    def _table(self) -> str:
        return self.reading.blocks.versions.name

    def _version(self, offset: dict[str, Any]) -> int:
        return int(offset.get(self._table, {}).get("0", 0))

    def _named(self, version: int) -> dict[str, Any]:
        return {self._table: {"0": version}}
