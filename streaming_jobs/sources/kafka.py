"""A Kafka topic as a stream of decoded records, and the same offsets once more as a batch.

The streaming frame counts its bad records on the way (`observe`) and leaves them out; `bad_records` reads the
offsets of the batch again and returns only those. Both make their verdicts in `record_blocks.py`, so each record is in
exactly one of them. `late_records` uses it too: Spark's state only reports that it dropped rows, and `late_records`
counts the records behind the watermark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pyspark.sql import functions as F

from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.sources.archived_ranges import read_ranges
from streaming_jobs.sources.base import Archive
from streaming_jobs.sources.connection import read_client_file
from streaming_jobs.sources.judged_frames import counted, good, late_rows, watched, workers_of
from streaming_jobs.sources.kafka_data_source import Reading, load
from streaming_jobs.sources.planner import Limits
from streaming_jobs.sources.range_reader import RangeReader
from streaming_jobs.sources.record_blocks import LARGEST_MS, Declared, RecordBlocks, first_reads, note_used
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges
from streaming_jobs.stream import KafkaTopic

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_LAST = 50
"""Records at the end of a range that are looked at: a transaction's marker is an offset without a record."""


@dataclass(frozen=True)
class KafkaSource:
    """One source of one stream. `client` is the file with the client's properties, `lateness` the watermark delay.

    `archive` has what the topic no longer has; records in the `void` ranges are not read.
    """

    parameter: str
    topic: KafkaTopic
    client: Path
    lateness: timedelta | None
    archive: Archive | None = None
    void: VoidRanges = NO_VOID

    @property
    def name(self) -> str:
        return self.topic.name

    @property
    def fields(self) -> Sequence[str]:
        return list(self.topic.records.schema.fieldNames())

    @property
    def event_time(self) -> str | None:
        return self.topic.time_column

    @property
    def observation(self) -> str:
        """Name of the metrics that count this source's records."""
        return f"recourse_{self.parameter}"

    def stream(self, spark: SparkSession, *, start: Mapping[int, int], limits: Limits, owner: str) -> DataFrame:
        """The streaming frame of good records. `start` holds for a checkpoint's first batch only.

        `owner` is the stream's name: the data sources of a session have different names.
        """
        name = self.reading_name(owner)
        blocks = self._blocks("all", self._used(owner))
        self._used(owner).unlink(missing_ok=True)
        reading = replace(self._reading(spark, name, blocks, start), limits=limits)
        raw = load(spark, reading, stream=True)
        return watched(self, self._good(raw.observe(self.observation, *counted(self))))

    def reading_name(self, owner: str) -> str:
        return f"kafka-{owner}-{self.parameter}"  # neither part can have a hyphen

    def build_only(self, owner: str, columns: Iterable[str]) -> None:
        """Leave all other columns of `stream` null (`RecordBlocks`); before the query starts."""
        note_used(self._used(owner), columns)

    def _used(self, owner: str) -> Path:
        return self.client.with_name(f"{self.client.stem}-{self.reading_name(owner)}.json")

    def batch(self, spark: SparkSession, start: Mapping[int, int], end: Mapping[int, int]) -> DataFrame:
        """The good records of a range as a batch frame."""
        return self._good(self._range(spark, "all", start, end))

    def bad_records(self, spark: SparkSession, offsets: OffsetRange) -> DataFrame:
        """The refused records of a range: topic, partition, offset, timestamp, key, value, headers, reason, detail."""
        return self._range(spark, "refused", offsets.start, offsets.end)

    def late_records(self, spark: SparkSession, offsets: OffsetRange, watermark_ms: int) -> int:
        """Good records of a range whose event time is at or behind a watermark."""
        return late_rows(self, self._range(spark, "all", offsets.start, offsets.end), watermark_ms)

    def first_read(self, offsets: OffsetRange) -> int | None:
        """When the last records of a range were first read, if a replay has written them; milliseconds since 1970."""
        if not self.void.spans:
            return None
        config, timeout = read_client_file(self.client)
        spans = {p: (max(offsets.start.get(p, 0), end - _LAST), end) for p, end in offsets.end.items()}
        reader = RangeReader(self.name, config, timeout)
        try:
            blocks = [self.void.kept(each) for each in read_ranges(reader, self.void.clipped(spans), _LAST)]
        finally:
            reader.close()
        times = [time for each in blocks for time in first_reads(each.column("headers")).tolist() if time < LARGEST_MS]
        return max(times, default=None)

    def rows(self, offsets: OffsetRange) -> int:
        """The offsets in the range that are not void."""
        return offsets.records - self.void.count({p: (offsets.start.get(p, 0), end) for p, end in offsets.end.items()})

    def _range(
        self, spark: SparkSession, rows: Literal["all", "refused"], start: Mapping[int, int], end: Mapping[int, int]
    ) -> DataFrame:
        name = f"kafka-{rows}-{self.parameter}"
        reading = replace(self._reading(spark, name, self._blocks(rows), start), ends=dict(end))
        return load(spark, reading, stream=False)

    def _reading(self, spark: SparkSession, name: str, blocks: RecordBlocks, start: Mapping[int, int]) -> Reading:
        workers, archive, void = workers_of(spark), self.archive, self.void
        return Reading(name, blocks, self.client, dict(start), workers=workers, archive=archive, void=void)

    def _blocks(self, rows: Literal["all", "refused"], used: Path | None = None) -> RecordBlocks:
        return RecordBlocks(Declared.of(self.topic), rows, used, recovered=bool(self.void.spans))

    def _good(self, judged: DataFrame) -> DataFrame:
        return good(judged, self._position())

    def _position(self) -> Column:
        columns = [F.col(c) for c in ("topic", "partition", "offset", "timestamp", "key")]
        columns += [F.col("timestamp_type")] if self.topic.timestamp_type else []
        columns += [F.col("headers")] if self.topic.headers else []
        return F.struct(*columns, F.col("tombstone"))
