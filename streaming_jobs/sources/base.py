"""What a batch asks of where its records come from: the seam between `runtime/batch.py` and sources."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from streaming_jobs.positions import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
