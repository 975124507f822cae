"""What a topic holds, read from its first record to its last by confluent-kafka alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from numpy.typing import NDArray

from streaming_jobs.errors import UsageError
from streaming_jobs.settings import KafkaSettings
from streaming_jobs.sources.connection import Failures, client_config
from streaming_jobs.sources.topics import Topics

_AT_ONCE = 10_000
_NOBODY = "recourse-verifier"


@dataclass(frozen=True)
class PartitionContent:
    """One partition: first offset, the one after the last stable one, and the committed records with their keys."""

    low: int
    high: int
    offsets: NDArray[np.int64]
    keys: tuple[bytes | None, ...] = field(repr=False)


@dataclass(frozen=True)
class TopicContent:
    """A topic as it is now. Offsets between records belong to transaction markers and aborted or compacted records."""

    name: str
    topic_id: str
    partitions: Mapping[int, PartitionContent]

    @property
    def records(self) -> int:
        """Committed records in all partitions."""
        return sum(len(content.offsets) for content in self.partitions.values())


def read_topic(kafka: KafkaSettings, bootstrap: str, name: str) -> TopicContent:
    """Read the whole topic as a consumer that sees committed records only.

    Raises UsageError when there is no such topic, BrokerUnreachable when no record comes for `kafka.timeout`.
    """
    info = Topics.of(kafka, bootstrap).describe(name)
    if info is None:
        raise UsageError(f"there is no topic {name} at {bootstrap}", "create it, or check its name")
    failures = Failures(bootstrap)
    config: dict[str, Any] = client_config(kafka, bootstrap) | {
        "group.id": _NOBODY,
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
        "error_cb": failures,
    }
    consumer = Consumer(config)
    try:
        content = _Reading(kafka, consumer, failures, name)
        return TopicContent(name, info.id, {p: content.partition(p) for p in range(info.partitions)})
    finally:
        consumer.close()


@dataclass
class _Reading:
    kafka: KafkaSettings
    consumer: Consumer
    failures: Failures
    topic: str

    def partition(self, number: int) -> PartitionContent:
        place = TopicPartition(self.topic, number)
        try:
            low, _ = self.consumer.get_watermark_offsets(place, timeout=self.kafka.timeout.total_seconds())
        except KafkaException as error:
            raise self.failures.unreachable(f"watermarks of {self.topic}-{number}", self.kafka.timeout) from error
        self.consumer.assign([TopicPartition(self.topic, number, low)])
        offsets: list[int] = []
        keys: list[bytes | None] = []
        high = self._records(number, offsets, keys)
        return PartitionContent(low, high, np.array(offsets, dtype=np.int64), tuple(keys))

    def _records(self, number: int, offsets: list[int], keys: list[bytes | None]) -> int:
        """Collect to the end of the partition, and return where that is."""
        moved = time.monotonic()
        while True:
            for message in self.consumer.consume(_AT_ONCE, timeout=0.1):
                moved = time.monotonic()
                error, offset = message.error(), message.offset()
                assert offset is not None
                if error is None:
                    offsets.append(offset)
                    keys.append(message.key())
                elif error.code() == KafkaError._PARTITION_EOF:
                    return offset
            self.failures.check()
            if time.monotonic() - moved > self.kafka.timeout.total_seconds():
                raise self.failures.unreachable(f"read topic {self.topic}, partition {number}", self.kafka.timeout)
