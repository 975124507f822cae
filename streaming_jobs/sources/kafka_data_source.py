"""A topic as a data source of Spark (`pyspark.sql.datasource`): librdkafka reads it, Arrow carries it into the JVM.

Spark calls the source in three kinds of Python processes:

    planner     one per query, as long as it runs: decides where the next batch ends (`StreamReader`)
    workers     read a large batch, each some partitions of the topic; Spark reuses them from batch to batch
    pickling    one at the start, which only takes the reader apart and sends it to the workers

A small batch never sees a worker: the planner receives records all the time, and hands them over with the plan of the
batch (`getCache`, the way of Spark's `SimpleDataSourceStreamReader`). So a live stream does not pay for a task that
starts a reader.

Nothing secret travels: a reader knows the path of a file that holds the properties of Kafka's client
(`connection.py`).
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import cloudpickle  # a lambda may compute an event time
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from streaming_jobs.sources.archived_ranges import Firsts, read_ranges
from streaming_jobs.sources.base import Archive, Span
from streaming_jobs.sources.connection import read_client_file
from streaming_jobs.sources.planner import Limits, Planner
from streaming_jobs.sources.range_reader import RangeReader
from streaming_jobs.sources.record_blocks import RecordBlocks
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BLOCK = 10_000
"""Records of one Arrow batch, about."""

_readers: dict[tuple[Path, str, str], RangeReader] = {}
"""The readers of this process by client file, source and topic; they stay connected from batch to batch."""


@dataclass(frozen=True)
class Reading:
    """A topic to read: its records as `blocks` wants them, with the client of a file; offsets of a batch or a start.

    `name` is that of the data source, in plans too. `archive` has what the topic no longer has. Records in the `void`
    ranges are left out.
    """

    name: str
    blocks: RecordBlocks
    client: Path
    starts: Mapping[int, int]
    ends: Mapping[int, int] | None = None
    limits: Limits | None = None
    workers: int = 2
    archive: Archive | None = None
    void: VoidRanges = NO_VOID

    @property
    def topic(self) -> str:
        return self.blocks.declared.topic


class RangePartition(InputPartition):
    """Ranges of a topic's partitions that one task reads; `first` are the offsets at which Kafka began, if known."""

    def __init__(self, spans: Mapping[int, Span], first: Firsts | None = None) -> None:
        self.spans = dict(spans)
        self.first = dict(first or {})


class KafkaRecords(DataSource):
    """The data source; each source has a subclass of its own with `packed`, a pickled `Reading`.

    A format may be of a module of the user's: `paths` are the folders in which the driver finds modules.
    """

    packed: bytes
    paths: tuple[str, ...]

    @property
    def reading(self) -> Reading:
        """The reading, in this process."""
        sys.path.extend(path for path in self.paths if path not in sys.path)
        reading = pickle.loads(self.packed)  # noqa: S301 - packed by the driver
        assert isinstance(reading, Reading)
        return reading

    def schema(self) -> StructType:
        return self.reading.blocks.spark_schema

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - it is ours
        return BatchReader(self.reading)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802, ARG002 - Spark's name
        return StreamReader(self.reading)


def load(spark: SparkSession, reading: Reading, *, stream: bool) -> DataFrame:
    name = reading.name
    paths = tuple(path for path in sys.path if path)
    packed = cloudpickle.dumps(reading)  # type: ignore[no-untyped-call]
    named = {"packed": packed, "paths": paths, "name": classmethod(lambda _: name)}
    spark.dataSource.register(type(name, (KafkaRecords,), named))
    return (spark.readStream if stream else spark.read).format(name).load()


