"""Offsets that are shown in consumer groups: the newest of each stream, never in the way of a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException
from structlog.testing import capture_logs

from streaming_jobs.declare.names import cluster_of
from streaming_jobs.runtime.group_offsets import GroupOffsets
from streaming_jobs.runtime.stream_queries import SparkQueries
from streaming_jobs.stream import Stream
from tests.conftest import SettingsFactory
from tests.support.waiting import wait_for
from tests.support.worlds import TOPIC, ends, entry, parity

ONE, TWO = ends(0), ends(1)


def done(future: Future[Any], result: object) -> Future[Any]:
    future.set_result(result)
    return future


@dataclass
class Client:
    """Notes what is committed; `before` is called first, and may raise or wait."""

    before: Callable[[], object] = lambda: None
    refusing: list[KafkaError] = field(default_factory=list)
    committed: list[tuple[str, dict[int, int]]] = field(default_factory=list)
    topics: set[str] = field(default_factory=set)

    def alter_consumer_group_offsets(self, asked: list[ConsumerGroupTopicPartitions], request_timeout: float) -> Any:
        self.before()
        assert 0 < request_timeout <= 10
        places = asked[0].topic_partitions
        if self.refusing:
            answer = SimpleNamespace(topic_partitions=[SimpleNamespace(error=self.refusing.pop())])
            return {asked[0].group_id: done(Future(), answer)}
        self.topics |= {p.topic for p in places}
        self.committed.append((asked[0].group_id, {p.partition: p.offset for p in places}))
        return {asked[0].group_id: done(Future(), SimpleNamespace(topic_partitions=places))}


def test_the_newest_offsets_of_a_stream_are_those_of_its_group_and_positions_in_tables_are_not() -> None:
    client = Client()
    groups = GroupOffsets("recourse-", lambda _: client, every=60)
    groups.show(parity, ONE)
    groups.show(parity, TWO)
    groups.close()
    assert client.committed == [("recourse-parity", {0: 20, 1: 10})]
    client = Client()
    groups = GroupOffsets("", lambda _: client, every=60)
    groups.show(parity, {"a_table": {7: 3}})
    groups.show(parity, {**ONE, "a_table": {7: 3}})
    groups.close()
    assert client.committed == [("parity", {0: 10, 1: 5})]


def test_offsets_go_back_with_the_stream_and_are_not_committed_twice() -> None:
    client = Client()
    groups = GroupOffsets("", lambda _: client, every=0.01)
    for position in (TWO, ONE):
        groups.show(parity, position)
        wait_for(lambda position=position: client.committed[-1:] == [("parity", position[TOPIC])], "the commit")
    groups.close()
    assert len(client.committed) == 2


def test_a_broker_that_does_not_answer_holds_nothing_up() -> None:
    answers, client = threading.Event(), Client()
    client.before = lambda: answers.wait(30)
    groups = GroupOffsets("", lambda _: client, every=0.0)
    groups.show(parity, ONE)
    groups.show(parity, TWO)
    groups.close(patience=0)
    assert not client.committed
    answers.set()


def test_a_failure_is_told_once_and_tried_again() -> None:
    refused = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)
    client = Client(refusing=[refused, refused])
    groups = GroupOffsets("", lambda _: client, every=0.01)
    with capture_logs() as logs:
        groups.show(parity, ONE)
        wait_for(lambda: client.committed, "the commit")
        groups.close()
    assert [(each["log_level"], each["stream"]) for each in logs] == [("warning", "parity")]
    assert "GROUP_AUTHORIZATION_FAILED" in logs[0]["reason"]


def test_a_client_that_cannot_be_made_is_a_failure_like_others() -> None:
    client, attempts = Client(), [KafkaException("no broker")]

    def connect(_: str) -> Client:
        if attempts:
            raise attempts.pop()
        return client

    groups = GroupOffsets("", connect, every=0.01)
    groups.show(parity, ONE)
    wait_for(lambda: client.committed, "the commit")
    groups.close()


def test_each_cluster_has_the_offsets_of_its_own_topics() -> None:
    clients: dict[str, Client] = {}

    def connect(topic: str) -> Client:
        return clients.setdefault(cluster_of(topic), Client())

    abroad = SimpleNamespace(name="parity", topics=[*parity.topics, replace(parity.topics[0], cluster="eu")])
    groups = GroupOffsets("", connect, every=60)
    groups.show(cast("Stream", abroad), {**ONE, f"{TOPIC}@eu": {0: 7}})
    groups.close()
    assert {cluster: client.committed for cluster, client in clients.items()} == {
        "": [("parity", {0: 10, 1: 5})],
        "eu": [("parity", {0: 7})],
    }
    assert clients["eu"].topics == {TOPIC}, "by its name in the cluster"

    def away() -> None:
        raise KafkaException("no broker")

    clients = {"": Client(before=away)}
    groups = GroupOffsets("", connect, every=60)
    groups.show(cast("Stream", abroad), {**ONE, f"{TOPIC}@eu": {0: 7}})
    groups.close()
    assert clients["eu"].committed == [("parity", {0: 7})], "the default cluster is away"


def test_no_group_is_written_unless_the_settings_name_a_prefix(settings: SettingsFactory) -> None:
    assert GroupOffsets.of(settings()) is None
    assert GroupOffsets.of(settings({"kafka.group_prefix": "recourse-"})) is not None


def test_a_stream_shows_the_offsets_of_its_start_and_of_each_batch(settings: SettingsFactory) -> None:
    client, reports = Client(), []
    queries = SparkQueries(settings(), shown=GroupOffsets("", lambda _: client, every=0.01))
    report: Any = queries._reporting(parity, reports.append, ONE)
    wait_for(lambda: client.committed == [("parity", {0: 10, 1: 5})], "the offsets of the start")
    batch: Any = SimpleNamespace(entry=entry(1))
    report(batch)
    wait_for(lambda: client.committed[1:] == [("parity", {0: 20, 1: 10})], "the offsets of the batch")
    queries.close()
    assert reports == [batch]
