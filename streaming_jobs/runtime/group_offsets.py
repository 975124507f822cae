"""Offsets of streams committed to consumer groups, for display: lag exporters and Kafka's own tools show each stream.

Nothing reads them back: a stream's position is in its checkpoint and its tables. So they are committed after the batch,
by a thread of their own, and a failure is one line of the log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from streaming_jobs.declare.names import cluster_of, in_cluster, kafka_name
from streaming_jobs.ledger.positions import TopicOffsets
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.settings import Settings
from streaming_jobs.sources.connection import client_config
from streaming_jobs.stream import Stream

log = structlog.get_logger()

_EVERY, _WITHIN = 5.0, 10.0


class GroupOffsets:
    """Commits the newest offsets of each stream, from the first `show` to `close`."""

    def __init__(self, prefix: str, connect: Callable[[str], Any], every: float = _EVERY) -> None:
        """Stream `name` is the group `<prefix>name`; `connect` makes the client of a topic's cluster."""
        self._prefix, self._connect, self._every = prefix, connect, every
        self._clients: dict[str, Any] = {}
        self._newest: dict[tuple[str, str], TopicOffsets] = {}
        """By stream and cluster: one that is away holds up no other."""
        self._done: dict[tuple[str, str], TopicOffsets] = {}
        self._failing: set[tuple[str, str]] = set()
        self._starting = threading.Lock()
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._run, name="groups", daemon=True)

    @classmethod
    def of(cls, settings: Settings) -> GroupOffsets | None:
        """Those of the settings, which may want none."""
        prefix = settings.kafka.group_prefix

        def connect(topic: str) -> AdminClient:
            bootstrap = "" if cluster_of(topic) else bootstrap_servers(settings)
            return AdminClient(client_config(settings.kafka, bootstrap, topic))

        return cls(prefix, connect) if prefix else None

    def show(self, stream: Stream, position: TopicOffsets) -> None:
        """Take note of a position, which may be behind an earlier one after a recovery. Returns at once."""
        read: dict[str, dict[str, Mapping[int, int]]] = {}
        for name in (topic.name for topic in stream.topics if topic.name in position):
            read.setdefault(cluster_of(name), {})[name] = dict(position[name])
        if not read:
            return
        self._newest |= {(stream.name, cluster): offsets for cluster, offsets in read.items()}
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def close(self, patience: float = 2.0) -> None:
        """Commit what is new, if that takes no longer than `patience` seconds."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(patience)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._commit_new()
        self._commit_new()

    def _commit_new(self) -> None:
        for shown, offsets in list(self._newest.items()):
            if self._done.get(shown) == offsets:
                continue
            stream, cluster = shown
            try:
                self._commit(f"{self._prefix}{stream}", cluster, offsets)
            except Exception as error:  # noqa: BLE001 - for display only: the next round tries again
                if shown not in self._failing:
                    log.warning("offsets are not shown in the consumer group", stream=stream, reason=str(error)[:200])
                self._failing.add(shown)
            else:
                self._done[shown] = offsets
                self._failing.discard(shown)

    def _commit(self, group: str, cluster: str, offsets: TopicOffsets) -> None:
        if cluster not in self._clients:
            self._clients[cluster] = self._connect(in_cluster("", cluster))
        named = ((kafka_name(topic), each) for topic, each in offsets.items())
        places = [TopicPartition(name, p, offset) for name, each in named for p, offset in each.items()]
        request = [ConsumerGroupTopicPartitions(group, places)]
        asked = self._clients[cluster].alter_consumer_group_offsets(request, request_timeout=_WITHIN)
        for place in asked[group].result(_WITHIN).topic_partitions:
            if place.error is not None:
                raise KafkaException(place.error)
