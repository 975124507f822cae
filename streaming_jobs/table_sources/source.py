"""A Delta table as one source of one stream: the streaming frame of its new rows, and the same versions as a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pyspark.sql import functions as F

from streaming_jobs.delta_source import DeltaSource
from streaming_jobs.positions import OffsetRange
from streaming_jobs.sources.judged_frames import counted, good, late_rows, watched, workers_of
from streaming_jobs.sources.planner import Limits
from streaming_jobs.sources.record_blocks import note_used
from streaming_jobs.table_sources.data_source import TableReading, load
from streaming_jobs.table_sources.row_blocks import RowBlocks
from streaming_jobs.table_sources.versions import TableVersions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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
        """The table's name."""
        return self.declared.name

    @property
    def fields(self) -> Sequence[str]:
        """The columns that are read."""
        return list(self.declared.columns.fieldNames())

    @property
    def event_time(self) -> str | None:
        """The column of its event time."""
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
        """The name of the data source of `stream`."""
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
        """The rows of the versions in a range."""
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
