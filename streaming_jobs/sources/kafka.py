"""A Kafka topic as a source of a stream: librdkafka reads it, Arrow carries it into the JVM (`data_source.py`).

The planner of a live stream receives records all the time, and sends those of a small batch along with its plan.
Nothing secret travels: a reading knows the path of a file that holds the properties of Kafka's client
(`connection.py`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from streaming_jobs.declare.names import cluster_of
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.sources.archived_ranges import Firsts, read_ranges
from streaming_jobs.sources.base import Archive, Aside, Span, TopicReader
from streaming_jobs.sources.connection import SessionSchemas, is_client_gone, read_client_file
from streaming_jobs.sources.data_source import FrameSource, Reading, Split
from streaming_jobs.sources.planner import FETCH_AHEAD, Planner
from streaming_jobs.sources.range_reader import RangeReader
from streaming_jobs.sources.read_times import ReadTimes
from streaming_jobs.sources.record_blocks import LARGEST_MS, RecordBlocks, first_reads
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges
from streaming_jobs.storage.locations import Location
from streaming_jobs.stream import KafkaTopic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

BLOCK = 10_000
"""Records of one Arrow batch, about."""
_BRIEFLY = 10
"""Milliseconds that a fetch of the driver's readers may last: they jump from range to range, and rest between."""
_LAST = 50
"""Records to inspect at the end of a range: a transaction's marker is an offset without a record."""


class TopicClients(Protocol):
    """Makes the clients of topics in the processes that read, into which it is pickled; `client` is the session's file.

    `streaming_jobs.testing` has topics in a file.
    """

    def reader(self, topic: str, client: Location, *, ahead: int | None = None) -> RangeReader:
        """A reader of a topic's ranges; `ahead`: records that it fetches ahead."""

    def topics(self, topic: str, client: Location) -> TopicReader:
        """The topics of this one's cluster as they are now."""


class KafkaClients:
    """Clients of the clusters whose properties are in the file."""

    def reader(self, topic: str, client: Location, *, ahead: int | None = None) -> RangeReader:
        config, timeout = read_client_file(client, topic)
        return RangeReader(topic, config, timeout) if ahead is None else RangeReader(topic, config, timeout, ahead)

    def topics(self, topic: str, client: Location) -> TopicReader:
        from streaming_jobs.sources.topics import Topics

        return Topics(*read_client_file(client, topic), cluster_of(topic))


KAFKA = KafkaClients()

_readers: dict[tuple[Location, Hashable, str], RangeReader] = {}
"""The readers of this process by client file, purpose and topic; they stay connected from batch to batch."""


class RangePartition(InputPartition):
    """Ranges of a topic's partitions that one task reads; `first` are the offsets at which Kafka began, if known."""

    def __init__(self, spans: Mapping[int, Span], first: Firsts | None = None) -> None:
        self.spans = dict(spans)
        self.first = dict(first or {})


