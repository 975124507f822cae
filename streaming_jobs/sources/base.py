"""The seams between a stream and its topics: `Source` for its batches, `TopicReader` for those who plan and check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from streaming_jobs.positions import OffsetBounds, OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.sources.topics import TopicInfo

AHEAD = "_ahead"
"""Column of a refused record: what is wrong with its event time, or null where something else is."""


@dataclass(frozen=True)
class Observed:
    """What was counted of one source in the batch whose plan ran last; times in microseconds since 1970.

    `newest` is the largest record timestamp of the good records, where these have an event time; None without one.
    Each further figure costs a few percent of a backlog's rate.
    """

    bad: int = 0
    newest: int | None = None


class Source(Protocol):
    """One input of one stream."""

    @property
    def name(self) -> str:
        """The name that ledger entries have for it."""

    @property
    def observation(self) -> str:
        """Under which name Spark counts its bad records."""

    @property
    def lateness(self) -> timedelta | None:
        """How late a record may be; None without an event time."""

    def late_records(self, spark: SparkSession, offsets: OffsetRange, watermark_ms: int) -> int:
        """Good records of a range whose event time is at or behind a watermark (ms since 1970)."""

    def bad_records(self, spark: SparkSession, offsets: OffsetRange) -> DataFrame:
        """The refused records of a range: topic, partition, offset, timestamp, key, value, headers, and AHEAD."""

    def diagnose(self, value: bytes | None) -> tuple[str, str]:
        """Reason and detail of why a record's value is refused."""


class TopicEnds(Protocol):
    """The ends of topics, as they are now."""

    def latest(self, name: str) -> dict[int, int]:
        """Next offset of every partition; raises a RecourseError when nobody answers in time."""


class TopicReader(TopicEnds, Protocol):
    """Topics as they are now. Every call has a deadline, and raises BrokerUnreachable when nobody answers in time."""

    def describe(self, name: str) -> TopicInfo | None:
        """The topic of that name; None if there is none."""

    def offsets(self, name: str) -> OffsetBounds:
        """First and next offset of every partition; raises UsageError if there is no such topic."""

    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:
        """By partition the first offset whose record timestamp is at or after `ms` (Unix, milliseconds), or the end."""

    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:
        """Bytes of key and value of an average record from `starts` on; None if none could be read."""
