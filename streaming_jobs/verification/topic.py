"""The records of a topic, read by confluent-kafka alone, up to the end that it had when the reading began.

The ends are read first: the last stable offsets, which is where a consumer of committed records stops. Records that
arrive later are not read, so reading also ends for a topic that grows all the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from numpy.typing import NDArray

from streaming_jobs.declare.format import HeaderFrame, Headers
from streaming_jobs.declare.names import cluster_of, kafka_name
from streaming_jobs.errors import TransientError, UsageError
from streaming_jobs.settings import KafkaSettings
from streaming_jobs.sources.connection import Failures, client_config
from streaming_jobs.sources.topics import Topics
from streaming_jobs.text import commands
from streaming_jobs.verification.offset_ranges import Span, place_of

_RECORDS, _BYTES = 1_000, 16 << 20
"""The limits of a block of records whose values are decoded together."""
_AT_ONCE = 10_000
_NOBODY = "recourse-verifier"

Progress = Callable[[int], None]
"""Called with the number of offsets passed since its last call."""


class RawRecord(NamedTuple):
    """One committed record as the broker hands it out; `timestamp` in ms since 1970, None where it has none."""

    topic: str
    partition: int
    offset: int
    timestamp: int | None
    key: bytes | None
    value: bytes | None
    headers: Headers = ()

    @classmethod
    def of(cls, topic: str, partition: int, message: Message) -> RawRecord:
        kind, at = message.timestamp()
        offset = message.offset()
        assert offset is not None
        headers: Any = message.headers() or ()
        return cls(topic, partition, offset, at if kind else None, message.key(), message.value(), headers)

    @property
    def place(self) -> int:
        """Partition and offset as one number."""
        return place_of(self.partition, self.offset)

    @property
    def size(self) -> int:
        """The bytes of key, value and headers."""
        return sum(len(part) for part in (self.key, self.value, *(value for _, value in self.headers)) if part)

    def framed(self, frame: HeaderFrame | None) -> bytes | None:
        """The bytes that the reader of the topic's format gets."""
        return self.value if frame is None or self.value is None else frame.one(self.value, self.headers)


def blocks(records: Iterable[RawRecord]) -> Iterator[list[RawRecord]]:
    """The records in blocks, none of which is empty."""
    block: list[RawRecord] = []
    size = 0
    for record in records:
        block.append(record)
        size += record.size
        if len(block) == _RECORDS or size >= _BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


@dataclass(frozen=True)
class CommittedPartition:
    """One partition: its first offset, the offset after the last stable one, and the committed records' offsets."""

    low: int
    high: int
    offsets: NDArray[np.int64]


@dataclass(frozen=True)
class CommittedTopic:
    """The content of a topic. Offsets between records belong to transaction markers, aborted or compacted records."""

    name: str
    topic_id: str
    partitions: Mapping[int, CommittedPartition]

    @property
    def records(self) -> int:
        """Committed records in all partitions."""
        return sum(len(content.offsets) for content in self.partitions.values())

    @property
    def low(self) -> Mapping[int, int]:
        """The first offset of each partition."""
        return {number: content.low for number, content in self.partitions.items()}


class RecordReader(Protocol):
    """Reads records of one topic, repeatedly if needed."""

    def records(self, spans: Iterable[Span]) -> Iterator[RawRecord]:
        """The committed records in these ranges, partition by partition in order of their offsets."""


class DeadlinePassed(TransientError):
    """Reading a topic took longer than the deadline allows."""


