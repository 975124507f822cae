"""The topic of markers is as safe as the topic whose batches it knows."""

from __future__ import annotations

from dataclasses import dataclass, field

from streaming_jobs.sinks.kafka.markers import ensure_marker_topic
from streaming_jobs.sources.topics import TopicInfo

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
        info = TopicInfo(name, "m", partitions, retention_ms, properties["cleanup_policy"], replicas, in_sync)
        return self.made.setdefault(name, info)


def test_the_marker_topic_has_the_replicas_of_the_topic_and_as_many_in_sync() -> None:
    info = ensure_marker_topic(Maker(), "__m", DATA)
    assert (info.partitions, info.replicas, info.min_insync_replicas) == (1, 3, 2)
    assert ensure_marker_topic(Maker(), "__m", None).replicas == -1