class BatchReader(DataSourceReader):
    """Reads the ranges of a batch query."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def partitions(self) -> Sequence[InputPartition]:
        """One partition per task."""
        assert self.reading.ends is not None
        return grouped(self.reading.starts, self.reading.ends, self.reading.workers)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(self.reading, partition)


class StreamReader(_SimpleStreamReaderWrapper, SupportsTriggerAvailableNow):
    """Reads a stream: Spark's wrapper, with admission control, and with records sent along for small batches only."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.simple_reader: Any = self  # Spark asks it for `SupportsTriggerAvailableNow`
        self._planner: Planner | None = None
        self._sent: tuple[dict[str, Any], dict[str, Any], list[pa.RecordBatch]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"reading": self.reading, "simple_reader": None, "_planner": None, "_sent": None}

    @property
    def planner(self) -> Planner:
        """The planner, in the process that plans."""
        if self._planner is None:
            assert self.reading.limits is not None
            config, timeout = read_client_file(self.reading.client)
            reading = self.reading
            self._planner = Planner.connected(
                reading.topic, config, timeout, self.reading.limits, reading.archive, reading.void
            )
        return self._planner

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The offsets of a checkpoint's first batch."""
        return self._named(self.reading.starts)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """None: the planner decides."""
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802, ARG002
        """The end of the next batch; `start` if there is nothing new."""
        return self._named(self.planner.next_end(self._offsets(start)))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Note the present end of the topic: the query ends there."""
        self.planner.stop_at_present_end()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One partition for records that are sent along, else one per task."""
        starts, ends = self._offsets(start), self._offsets(end)
        spans = self.reading.void.clipped(spans_of(starts, ends))
        self._sent = None
        if not spans:
            return []
        if (records := self.planner.take(spans, BLOCK)) is not None:
            kept = map(self.reading.void.kept, records)
            self._sent = (start, end, [self.reading.blocks.of(each) for each in kept])
            return [RangePartition(spans)]
        return grouped(starts, ends, self.reading.workers, self.planner.first)

    def getCache(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[Any] | None:  # noqa: N802 - Spark's name
        """The records that are sent along with the plan."""
        if self._sent is None or self._sent[:2] != (start, end):
            return None
        batches, self._sent = self._sent[2], None
        return iter(batches)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing: the checkpoint has the position."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of the ranges, in a worker."""
        return read(self.reading, partition)

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()

    def _offsets(self, offset: dict[str, Any]) -> dict[int, int]:
        return {int(p): int(o) for p, o in offset.get(self.reading.topic, {}).items()}

    def _named(self, offsets: Mapping[int, int]) -> dict[str, Any]:
        """The offsets in the form of the checkpoint."""
        return {self.reading.topic: {str(p): offsets[p] for p in sorted(offsets)}}


def read(reading: Reading, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The records of a partition's ranges, by a reader of this process that read for the same source before."""
    assert isinstance(partition, RangePartition)
    _close_old()
    config, timeout = read_client_file(reading.client)
    key = (reading.client, reading.name, reading.topic)
    reader = _readers.pop(key, None) or RangeReader(reading.topic, config, timeout)

    def look() -> Firsts:
        from streaming_jobs.sources.topics import Topics

        return Topics(config, timeout).offsets(reading.topic).earliest

    try:
        spans = reading.void.clipped(partition.spans)
        for records in read_ranges(reader, spans, BLOCK, reading.archive, partition.first, look):
            yield reading.blocks.of(reading.void.kept(records))
    except BaseException:  # it may be in the middle of a range, or its connection may be at fault
        reader.close()
        raise
    _readers[key] = reader


def _close_old() -> None:
    """Close the readers of sessions that have ended: their client files are gone."""
    for key in [key for key in _readers if not key[0].exists()]:
        _readers.pop(key).close()


def spans_of(start: Mapping[int, int], end: Mapping[int, int]) -> dict[int, Span]:
    """The ranges between two positions, without empty ones; a partition that is new starts at its beginning."""
    return {p: (start.get(p, 0), last) for p, last in end.items() if last > start.get(p, 0)}


def grouped(
    start: Mapping[int, int], end: Mapping[int, int], groups: int, first: Firsts | None = None
) -> list[RangePartition]:
    """The ranges in groups, one per task; a partition of the topic is in the same group in every batch."""
    parts: dict[int, dict[int, Span]] = {}
    for partition, span in spans_of(start, end).items():
        parts.setdefault(partition % groups, {})[partition] = span
    return [RangePartition(spans, first) for _, spans in sorted(parts.items())]
