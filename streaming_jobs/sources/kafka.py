"""A Kafka topic as a stream of decoded records, and the same offsets once more as a batch.

The streaming frame counts its bad records on the way (`observe`) and leaves them out; `bad_records` reads the
offsets of the batch again and returns only those. Both use the same decoding, so each record is in exactly one of
them. `late_records` uses it too: Spark's state only reports that it dropped rows, and `late_records` counts the records
behind the watermark.

The bound on an event time ahead is measured against the record's own timestamp, not against the clock: a replay a
year later gives the same verdict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from streaming_jobs.columns import SOURCE_COLUMN
from streaming_jobs.durations import milliseconds
from streaming_jobs.positions import OffsetRange
from streaming_jobs.sources.base import AHEAD
from streaming_jobs.stream import KafkaTopic

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


_LONGEST_MS = 100_000 * 365 * 86_400_000


@dataclass(frozen=True)
class KafkaSource:
    """One source of one stream. `connection` holds Spark's `kafka.` options, `lateness` the watermark delay."""

    parameter: str
    topic: KafkaTopic
    connection: Mapping[str, str]
    lateness: timedelta | None

    @property
    def name(self) -> str:
        """The topic's name."""
        return self.topic.name

    @property
    def observation(self) -> str:
        """Name of the metrics that count this source's records."""
        return f"recourse_{self.parameter}"

    def stream(self, spark: SparkSession, *, start: Mapping[int, int], max_offsets: int) -> DataFrame:
        """The streaming frame of good records. `start` holds for a checkpoint's first batch only."""
        reader = spark.readStream.format("kafka").options(**self._options(headers=self.topic.headers))
        raw = (
            reader.option("startingOffsets", json.dumps({self.topic.name: start}))
            .option("maxOffsetsPerTrigger", max_offsets)
            .load()
        )
        frame = self._good(self._judged(raw).observe(self.observation, *self._counted()))
        if self.topic.event_time and self.lateness is not None:
            frame = frame.withWatermark(self.topic.event_time, f"{milliseconds(self.lateness)} milliseconds")
        return frame

    def batch(self, spark: SparkSession, start: Mapping[int, int], end: Mapping[int, int]) -> DataFrame:
        """The good records of a range as a batch frame; `start` and `end` name every partition of the topic."""
        raw = (
            spark.read.format("kafka")
            .options(**self._options(headers=self.topic.headers))
            .option("startingOffsets", json.dumps({self.topic.name: start}))
            .option("endingOffsets", json.dumps({self.topic.name: end}))
            .load()
        )
        return self._good(self._judged(raw))

    def bad_records(self, spark: SparkSession, offsets: OffsetRange) -> DataFrame:
        """The refused records of a range: topic, partition, offset, timestamp, key, value, headers, and AHEAD."""
        raw = self._again(spark, offsets)
        columns = ("topic", "partition", "offset", "timestamp", "key", "value", "headers", AHEAD)
        return self._judged(raw).where("_bad").select(*columns)

    def late_records(self, spark: SparkSession, offsets: OffsetRange, watermark_ms: int) -> int:
        """Good records of a range whose event time is at or behind a watermark."""
        event = self._event()
        if event is None:
            return 0
        late = F.unix_micros(event) <= F.lit(watermark_ms * 1000)
        return self._judged(self._again(spark, offsets)).where(~F.col("_bad") & late).count()

    def diagnose(self, value: bytes | None) -> tuple[str, str]:
        """Reason and detail of why a record's value is refused."""
        if value is None:
            return "tombstone", "the value is null and the stream does not take tombstones"
        return self.topic.value.diagnose(value)

    def _again(self, spark: SparkSession, offsets: OffsetRange) -> DataFrame:
        """The records of a range as a batch."""
        return (
            spark.read.format("kafka")
            .options(**self._options(headers=True))
            .option("startingOffsets", json.dumps({self.topic.name: _whole(offsets)}))
            .option("endingOffsets", json.dumps({self.topic.name: offsets.end}))
            .load()
        )

    def _options(self, *, headers: bool) -> dict[str, str]:
        return {
            **self.connection,
            "subscribe": self.topic.name,
            "kafka.isolation.level": "read_committed",
            "failOnDataLoss": "true",
            "includeHeaders": str(headers).lower(),
        }

    def _judged(self, raw: DataFrame) -> DataFrame:
        """The decoded records with `_bad`, and in AHEAD the text about an event time that is too far ahead."""
        decoded = self.topic.value.decode(raw, "value")
        refuse_null = F.lit(self.topic.tombstones == "dead_letter")
        judged = decoded.withColumn("_bad", F.when(F.col("value").isNull(), refuse_null).otherwise(F.col("_bad")))
        event, bound = self._event(), self.topic.ahead
        if event is None or bound is None:
            return judged.withColumn(AHEAD, F.lit(None).cast("string"))
        stamp = F.unix_micros(F.col("timestamp"))
        # try_add: the producer sets the timestamp, to any number. A negative one means that there is none.
        latest = F.try_add(stamp, F.lit(min(milliseconds(bound), _LONGEST_MS) * 1000))
        ahead = ~F.col("_bad") & (stamp >= 0) & (F.unix_micros(event) > latest)
        words = F.concat(
            F.lit(f"field '{self.topic.event_time}' is "),
            event.cast("string"),
            F.lit(f", more than {self.topic.max_ahead} after the record's own timestamp, "),
            F.col("timestamp").cast("string"),
        )
        judged = judged.withColumn(AHEAD, F.when(ahead, words))
        return judged.withColumn("_bad", F.col("_bad") | F.col(AHEAD).isNotNull())

    def _event(self) -> Column | None:
        """The event time of a decoded record; a time without a zone is UTC."""
        return F.col("_record")[self.topic.event_time].cast("timestamp") if self.topic.event_time else None

    def _counted(self) -> list[Column]:
        """The figures that are observed of a batch, in the order of `Observed`."""
        bad = F.col("_bad")
        counted = [F.count_if(bad).alias("bad")]
        if self.topic.event_time and self.lateness is not None:
            counted += [F.max(F.when(~bad, F.unix_micros("timestamp"))).alias("newest")]
        return counted

    def _good(self, judged: DataFrame) -> DataFrame:
        return judged.where(~F.col("_bad")).select("_record.*", self._position().alias(SOURCE_COLUMN))

    def _position(self) -> Column:
        columns = [F.col(c) for c in ("topic", "partition", "offset", "timestamp", "key")]
        columns += [F.col("headers")] if self.topic.headers else []
        return F.struct(*columns, F.col("value").isNull().alias("tombstone"))


def _whole(offsets: OffsetRange) -> dict[int, int]:
    """A start for every partition of the end: one that is new in this batch starts at its beginning (-2)."""
    return {partition: offsets.start.get(partition, -2) for partition in offsets.end}
