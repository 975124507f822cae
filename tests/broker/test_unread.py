"""Unread records and figures of topics on a real broker, without a session: as for a stream that is stopped."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar

import pytest
from confluent_kafka import Producer

from streaming_jobs.platform.broker import Broker
from streaming_jobs.runtime.lag import first_timestamps, unread_now
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics, client_config, look, with_rates, with_size
from streaming_jobs.stream import Stream
from tests.conftest import SettingsFactory
from tests.support.driver import on_topic
from tests.support.worlds import Disk, plain

BEGIN = 1_357_000_000
"""Record n of a partition has the timestamp BEGIN + n, of January 2013."""


class OnTopic(Disk):
    """A stream whose batches read two offsets of partition 0 and one of partition 1."""

    topic: ClassVar[str] = "unread"
    per_batch: ClassVar[dict[int, int]] = {0: 2, 1: 1}


def fill(bootstrap: str, topic: str, partition: int, count: int, *, first: int = 0) -> None:
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(first, first + count):
        producer.produce(topic, value=b"0123456789", partition=partition, timestamp=(BEGIN + number) * 1000)
    assert producer.flush(30) == 0


@pytest.fixture
def home(settings: SettingsFactory, broker: Broker) -> Settings:
    return settings({"kafka.bootstrap_servers": broker.start()})


def topics_of(home: Settings) -> Topics:
    return Topics.of(home.kafka, home.kafka.bootstrap_servers or "")


def of_topic(name: str) -> tuple[Stream, type[OnTopic]]:
    return on_topic(plain, name), type("OnItsTopic", (OnTopic,), {"topic": name})


def test_a_stopped_stream_shows_its_lag_by_partition_and_the_age_of_its_oldest_unread_record(home: Settings) -> None:
    stream, kind = of_topic("unread-of-a-stopped-stream")
    topics_of(home).create(kind.topic, 3)
    fill(home.kafka.bootstrap_servers or "", kind.topic, 0, 50)
    fill(home.kafka.bootstrap_servers or "", kind.topic, 1, 3)
    disk = kind(home, stream)
    assert unread_now(home, [stream]) == {}  # it has never run
    disk.make()
    before = unread_now(home, [stream])["plain"]
    assert (before.records, before.oldest) == (53, BEGIN)
    disk.plan(2)
    disk.finish(2)
    unread = unread_now(home, [stream])["plain"]
    assert [(p.partition, p.position, p.end, p.records, p.oldest) for p in unread.partitions] == [
        (0, 6, 50, 44, BEGIN + 6),
        (1, 3, 3, 0, None),
        (2, 0, 0, 0, None),
    ]
    assert unread.oldest_age == pytest.approx(time.time() - BEGIN - 6, abs=60)
    value = unread.as_json()
    assert (value["records"], value["oldest_at"], len(value["partitions"])) == (44, BEGIN + 6, 3)


def test_a_stream_that_has_read_everything_has_no_unread_record(home: Settings) -> None:
    stream, kind = of_topic("unread-at-the-end")
    topics_of(home).create(kind.topic, 2)
    fill(home.kafka.bootstrap_servers or "", kind.topic, 0, 2)
    fill(home.kafka.bootstrap_servers or "", kind.topic, 1, 1)
    disk = kind(home, stream).make()
    disk.plan(0)
    disk.finish(0)
    unread = unread_now(home, [stream])["plain"]
    assert (unread.records, unread.oldest, unread.oldest_age) == (0, None, 0.0)


def test_records_of_an_aborted_transaction_and_markers_are_no_first_record(home: Settings) -> None:
    name, bootstrap = "unread-transactions", home.kafka.bootstrap_servers or ""
    topics_of(home).create(name, 2)
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": name})
    producer.init_transactions(30)
    producer.begin_transaction()
    for partition in (0, 1):
        producer.produce(name, value=b"aborted", partition=partition, timestamp=1_000)
    producer.flush(30)
    producer.abort_transaction(30)
    fill(bootstrap, name, 1, 1, first=7)
    config = client_config(home.kafka, bootstrap)
    assert first_timestamps(config, {(name, 0): 0, (name, 1): 0}, 3600.0) == {(name, 1): BEGIN + 7}


def test_two_hundred_partitions_are_asked_within_the_deadline(home: Settings) -> None:
    name, bootstrap = "unread-of-many", home.kafka.bootstrap_servers or ""
    topics_of(home).create(name, 200)
    producer = Producer({"bootstrap.servers": bootstrap})
    for partition in range(200):
        producer.produce(name, value=b"x", partition=partition, timestamp=(BEGIN + partition) * 1000)
    assert producer.flush(30) == 0
    starts = {(name, partition): 0 for partition in range(200)}
    found = first_timestamps(client_config(home.kafka, bootstrap), starts, 20.0)
    assert found == {(name, partition): BEGIN + partition for partition in range(200)}


def test_without_a_broker_nothing_is_known(home: Settings) -> None:
    stream, kind = of_topic("unread-nowhere")
    kind(home, stream).make()
    away = home.model_copy(update={"kafka": home.kafka.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})})
    assert unread_now(away, [stream]) == {}


def test_figures_of_a_topic(home: Settings) -> None:
    name, bootstrap, topics = "figures-of-a-topic", home.kafka.bootstrap_servers or "", topics_of(home)
    topics.create(name, 2, 86_400_000, message_timestamp_type="LogAppendTime")
    fill(bootstrap, name, 0, 30)
    seen = look(topics, [name, "no-such-topic"])
    assert list(seen) == [name]
    figures = seen[name]
    assert (figures.partitions, figures.records, figures.end, figures.retention_ms) == (2, 30, 30, 86_400_000)
    assert (figures.rate, figures.record_bytes, figures.bytes) == (None, None, None)

    def meanwhile(seconds: float) -> None:
        time.sleep(seconds)
        fill(bootstrap, name, 1, 20)

    later = with_rates(topics, seen, 0.2, meanwhile)[name]
    assert later.rates is not None and later.rates[0] == 0
    assert later.rate == pytest.approx(20 / (later.at - figures.at))
    sized = with_size(topics, later)
    assert (sized.record_bytes, sized.bytes) == (10, 500)
    assert sized.as_json()["offsets"][1]["end"] == 20
    assert with_size(topics, replace(later, earliest=later.latest)).record_bytes is None
