"""A topic in memory: a source of batches (`Source` in `sources/base.py`), and a reader of topics (`TopicReader`).

topic = MemoryTopic("things", {0: [MemoryRecord(b'{"n": 1}'), MemoryRecord(b"{")]}, refuse=no_json)
topic.bad_records(spark, offsets).toArrow()     # the second one; `spark` is not used
topic.latest("things")                          # {0: 2}

`FileClients` let the processes of Spark read topics that lie in a file, where they read Kafka otherwise.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from streaming_jobs.declare.names import cluster_of
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.positions import OffsetBounds, OffsetRange
from streaming_jobs.sources.topics import KEEP_FOREVER, TopicInfo

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.sources.range_reader import RangeReader
    from streaming_jobs.storage.locations import Location

_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("reason", pa.string()),
        ("detail", pa.string()),
    ]
)


@dataclass(frozen=True)
class MemoryRecord:
    """A record; `timestamp_ms` since 1970, which is its event time too. The offset is its place in the partition."""

    value: bytes | None
    key: bytes | None = None
    timestamp_ms: int = 0
    headers: Sequence[tuple[str, bytes | None]] = ()


def every_value_is_good(_: bytes | None) -> None:
    """No refusal."""


@dataclass(frozen=True)
class ArrowFrame:
    """Rows where a Spark frame is wanted; only `toArrow` is there."""

    table: pa.Table

    def toArrow(self) -> pa.Table:  # noqa: N802 - Spark's name
        return self.table


@dataclass
class MemoryTopic:
    """One topic. `refuse` gives reason and detail of a bad value, None for a good one; without it every value is good.

    Offsets below `first` are gone, as retention takes them.
    """

    name: str
    partitions: Mapping[int, Sequence[MemoryRecord]]
    refuse: Callable[[bytes | None], tuple[str, str] | None] = every_value_is_good
    lateness: timedelta | None = None
    topic_id: str = "memory"
    first: Mapping[int, int] = field(default_factory=dict)

    @property
    def observation(self) -> str:
        """The name of the metrics in which its bad records are counted."""
        return f"memory_{self.name}"

    def records(self, offsets: OffsetRange) -> Iterator[tuple[int, int, MemoryRecord]]:
        """(partition, offset, record) of a range."""
        for partition, end in sorted(offsets.end.items()):
            for offset in range(offsets.start.get(partition, 0), end):
                yield partition, offset, self.partitions[partition][offset]

    def rows(self, offsets: OffsetRange) -> int:
        return offsets.records

    def late_records(self, spark: SparkSession, offsets: OffsetRange, watermark_ms: int) -> int:
        """Good records of a range whose event time is at or behind a watermark."""
        return sum(r.timestamp_ms <= watermark_ms and self.refuse(r.value) is None for *_, r in self.records(offsets))

    def bad_records(self, spark: SparkSession, offsets: OffsetRange) -> DataFrame:
        """The refused records of a range, as an `ArrowFrame`."""
        rows = [
            {
                "topic": self.name,
                "partition": partition,
                "offset": offset,
                "timestamp": datetime.fromtimestamp(record.timestamp_ms / 1000, UTC),
                "key": record.key,
                "value": record.value,
                "reason": verdict[0],
                "detail": verdict[1],
            }
            for partition, offset, record in self.records(offsets)
            if (verdict := self.refuse(record.value)) is not None
        ]
        return cast("DataFrame", ArrowFrame(pa.Table.from_pylist(rows, schema=_SCHEMA)))

    def bad_rows(self, spark: SparkSession, offsets: OffsetRange, count: int) -> pa.Table:
        """`bad_records` as a table."""
        return self.bad_records(spark, offsets).toArrow()

    def describe(self, name: str) -> TopicInfo | None:
        known = name == self.name
        return TopicInfo(name, self.topic_id, len(self.partitions), KEEP_FOREVER, "delete") if known else None

    def offsets(self, name: str) -> OffsetBounds:
        """First and next offset of every partition; raises UsageError for another name."""
        if name != self.name:
            raise UsageError(f"there is no topic {name}", f"the only one is {self.name}")
        return OffsetBounds(
            {partition: self.first.get(partition, 0) for partition in self.partitions},
            {partition: len(records) for partition, records in self.partitions.items()},
        )

    def latest(self, name: str) -> dict[int, int]:
        """Next offset of every partition; raises UsageError for another name."""
        return self.offsets(name).latest

    def high_watermarks(self, name: str) -> dict[int, int]:
        """The same: no transaction is open."""
        return self.latest(name)

    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:
        """By partition the first offset that is there whose timestamp is at or after `ms`, or the end."""
        bounds = self.offsets(name)
        return {
            partition: next(
                (o for o in range(bounds.earliest[partition], end) if self.partitions[partition][o].timestamp_ms >= ms),
                end,
            )
            for partition, end in bounds.latest.items()
        }

    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:
        """Bytes of key and value of an average record from `starts` on; None if there is none."""
        ends = self.latest(name)
        sizes = [
            len(record.key or b"") + len(record.value or b"")
            for partition, start in starts.items()
            for record in self.partitions[partition][start : ends[partition]]
        ]
        return sum(sizes) / len(sizes) if sizes else None


@dataclass(frozen=True)
class MemoryTopics:
    """Several topics in memory as a reader of topics."""

    topics: Mapping[str, MemoryTopic]

    def names(self, cluster: str = "") -> set[str]:
        return {name for name in self.topics if cluster_of(name) == cluster}

    def describe(self, name: str) -> TopicInfo | None:
        return self.topics[name].describe(name) if name in self.topics else None

    def offsets(self, name: str) -> OffsetBounds:
        return self._topic(name).offsets(name)

    def latest(self, name: str) -> dict[int, int]:
        return self.offsets(name).latest

    def high_watermarks(self, name: str) -> dict[int, int]:
        return self.latest(name)

    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:
        return self._topic(name).offsets_for_time(name, ms)

    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:
        return self._topic(name).mean_size(name, starts)

    def _topic(self, name: str) -> MemoryTopic:
        if name not in self.topics:
            raise UsageError(f"there is no topic {name}", f"the topics are {', '.join(sorted(self.topics))}")
        return self.topics[name]


class FileClients:
    """Clients of topics that `save` has written to the session's file (`TopicClients` in `sources/kafka.py`)."""

    @staticmethod
    def save(topics: MemoryTopics, file: Path) -> Path:
        """Write the topics. Readers keep what they have read, so each content needs a file of its own."""
        file.write_bytes(pickle.dumps(topics))
        return file

    def topics(self, topic: str, client: Location) -> MemoryTopics:
        topics = pickle.loads(client.read_bytes())  # noqa: S301 - written by `save`
        assert isinstance(topics, MemoryTopics)
        return topics

    def reader(self, topic: str, client: Location, *, ahead: int | None = None) -> RangeReader:
        """The reader that reads Kafka, with a consumer in memory."""
        from streaming_jobs.sources.range_reader import RangeReader
        from streaming_jobs.testing.consumer import MemoryConsumer, record

        partitions = self.topics(topic, client).topics[topic].partitions
        log = {
            partition: {
                offset: record(
                    partition,
                    offset,
                    each.value,
                    topic=topic,
                    key=each.key,
                    timestamp=(1, each.timestamp_ms),
                    headers=list(each.headers) or None,
                )
                for offset, each in enumerate(records)
            }
            for partition, records in partitions.items()
        }
        config = {"bootstrap.servers": str(client)}
        return RangeReader(topic, config, timedelta(seconds=5), ahead or 1, connect=lambda _: MemoryConsumer(log))
