"""Reads topics as any program outside of this project would: only committed records, to the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

MURMUR2: Mapping[bytes, int] = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
"""What Kafka's own test demands of its hash: org.apache.kafka.common.utils.UtilsTest.testMurmur2."""


def committed(bootstrap: str, topic: str, partitions: int, seconds: float = 30) -> list[Message]:
    """All committed records, partition by partition; AssertionError if their end does not come in time."""
    config = {
        "bootstrap.servers": bootstrap,
        "group.id": "outside",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
    }
    consumer = Consumer(config)
    found: dict[int, list[Message]] = {partition: [] for partition in range(partitions)}
    ends, until = set[int](), time.monotonic() + seconds
    try:
        consumer.assign([TopicPartition(topic, partition, 0) for partition in found])
        while len(ends) < partitions:
            assert time.monotonic() < until, f"the end of {topic} did not come within {seconds} s"
            for message in consumer.consume(10_000, timeout=0.2):
                error = message.error()
                if error is None:
                    found[int(message.partition() or 0)].append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    ends.add(int(message.partition() or 0))
    finally:
        consumer.close()
    return [message for each in found.values() for message in each]


def partition_of(key: bytes, partitions: int) -> int:
    """The partition that Kafka's Java client chooses for a key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def murmur2(data: bytes) -> int:
    """The hash of org.apache.kafka.common.utils.Utils.murmur2, a signed number of 32 bits."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    length = len(data)
    h = (0x9747B28C ^ length) & mask
    for at in range(0, length - length % 4, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = h * m & mask ^ k
    rest = data[length - length % 4 :]
    if rest:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


def headers(message: Message) -> dict[str, Any]:
    """The headers of a record by name."""
    return dict(message.headers() or [])
