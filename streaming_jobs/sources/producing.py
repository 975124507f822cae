"""Sends records to a topic, for examples and for a person who tries a stream: acknowledged, but not exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

from confluent_kafka import Producer

from streaming_jobs.declare.names import kafka_name
from streaming_jobs.errors import BrokerUnreachable
from streaming_jobs.settings import KafkaSettings
from streaming_jobs.sources.connection import client_config
from streaming_jobs.text import commands


class NewRecord(NamedTuple):
    """A record to send; without a `timestamp` (ms since 1970) the time of sending is taken."""

    value: bytes
    key: str | bytes | None = None
    timestamp: int = 0


def produce(
    kafka: KafkaSettings, bootstrap: str, topic: str, records: Iterable[NewRecord], timeout: timedelta | None = None
) -> int:
    """Send the records and wait until the broker has acknowledged all of them; returns their number.

    Raises BrokerUnreachable if some are not acknowledged within `timeout` (default: `kafka.timeout`) of being sent.
    """
    allowed = timeout or kafka.of(topic).timeout
    options = {
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
        "delivery.timeout.ms": int(allowed.total_seconds() * 1000),
    }
    refused: list[str] = []
    config = client_config(kafka, bootstrap, topic)
    producer = Producer({**config, **options})
    sent, name = 0, kafka_name(topic)
    for record in records:
        while True:
            try:
                producer.produce(
                    name,
                    value=record.value,
                    key=record.key,
                    timestamp=record.timestamp,
                    on_delivery=lambda error, _: refused.append(str(error)) if error is not None else None,
                )
                break
            except BufferError:  # the queue is full: it empties by acknowledgement, or by the deadline of its records
                producer.poll(0.1)
        producer.poll(0)
        sent += 1
    left = producer.flush(2 * allowed.total_seconds())
    if left or refused:
        why, where = next(iter(refused), "no answer"), config["bootstrap.servers"]
        raise BrokerUnreachable(
            f"{left + len(refused):,} of {sent:,} records were not acknowledged by {where}: {why}",
            f"check the broker (`{commands.doctor()}`), then send them again",
        )
    return sent
