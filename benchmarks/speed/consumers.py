"""Consumers of the benchmark: silent, and each tells the end of a partition."""

from __future__ import annotations

import logging

from confluent_kafka import Consumer, KafkaError

WAIT = 30.0
"""Seconds for one answer of the broker."""
PASSING = {
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._WAIT_COORD,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
}
"""Errors of a new broker or a new topic, which pass."""
_silent = logging.getLogger("benchmark.librdkafka")
_silent.addHandler(logging.NullHandler())


def consumer(bootstrap: str, group: str, isolation: str) -> Consumer:
    """A consumer with this `isolation.level`; it commits nothing."""
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "logger": _silent,
        }
    )