@dataclass(frozen=True, kw_only=True)
class TopicReading(Reading[Planner]):
    """A topic to read: its records as `blocks` wants them, with the client of a file.

    `archive` has what the topic no longer has. Records in the `void` ranges are left out.
    """

    blocks: RecordBlocks
    client: Location
    archive: Archive | None = None
    void: VoidRanges = NO_VOID
    clients: TopicClients = KAFKA

    @property
    def schema(self) -> StructType:
        return self.blocks.spark_schema

    @property
    def source(self) -> str:
        return self.blocks.declared.name

    def planner(self) -> Planner:
        assert self.limits is not None
        topics = self.clients.topics(self.source, self.client)
        reader = self.clients.reader(self.source, self.client, ahead=FETCH_AHEAD)
        return Planner(topics, reader, self.limits, archive=self.archive, void=self.void)

    def parts(self) -> Sequence[InputPartition]:
        assert self.ends is not None
        return grouped(self.starts, self.ends, self.workers)

    def split(self, planner: Planner, starts: dict[int, int], ends: dict[int, int]) -> Split:
        times, spans = ReadTimes(), self.void.clipped(spans_of(starts, ends))
        with times.reading():
            records = planner.take(spans, BLOCK) if spans else None
        if records is None:
            times.note_batch(self.times)
            return grouped(starts, ends, self.tasks, planner.first) if spans else [], None
        began = time.thread_time()
        with times.decoding():
            decoded = [self.blocks.of(self.void.kept(each)) for each in records]
        planner.cost.decoded(sum(each.num_rows for each in decoded), time.thread_time() - began)
        times.note_batch(self.times)
        return [RangePartition(spans)], decoded

    def first_offsets(self) -> Firsts:
        """The offsets at which the topic begins now, by partition."""
        return self.clients.topics(self.source, self.client).offsets(self.source).earliest

    def read(self, part: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the records of a part's ranges, by a reader of this process that read for the same source before."""
        assert isinstance(part, RangePartition)
        with connected(self.clients, self.client, self.name, self.source) as reader, no_search_for_cycles():
            times, spans = ReadTimes(), self.void.clipped(part.spans)
            found = read_ranges(reader, spans, BLOCK, self.archive, part.first, self.first_offsets)
            for records in times.each_read(found):
                with times.decoding():
                    batch = self.blocks.of(self.void.kept(records))
                yield batch
            times.note_task(self.times)


@contextmanager
def connected(clients: TopicClients, client: Location, purpose: Hashable, topic: str) -> Iterator[RangeReader]:
    """A reader of a topic: that which read for the same purpose before in this process, unless another thread has it.

    It is kept afterwards, and closed if its reading fails.
    """
    _close_old()
    key = (client, purpose, topic)
    reader = _readers.pop(key, None) or clients.reader(topic, client)
    try:
        yield reader
    except BaseException:  # it may be in the middle of a range, or its connection may be at fault
        reader.close()
        raise
    if _readers.setdefault(key, reader) is not reader:
        reader.close()


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """Let the cyclic garbage collector of this process rest.

    It would traverse every message several times, a seventh of a task's time in Python. What is in a cycle, and no
    message is, stays until the end: for a task at most.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _close_old() -> None:
    """Close the readers of sessions that have ended: their client files are gone."""
    for key in [key for key in list(_readers) if is_client_gone(key[0])]:  # other threads change them meanwhile
        if (reader := _readers.pop(key, None)) is not None:
            reader.close()


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


@dataclass(frozen=True)
class KafkaSource(FrameSource):
    """One topic of one stream. `archive` has what the topic no longer has.

    Records in the `void` ranges are not read. Those `aside` are refused, whatever the format says. With
    `drops_refused`, records that the format refuses get no dead letter.
    """

    declared: KafkaTopic
    archive: Archive | None = None
    void: VoidRanges = NO_VOID
    clients: TopicClients = KAFKA
    aside: Aside = field(default_factory=dict)
    drops_refused: bool = False

    kind = "kafka"

    @property
    def fields(self) -> Sequence[str]:
        return list(self.declared.records.schema.fieldNames())

    def first_read(self, offsets: OffsetRange) -> int | None:
        """When the last records of a range were first read, if a replay has written them; milliseconds since 1970."""
        if not self.void.spans:
            return None
        spans = {p: (max(offsets.start.get(p, 0), end - _LAST), end) for p, end in offsets.end.items()}
        reader = self.clients.reader(self.name, self.client)
        try:
            blocks = [self.void.kept(each) for each in read_ranges(reader, self.void.clipped(spans), _LAST)]
        finally:
            reader.close()
        times = [time for each in blocks for time in first_reads(each.column("headers")).tolist() if time < LARGEST_MS]
        return max(times, default=None)

    def read(self, rows: Literal["all", "refused"], offsets: OffsetRange) -> pa.Table:
        """The records of a range as in `judged`, or those as in `bad_records`: read by this process, without Spark."""
        reading = self._reading(self.name, rows, offsets.start)
        with connected(self.clients, self.client, (self.clients, rows), self.name) as reader:
            reader.fetch_wait_ms = _BRIEFLY
            spans = self.void.clipped(spans_of(offsets.start, offsets.end))
            offsets_in = sum(end - begin for begin, end in spans.values())
            most = max(min(offsets_in, BLOCK), 1)  # the reader waits for as many
            records = read_ranges(reader, spans, most, self.archive, None, reading.first_offsets)
            blocks = [reading.blocks.of(self.void.kept(each)) for each in records]
            reader.release()
        return pa.Table.from_batches(blocks, reading.blocks.schema)

    def bad_rows(self, spark: SparkSession, offsets: OffsetRange, count: int) -> pa.Table:  # noqa: ARG002 - it does without
        """Reads no further than the records that are set aside, if these are all."""
        around = self._around_aside(offsets, count)
        if around is not None and (found := self.read("refused", around)).num_rows == count:
            return found
        return self.read("refused", offsets)

    def _around_aside(self, offsets: OffsetRange, count: int) -> OffsetRange | None:
        """A range from its first to its last record that is set aside, by partition; None unless these are `count`."""
        letters: dict[int, list[int]] = {}
        for (partition, offset), refusal in self.aside.items():
            if refusal is not None and offsets.start.get(partition, 0) <= offset < offsets.end.get(partition, 0):
                letters.setdefault(partition, []).append(offset)
        if sum(map(len, letters.values())) != count:
            return None
        ends = {p: max(found) + 1 for p, found in letters.items()}
        return replace(offsets, start={p: min(found) for p, found in letters.items()}, end=ends)

    def rows(self, offsets: OffsetRange) -> int:
        """The offsets in the range that are not void."""
        return offsets.records - self.void.count({p: (offsets.start.get(p, 0), end) for p, end in offsets.end.items()})

    def _reading(
        self, name: str, rows: Literal["all", "refused"], start: Mapping[int, int], used: Location | None = None
    ) -> TopicReading:
        return TopicReading(
            name,
            dict(start),
            blocks=RecordBlocks(
                self.declared.bound(SessionSchemas(self.client)),
                rows,
                used,
                recovered=bool(self.void.spans),
                aside=self.aside,
                drops_refused=self.drops_refused,
            ),
            client=self.client,
            archive=self.archive,
            void=self.void,
            clients=self.clients,
        )

    @property
    def _position(self) -> Sequence[str]:
        further = ("timestamp_type", "headers")
        wanted = [name for name in further if getattr(self.declared, name)]
        return ["topic", "partition", "offset", "timestamp", "key", *wanted, "tombstone"]
