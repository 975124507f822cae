"""The seams between a stream and its topics: `Source` for batches, `TopicReader` for planning and checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from streaming_jobs.declare.format import Refusal
from streaming_jobs.ledger.positions import OffsetBounds, OffsetRange

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.sources.record_blocks import ArchivedRecords

Span = tuple[int, int]
"""The first offset of a range, and the one after its last."""
Aside = Mapping[tuple[int, int], Refusal | None]
"""By partition and offset the records of a topic that are set aside: their dead letter, or None for no dead letter."""


@dataclass(frozen=True)
class SourceCounts:
    """The counts of one source in the batch whose plan ran last; times in microseconds since 1970.

    `newest` is the largest record timestamp of the good records, if these have an event time, else None. Each further
    figure would cost a few percent of the rate at which a backlog is read.
    """

    bad: int = 0
    newest: int | None = None


class Source(Protocol):
    @property
    def name(self) -> str:
        """The name of the source in ledger entries."""

    @property
    def observation(self) -> str:
        """The name of the metrics in which Spark counts its bad records."""

    @property
    def lateness(self) -> timedelta | None:
        """The watermark delay; None without an event time."""

    def rows(self, offsets: OffsetRange) -> int:
        """Records in a range: of a topic its offsets, markers included; of a table the rows of its versions."""

    def late_records(self, spark: SparkSession, offsets: OffsetRange, watermark_ms: int) -> int:
        """Good records of a range whose event time is at or behind a watermark (ms since 1970)."""

    def bad_records(self, spark: SparkSession, offsets: OffsetRange) -> DataFrame:
        """The refused records of a range: topic, partition, offset, timestamp, key, value, headers, reason, detail."""

    def bad_rows(self, spark: SparkSession, offsets: OffsetRange, count: int) -> pa.Table:
        """`bad_records`, of which the range has `count`, in the driver's memory."""


NOT_SHOWN = "unknown"
"""The clean-up policy of a topic whose settings the user may not see."""
KEEP_FOREVER = -1
"""retention.ms of a topic that keeps all records, such as one whose record timestamps are of 2013."""


@dataclass(frozen=True)
class TopicInfo:
    """A topic as the broker describes it; `id` differs between a topic and the one recreated under its name.

    Without the right to see the topic's settings, they have Kafka's defaults, and `cleanup_policy` is `NOT_SHOWN`.
    """

    name: str
    id: str
    partitions: int
    retention_ms: int = KEEP_FOREVER
    cleanup_policy: str = NOT_SHOWN
    replicas: int = 1
    min_insync_replicas: int = 1
    max_message_bytes: int = 1_048_588
    """Of a batch of records, as Kafka's default."""


class TopicEnds(Protocol):
    def latest(self, name: str) -> dict[int, int]:
        """Next offset of every partition; raises a RecourseError if no broker answers in time."""

    def high_watermarks(self, name: str) -> dict[int, int]:
        """The same with the records of open transactions, which are not readable yet."""


class TopicReader(TopicEnds, Protocol):
    """Topics as they are now. Every call has a deadline, and raises BrokerUnreachable if no broker answers in time."""

    def describe(self, name: str) -> TopicInfo | None:
        """The topic of that name; None if there is none."""

    def offsets(self, name: str) -> OffsetBounds:
        """First and next offset of every partition; raises UsageError if there is no such topic."""

    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:
        """By partition the first offset whose record timestamp is at or after `ms` (Unix, milliseconds), or the end."""

    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:
        """Bytes of key and value of an average record from `starts` on; None if none could be read."""


class Archive(Protocol):
    """The records of one topic outside of Kafka; it is pickled into the processes that read."""

    @property
    def name(self) -> str:
        """The archive's name."""

    def bounds(self) -> Mapping[int, Span]:
        """By partition the offsets that it covers as of now, all of them; a partition without any is left out.

        If it has no record of such an offset, Kafka had returned none either.
        """

    def read(self, partition: int, span: Span, most: int) -> Iterator[ArchivedRecords]:
        """Yields the records of a range that it covers in the order of offsets, at most `most` at a time."""

    def first_at(self, ms: int, spans: Mapping[int, Span]) -> Mapping[int, int]:
        """By partition the first offset of a range whose timestamp is at or after `ms`; those without are left out."""

    def mean_size(self, starts: Mapping[int, int]) -> float | None:
        """Bytes of key and value of an average record from `starts` on; None without any."""
