"""The records that come too late for a window, kept in `<table>_late` by the batch that drops them.

Spark drops a record for each window whose end is at or before the watermark of the batch before. It says how many rows
it has dropped, not which. So the batch's range is read once more, for the records of which the first window has ended
by then; a record that is late for one window and in time for another, of windows that overlap, is among them.

    range of the batch -> event time <= watermark -> end of the first window <= watermark
                                                       |-> the stream's function -> days of the rows that lack them
                                                       '-> topic, partition, offset, key, event time, days

A record of a day of which the function makes no row is not kept. The rebuild of a slice (`reprocessing/slices`) reads
the records from their topic again, so their values are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING

from streaming_jobs.declare.slices import slice_range
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime.sliceable import Sliceable, check_plan, sliceable
from streaming_jobs.runtime.spark_plan import EventWindows, analysed
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite, Sink
from streaming_jobs.sources.kafka import KafkaSource
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from streaming_jobs.sources.data_source import FrameSource


@dataclass(frozen=True)
class LateRecords:
    """Finds the late records of one table, whose windows are all of those of the stream's function."""

    made: Sliceable
    source: KafkaSource
    windows: tuple[EventWindows, ...]

    @classmethod
    def of(cls, spark: SparkSession, stream: Stream, table: str, sources: Sequence[FrameSource]) -> LateRecords:
        """Raises UsageError for a function of which late records cannot be kept, since no slice can be rebuilt."""
        from pyspark.errors import PySparkException

        try:
            made = sliceable(stream, table)
            source = next(each for each in sources if isinstance(each, KafkaSource))
            output = stream.outputs(**{made.parameter: source.batch(spark, {}, {})})[made.sink]
            windows = check_plan(made, analysed(output))
        except UsageError as error:
            raise _refusal(table, error.found) from error
        except PySparkException as error:
            words = str(error).splitlines()[0]
            raise _refusal(table, f"the function cannot run on a batch of records: {words}") from error
        if not windows or made.event_time != made.topic.time_column:
            of = f"stream {stream.name} has no windows of the event time of topic {made.topic.name}"
            raise _refusal(table, f"{of}, so no record is too late")
        return cls(made, source, windows)

    def prepared(
        self,
        spark: SparkSession,
        sink: Sink,
        offsets: OffsetRange,
        watermark_ms: int,
        rows: BatchOfRows,
        held: ExitStack,
    ) -> PendingWrite | None:
        """The late records of a batch's range for their table; None if no row lacks them."""
        from pyspark.sql import functions as F

        read = self.source.late(spark, offsets, watermark_ms).where(self._misses_a_window(watermark_ms)).persist()
        held.callback(read.unpersist)
        days = self._days(read)
        if not days:
            return None
        late = read.select(
            *("topic", "partition", "offset", "key"),
            F.timestamp_micros(self.source.event_micros).alias("event_time"),
            F.timestamp_millis(F.lit(watermark_ms)).alias("watermark"),
            self._of_record(days).alias("days"),
            F.lit(rows.generation).alias("generation"),
            F.lit(rows.batch).cast("long").alias("batch"),
        ).where(F.size("days") > 0)
        return sink.prepare(sink.fit(late, []), rows)

    def _misses_a_window(self, watermark_ms: int) -> Column:
        """True if a window of the record has ended by the watermark; windows have their begin, and not their end."""
        from pyspark.sql import functions as F

        at = self.source.event_micros
        ends = [
            at + F.lit(each.slide) - F.pmod(at - F.lit(each.start + each.length), F.lit(each.slide))
            for each in self.windows
        ]
        return reduce(lambda one, other: one | other, (end <= F.lit(watermark_ms * 1000) for end in ends))

    def _days(self, read: DataFrame) -> list[date]:
        """The days, in the calendar of the slices, of the rows that the stream's function makes of the records."""
        from pyspark.sql import functions as F

        output = self.made.stream.outputs(**{self.made.parameter: self.source.good(read)})[self.made.sink]
        column = F.col(f"`{self.made.slices.column}`")
        if output.schema[self.made.slices.column].dataType.typeName() != "date":
            column = F.to_date(F.from_utc_timestamp(column.cast("timestamp"), self.made.slices.zone))
        return sorted(row[0] for row in output.select(column).distinct().collect() if row[0] is not None)

    def _of_record(self, days: Sequence[date]) -> Column:
        """Those of the days whose slices are made from a record, by its event time."""
        from pyspark.sql import functions as F

        known, reach = [], self.made.slices.distance
        for day in days:
            chosen = slice_range(self.made.slices, "timestamp", day.isoformat(), None)
            first, last = F.lit(_micros(chosen.begin - reach)), F.lit(_micros(chosen.end + reach))
            known.append(F.struct(F.lit(day).alias("day"), first.alias("first"), last.alias("last")))
        moment = self.source.event_micros
        of_record = F.filter(F.array(*known), lambda each: (each["first"] <= moment) & (moment < each["last"]))
        return F.transform(of_record, lambda each: each["day"])


def _refusal(table: str, why: str) -> UsageError:
    return UsageError(f"late_rows='keep' of table {table}: {why}", "write late_rows='count'")


def _micros(at: datetime) -> int:
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
