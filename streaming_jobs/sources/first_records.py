"""Timestamps of the first records from given offsets on: one record of each partition, within a deadline."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import structlog
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaException, Message, TopicPartition

from streaming_jobs.positions import Place

log = structlog.get_logger()

_FETCH = 64 * 1024
"""Bytes that are asked of a partition at once; a broker sends a larger first batch of records whole."""


def first_timestamps(config: Mapping[str, Any], starts: Mapping[Place, int], within: float) -> dict[Place, float]:
    """Timestamp (seconds since 1970) of the first committed record at or after an offset, by topic and partition.

    `within` is in seconds. Partitions without such a record, or without an answer in time, are missing. Offsets that
    are gone count from the first one that is there.
    """
    found: dict[Place, float] = {}
    waiting = set(starts)
    if not waiting:
        return found
    ends_at = time.monotonic() + within
    consumer = Consumer(
        {
            **config,
            "group.id": "recourse-unread",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "max.partition.fetch.bytes": _FETCH,
            "queued.min.messages": 1,
            "fetch.wait.max.ms": 50,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, partition, at) for (topic, partition), at in starts.items()])
        while waiting and (left := ends_at - time.monotonic()) > 0:
            for message in consumer.consume(len(waiting), timeout=min(left, 0.2)):
                place = (str(message.topic()), int(message.partition() or 0))
                if place not in waiting:
                    continue
                waiting.discard(place)
                if (at := _timestamp(message)) is not None:
                    found[place] = at
                consumer.incremental_unassign([TopicPartition(*place)])
    except KafkaException as error:
        log.info("the first unread records could not be read", reason=str(error)[:200])
    finally:
        consumer.close()
    return found


def _timestamp(message: Message) -> float | None:
    """The record's timestamp; None at the end of a partition, for an error, and for a record without one."""
    if message.error() is not None:
        return None
    kind, ms = message.timestamp()
    return None if kind == TIMESTAMP_NOT_AVAILABLE else ms / 1000
