"""A Delta table as one source of one stream: the streaming frame of its new rows, and the same versions as a batch."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.sources.judged_frames import counted, good, late_rows, watched, workers_of
from streaming_jobs.sources.planner import Limits
from streaming_jobs.sources.record_blocks import note_used
from streaming_jobs.table_sources.planner import FileToRead, RowBlocks, TablePlanner, is_small, tasks
from streaming_jobs.table_sources.versions import TableVersions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# A table as a data source of Spark, in the way of `sources/kafka_data_source.py`: one planner per query, and
# workers.
#
# The planner decides where a batch ends and names the files of each task. Rows of small batches it reads itself and
# sends them along with the plan, so that a live stream does not pay for a task that starts a reader.


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
        return self.reading.blocks.spark_schema

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - it is ours
        return RangeReader(self.reading)

    def streamReader(self, schema: StructType) -> TableStreamReader:  # noqa: N802, ARG002 - Spark's name
        return TableStreamReader(self.reading)


def load(spark: SparkSession, reading: TableReading, *, stream: bool) -> DataFrame:
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


@dataclass(frozen=True)
class TableSource:
    """One table of one stream. `lateness` is the watermark delay; files of the session go beside `scratch`."""

    parameter: str
    declared: DeltaSource
    versions: TableVersions
    lateness: timedelta | None
    scratch: Path

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def fields(self) -> Sequence[str]:
        return list(self.declared.columns.fieldNames())

    @property
    def event_time(self) -> str | None:
        return self.declared.time_column

    @property
    def observation(self) -> str:
        """Name of the metrics that count this source's rows."""
        return f"recourse_{self.parameter}"

    def stream(self, spark: SparkSession, *, start: Mapping[int, int], limits: Limits, owner: str) -> DataFrame:
        """The streaming frame of good rows. `start` holds for a checkpoint's first batch only."""
        used = self._used(owner)
        used.unlink(missing_ok=True)
        blocks = RowBlocks.of(self.declared, self.versions, "all", used)
        reading = TableReading(
            self.reading_name(owner), blocks, start.get(0, 0), limits=limits, workers=workers_of(spark)
        )
        raw = load(spark, reading, stream=True)
        return watched(self, _good(raw.observe(self.observation, *counted(self))))

    def reading_name(self, owner: str) -> str:
        return f"table-{owner}-{self.parameter}"  # neither part can have a hyphen

    def build_only(self, owner: str, columns: Iterable[str]) -> None:
        """Leave all other columns of `stream` null (`RowBlocks`); before the query starts."""
        note_used(self._used(owner), columns)

    def batch(self, spark: SparkSession, start: Mapping[int, int], end: Mapping[int, int]) -> DataFrame:
        """The good rows of a range as a batch frame."""
        return _good(self._range(spark, "all", start, end))

    def bad_records(self, spark: SparkSession, offsets: OffsetRange) -> DataFrame:
        """The refused rows of a range: topic, partition, offset, timestamp, key, value, headers, reason, detail."""
        return self._range(spark, "refused", offsets.start, offsets.end)

    def late_records(self, spark: SparkSession, offsets: OffsetRange, watermark_ms: int) -> int:
        """Good rows of a range whose event time is at or behind a watermark."""
        return late_rows(self, self._range(spark, "all", offsets.start, offsets.end), watermark_ms)

    def rows(self, offsets: OffsetRange) -> int:
        start, end = offsets.start.get(0, 0), offsets.end.get(0, 0)
        return sum(version.rows for version in self.versions.between(start, end))

    def _range(
        self, spark: SparkSession, rows: Literal["all", "refused"], start: Mapping[int, int], end: Mapping[int, int]
    ) -> DataFrame:
        blocks = RowBlocks.of(self.declared, self.versions, rows)
        name = f"table-{rows}-{self.parameter}"
        reading = TableReading(name, blocks, start.get(0, 0), end.get(0, 0), workers=workers_of(spark))
        return load(spark, reading, stream=False)

    def _used(self, owner: str) -> Path:
        return self.scratch.with_name(f"{self.scratch.stem}-{self.reading_name(owner)}.json")


def _good(judged: DataFrame) -> DataFrame:
    names = ("topic", "partition", "offset", "timestamp", "key", "tombstone")
    return good(judged, F.struct(*(F.col(name) for name in names)))
