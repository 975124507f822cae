"""The flights that a topic holds, determined from the topic itself.

A key always falls into the same partition, and the feeder writes each partition in order; so the number of
records in a partition says exactly which flights are in it, if its last record is, byte by byte, the flight that
belongs there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from confluent_kafka import Consumer, Message, TopicPartition
from numpy.typing import NDArray

from streaming_jobs.examples.flights import dataset
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.settings import KafkaSettings
from streaming_jobs.sources.connection import Failures, client_config
from streaming_jobs.sources.topics import Topics

TOPIC = "flights"


@dataclass(frozen=True)
class FlightsInTopic:
    """The part of the first `total` flights that the topic holds.

    `held` of them are in it, `missing` are the positions (in order of departure) of the others. `records` is the
    number of all records in the topic. `foreign` says in words why the topic is not one feed, or is empty.
    """

    records: int
    total: int
    missing: NDArray[np.int64]
    foreign: str = ""

    @property
    def held(self) -> int:
        """Number of the first `total` flights that are in the topic."""
        return self.total - len(self.missing)

    @property
    def complete(self) -> bool:
        """True if all `total` flights are in the topic, each once."""
        return not self.foreign and not len(self.missing)


def content(kafka: KafkaSettings, topics: Topics, total: int) -> FlightsInTopic:
    """Compare the topic with the first `total` flights; reads one record per partition and writes nothing."""
    offsets = topics.offsets(TOPIC) if topics.describe(TOPIC) else OffsetBounds({}, {})
    if not any(offsets.latest.values()):
        return FlightsInTopic(0, total, np.arange(total))
    partitions = dataset.partitions(len(offsets.latest))
    counts = np.array([offsets.latest[p] for p in range(len(offsets.latest))])
    missing = np.flatnonzero((rank(partitions) >= counts[partitions])[:total])
    return FlightsInTopic(offsets.total, total, missing, _foreign(kafka, topics, offsets, partitions))


def rank(partitions: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each record the number of records before it in its partition: its offset in a topic that was fed once."""
    ranks = np.empty_like(partitions)
    for partition in np.unique(partitions):
        mine = np.flatnonzero(partitions == partition)
        ranks[mine] = np.arange(len(mine))
    return ranks


def _foreign(kafka: KafkaSettings, topics: Topics, offsets: OffsetBounds, partitions: NDArray[np.int64]) -> str:
    if gone := {partition: first for partition, first in offsets.earliest.items() if first}:
        return f"records were deleted from it (first offsets by partition: {gone})"
    for partition, end in offsets.latest.items():
        if end > (most := int((partitions == partition).sum())):
            return f"partition {partition} holds {end:,} records, and one feed of all flights has {most:,} there"
    for partition, message in _last_records(kafka, topics, offsets).items():
        position = int(np.flatnonzero(partitions == partition)[offsets.latest[partition] - 1])
        due = dataset.records_of(dataset.departures().iloc[[position]])
        if (message.key(), message.value()) != (due.keys[0], due.values[0]):
            return f"the last record of partition {partition} is not the flight that belongs there"
    return ""


def _last_records(kafka: KafkaSettings, topics: Topics, offsets: OffsetBounds) -> dict[int, Message]:
    failures = Failures(topics.bootstrap)
    consumer = Consumer(
        client_config(kafka, topics.bootstrap)
        | {"group.id": "recourse-feeder", "enable.auto.commit": False, "error_cb": failures}
    )
    wanted = [TopicPartition(TOPIC, partition, end - 1) for partition, end in offsets.latest.items() if end]
    messages: dict[int, Message] = {}
    deadline = time.monotonic() + kafka.timeout.total_seconds()
    try:
        consumer.assign(wanted)
        while len(messages) < len(wanted):
            message = consumer.poll(0.1)
            failures.check()
            if message is not None and not message.error() and (partition := message.partition()) is not None:
                messages[partition] = message
            elif time.monotonic() > deadline:
                raise failures.unreachable(f"read the end of topic {TOPIC}", kafka.timeout)
    finally:
        consumer.close()
    return messages
