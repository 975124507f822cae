"""The topic of markers is as safe as the topic whose batches it knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from streaming_jobs.errors import PermanentError
from streaming_jobs.settings import TopicSinkSettings
from streaming_jobs.sinks.kafka.clients import producer_config
from streaming_jobs.sinks.kafka.markers import ensure_marker_topic
from streaming_jobs.sinks.kafka.producer import BatchProducer, Outgoing
from streaming_jobs.sources.topics import TopicInfo
from tests.support.kafka_cluster import Cluster, Producer

DATA = TopicInfo("orders", "id", 6, -1, "delete", replicas=3, min_insync_replicas=2)


@dataclass
class Maker:
    """Makes topics as it is told."""

    made: dict[str, TopicInfo] = field(default_factory=dict)

    def describe(self, name: str) -> TopicInfo | None:
        return self.made.get(name)

    def create(
        self, name: str, partitions: int, retention_ms: int = -1, *, replicas: int = -1, **properties: str
    ) -> TopicInfo:
        in_sync = int(properties.get("min_insync_replicas", 1))
        most = int(properties["max_message_bytes"])
        info = TopicInfo(name, "m", partitions, retention_ms, properties["cleanup_policy"], replicas, in_sync, most)
        return self.made.setdefault(name, info)


def test_the_marker_topic_has_the_replicas_of_the_topic_and_takes_markers_that_are_larger_than_a_record() -> None:
    info = ensure_marker_topic(Maker(), "__m", DATA)
    assert (info.partitions, info.replicas, info.min_insync_replicas) == (1, 3, 2)
    assert ensure_marker_topic(Maker(), "__m", None).replicas == -1
    # A batch of a thousand partitions has a marker of a hundred kilobytes, however small its records are.
    config = producer_config({}, TopicSinkSettings(max_record_kb=100), "an id")
    assert config["message.max.bytes"] == ensure_marker_topic(Maker(), "__m", DATA).max_message_bytes == 8 << 20
    assert producer_config({}, TopicSinkSettings(max_record_kb=100))["message.max.bytes"] == 100_000


@pytest.mark.parametrize("by_client", [True, False])
def test_a_marker_that_is_too_large_is_named(by_client: bool) -> None:
    too_large = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "Broker: Message size too large")

    class Refusing(Producer):
        def produce(self, topic: str, value: Any, key: Any, partition: int, report: Any, *further: Any) -> None:
            if by_client and topic == "__m":
                raise KafkaException(too_large)
            refused = (lambda _, record: report(too_large, record)) if topic == "__m" else report
            super().produce(topic, value, key, partition, refused, *further)

    producer = BatchProducer({}, timedelta(seconds=5), lambda config: Refusing(Cluster(), config))
    records = [Outgoing("orders", None, b"r", (), 0, -1)]
    with pytest.raises(PermanentError, match="the marker of the batch, 9 bytes, in topic __m: .*too large") as refused:
        producer.transact(records, 1, {}, lambda _: Outgoing("__m", b"k", b"123456789"))
    assert "max.message.bytes=8388608 on topic __m" in refused.value.next_step
