"""A Kafka topic as a stream of decoded records, and the same offsets once more as a batch.

The streaming frame counts its bad records on the way (`observe`) and leaves them out; `bad_records` reads the
batch's own offsets again and keeps nothing else. Both use the same decoding, so what one leaves out the other finds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from streaming_jobs.durations import milliseconds
from streaming_jobs.ledger import OffsetRange
from streaming_jobs.stream import SOURCE_COLUMN, KafkaTopic

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


@dataclass(frozen=True)
class KafkaSource:
    """One source of one stream. `connection` holds Spark's `kafka.` options, `lateness` the watermark delay."""

    parameter: str
    topic: KafkaTopic
    connection: Mapping[str, str]
    lateness: timedelta | None

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
        judged = self._judged(raw).observe(self.observation, F.count_if(F.col("_bad")).alias("bad"))
        frame = judged.where(~F.col("_bad")).select("_record.*", self._position().alias(SOURCE_COLUMN))
        if self.topic.event_time and self.lateness is not None:
            frame = frame.withWatermark(self.topic.event_time, f"{milliseconds(self.lateness)} milliseconds")
        return frame

    def bad_records(self, spark: SparkSession, offsets: OffsetRange) -> DataFrame:
        """The refused records of a range: topic, partition, offset, timestamp, key, value, headers."""
        raw = (
            spark.read.format("kafka")
            .options(**self._options(headers=True))
            .option("startingOffsets", json.dumps({self.topic.name: _whole(offsets)}))
            .option("endingOffsets", json.dumps({self.topic.name: offsets.end}))
            .load()
        )
        columns = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
        return self._judged(raw).where("_bad").select(*columns)

    def diagnose(self, value: bytes | None) -> tuple[str, str]:
        """Reason and detail of why a record's value is refused."""
        if value is None:
            return "tombstone", "the value is null and the stream does not take tombstones"
        return self.topic.value.diagnose(value)

    def _options(self, *, headers: bool) -> dict[str, str]:
        return {
            **self.connection,
            "subscribe": self.topic.name,
            "kafka.isolation.level": "read_committed",
            "failOnDataLoss": "true",
            "includeHeaders": str(headers).lower(),
        }

    def _judged(self, raw: DataFrame) -> DataFrame:
        decoded = self.topic.value.decode(raw, "value")
        refuse_null = F.lit(self.topic.tombstones == "dead_letter")
        return decoded.withColumn("_bad", F.when(F.col("value").isNull(), refuse_null).otherwise(F.col("_bad")))

    def _position(self) -> Column:
        columns = [F.col(c) for c in ("topic", "partition", "offset", "timestamp", "key")]
        columns += [F.col("headers")] if self.topic.headers else []
        return F.struct(*columns, F.col("value").isNull().alias("tombstone"))


def _whole(offsets: OffsetRange) -> dict[int, int]:
    """A start for every partition of the end: one that is new in this batch starts at its beginning (-2)."""
    return {partition: offsets.start.get(partition, -2) for partition in offsets.end}
