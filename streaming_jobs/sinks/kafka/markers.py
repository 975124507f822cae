"""Markers: the newest batch of a topic sink, kept in a compacted topic of the sink's own.

A marker is written in the same transaction as the batch's records, so it is there exactly if they are. Its value is the
batch's ledger entry. A partition of the topic has one writer: nobody else's open transaction can hide its end. The
topic of a sink has one partition, that of its shards one for each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from streaming_jobs.declare.names import kafka_name
from streaming_jobs.errors import ConfigurationError, UsageError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.sinks.kafka.clients import MARKER_BYTES, ClientLost, in_time
from streaming_jobs.sinks.kafka.producer import Outgoing
from streaming_jobs.sources.topics import KEEP_FOREVER, NOT_SHOWN, TopicInfo

_ENROLLING = b"enrolling"
_OWNER, _SHARDS = "recourse.owner", "recourse.shards"
_FIRST_LOOK = 64
_WAIT_AT_END = 10
_LONGEST_NAME = 249
_SEGMENT = str(8 << 20)


class Marker(NamedTuple):
    """The entry of the newest batch, the driver that wrote it, and the shards of the sink, 0 without any."""

    entry: LedgerEntry
    owner: str
    shards: int = 0


class TopicMaker(Protocol):
    def describe(self, name: str) -> TopicInfo | None:
        """The topic; None if there is none."""

    def create(
        self, name: str, partitions: int, retention_ms: int = ..., *, replicas: int = ..., **properties: str
    ) -> TopicInfo:
        """Make a topic; raises UsageError if it exists."""


def transactional_id(prefix: str, stream: str, topic: str) -> str:
    """The transactional id of a stream's topic sink: the same for ever, so that each producer fences the one before."""
    return f"{prefix}.{stream}.{topic}"


def marker_topic(prefix: str, stream: str, topic: str) -> str:
    """The name of the sink's topic of markers; raises ConfigurationError if it would be too long for Kafka."""
    name = f"__{transactional_id(prefix, stream, topic)}"
    if len(kafka_name(name)) > _LONGEST_NAME:
        raise ConfigurationError(
            f"the topic of markers of stream {stream} would have the name {name}, of over {_LONGEST_NAME} letters",
            "shorten the topic's name, the stream's, or topic_sink.prefix",
        )
    return name


def ensure_marker_topic(topics: TopicMaker, name: str, data: TopicInfo | None, partitions: int = 1) -> TopicInfo:
    """The topic of markers, made if there is none; raises ConfigurationError if it would not keep them.

    It gets as many replicas as the topic of the `data`, and its `min.insync.replicas`; without one, the broker's own.
    """
    info = topics.describe(name)
    if info is None:
        with suppress(UsageError):  # made by another driver at this moment
            # Small segments: compaction leaves the newest one alone.
            topics.create(
                name,
                partitions,
                KEEP_FOREVER,
                replicas=-1 if data is None else data.replicas,
                cleanup_policy="compact",
                segment_bytes=_SEGMENT,
                max_message_bytes=str(MARKER_BYTES),
                min_cleanable_dirty_ratio="0.1",
                **({} if data is None else {"min_insync_replicas": str(data.min_insync_replicas)}),
            )
        info = topics.describe(name)
    if info is None or info.partitions != partitions or info.cleanup_policy not in ("compact", NOT_SHOWN):
        raise ConfigurationError(
            f"topic {name} holds the markers of a topic sink, and needs cleanup.policy=compact and partitions: "
            f"{partitions}; it is {info}",
            "set cleanup.policy=compact on it",
        )
    return info


def marker_record(
    topic: str, key: str, entry: LedgerEntry, owner: str, *, shards: int = 0, partition: int = 0
) -> Outgoing:
    headers = [(_OWNER, owner.encode()), *([(_SHARDS, str(shards).encode())] if shards else [])]
    return Outgoing(topic, key.encode(), entry.encode().encode(), headers, partition=partition)


def enrolling_record(topic: str, partition: int) -> Outgoing:
    """A record that enrols the markers' partition in a transaction, and that no reader of markers takes for one."""
    return Outgoing(topic, _ENROLLING, b"", partition=partition)


Connect = Callable[[dict[str, Any]], Any]


def read_marker(
    client: Mapping[str, Any],
    topic: str,
    key: str,
    timeout: timedelta,
    connect: Connect = Consumer,
    *,
    partition: int = 0,
) -> Marker | None:
    """The newest committed marker; None without any. Raises ClientLost if it cannot be read in time.

    Only after `init_transactions` no transaction of an older producer can still be committed.
    """

    def run() -> Marker | None:
        until = time.monotonic() + timeout.total_seconds()
        consumer = connect(
            {
                **client,
                "group.id": "recourse-markers",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": _WAIT_AT_END,  # the broker holds back the answer that says where the end is
            }
        )
        try:
            name = kafka_name(topic)
            low, high = consumer.get_watermark_offsets(TopicPartition(name, partition), timeout=_left(until))
            look = _FIRST_LOOK
            while True:
                start = max(low, high - look)
                newest = _newest(consumer, TopicPartition(name, partition, start), key.encode(), until)
                if newest is not None or start <= low:
                    return None if newest is None else _decoded(newest)
                look *= 8
        finally:
            consumer.close()

    return in_time(f"read the marker in {topic}", timeout + timedelta(seconds=5), run)


def _newest(consumer: Any, place: TopicPartition, key: bytes, until: float) -> Message | None:
    """The last record with the key, from a place on to the end of what is committed."""
    consumer.assign([place])
    newest: Message | None = None
    while True:
        message = consumer.poll(min(_left(until), 0.5))
        if message is None:
            continue
        error = message.error()
        if error is None:
            newest = message if message.key() == key else newest
        elif error.code() == KafkaError._PARTITION_EOF:
            return newest
        elif not error.retriable() and error.fatal():
            raise KafkaException(error)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise ClientLost("the marker could not be read in time")
    return left


def _decoded(message: Message) -> Marker | None:
    entry = LedgerEntry.decode((message.value() or b"").decode())
    headers = dict(message.headers() or [])
    owner, shards = headers.get(_OWNER), headers.get(_SHARDS)
    name = owner.decode() if isinstance(owner, bytes) else ""
    return None if entry is None else Marker(entry, name, int(shards) if shards else 0)