@dataclass(frozen=True)
class CommittedReader:
    """Reads one topic between the offsets that it had at `at`; `until` is a deadline of `time.monotonic`."""

    kafka: KafkaSettings
    bootstrap: str
    name: str
    topic_id: str
    low: Mapping[int, int]
    high: Mapping[int, int]
    until: float | None = None

    @classmethod
    def at(cls, kafka: KafkaSettings, bootstrap: str, name: str, *, until: float | None = None) -> CommittedReader:
        """A reader of the topic's present content; raises UsageError if there is no such topic."""
        topics = Topics.of(kafka, bootstrap)
        info = topics.describe(name)
        if info is None:
            at = topics.in_cluster(cluster_of(name)).bootstrap
            raise UsageError(f"there is no topic {name} at {at}", "create it, or check its name")
        ends = topics.offsets(name)
        return cls(kafka, bootstrap, name, info.id, ends.earliest, ends.latest, until)

    @property
    def whole(self) -> list[Span]:
        return [Span(self.name, number, self.low[number], end) for number, end in sorted(self.high.items())]

    def content(
        self,
        *,
        take: Callable[[Sequence[RawRecord]], None] = lambda _: None,
        progress: Progress = lambda _: None,
    ) -> CommittedTopic:
        """Read the content once; calls `take` with all records, `progress` with the number of offsets passed."""
        partitions = {}
        for span in self.whole:
            offsets: list[int] = []
            at = span.start
            for block in blocks(self.records([span])):
                offsets += (record.offset for record in block)
                take(block)
                progress(offsets[-1] + 1 - at)
                at = offsets[-1] + 1
            if at < span.end:
                progress(span.end - at)
            partitions[span.partition] = CommittedPartition(span.start, span.end, np.array(offsets, dtype=np.int64))
        return CommittedTopic(self.name, self.topic_id, partitions)

    def records(self, spans: Iterable[Span]) -> Iterator[RawRecord]:
        """The committed records in these ranges, as far as the topic holds them.

        Raises BrokerUnreachable if nothing arrives for `kafka.timeout`, DeadlinePassed, and TransientError if
        records are deleted while they are read.
        """
        wanted = [
            (s.partition, max(s.start, self.low[s.partition]), min(s.end, self.high[s.partition]))
            for s in spans
            if s.topic == self.name and s.partition in self.high
        ]
        config: dict[str, Any] = client_config(self.kafka, self.bootstrap, self.name)
        failures = Failures(config["bootstrap.servers"], self.name)
        config |= {
            "group.id": _NOBODY,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "error_cb": failures,
        }
        consumer = Consumer(config)
        try:
            for number, start, end in wanted:
                for message in self._messages(consumer, failures, number, start, end):
                    yield RawRecord.of(self.name, number, message)
        finally:
            consumer.close()

    def _messages(self, consumer: Consumer, failures: Failures, number: int, start: int, end: int) -> Iterator[Message]:
        """The committed records from `start` on and before `end`.

        The partition ends with a record at or after its last offset, or where the broker reports its end: after the
        last record there may be transaction markers, which consumers do not get.
        """
        if start >= end:
            return
        consumer.assign([TopicPartition(kafka_name(self.name), number, start)])
        moved = time.monotonic()
        while True:
            messages = consumer.consume(_AT_ONCE, timeout=0.1)
            for message in messages:
                offset, error = message.offset(), message.error()
                if error is not None:
                    if error.code() == KafkaError._AUTO_OFFSET_RESET:
                        raise TransientError(
                            f"records of topic {self.name}, partition {number}, were deleted while they were read",
                            "verify again",
                        )
                    if error.code() == KafkaError._PARTITION_EOF and offset is not None and offset >= end:
                        return
                    continue
                assert offset is not None
                if offset < end:
                    yield message
                if offset >= end - 1:
                    return
            failures.check()
            now = time.monotonic()
            if messages:
                moved = now  # not when they came: who takes them may need long
            if self.until is not None and now > self.until:
                raise DeadlinePassed(
                    f"topic {self.name} was not read to its end in time",
                    f"give it longer: {commands.verify()} --timeout",
                )
            timeout = self.kafka.of(self.name).timeout
            if now - moved > timeout.total_seconds():
                raise failures.unreachable(f"read topic {self.name}, partition {number}", timeout)
