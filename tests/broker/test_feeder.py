"""The feeder against a real broker: every flight once, in order, in its partition, with its own time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from streaming_jobs.errors import LeaseBusy, UsageError
from streaming_jobs.examples.flights import dataset, feeder
from streaming_jobs.examples.flights.content import TOPIC
from streaming_jobs.examples.flights.feeder import _Lost, _Sender, feed, survey
from streaming_jobs.platform.broker import Broker
from streaming_jobs.settings import KafkaSettings, Settings
from streaming_jobs.sources.connection import client_config
from streaming_jobs.sources.topics import Topics

SHARE = 0.02
COUNT = dataset.flights_in(SHARE)


@pytest.fixture
def settings(broker: Broker, tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, kafka=KafkaSettings(bootstrap_servers=broker.start()))


@pytest.fixture
def topics(settings: Settings) -> Iterator[Topics]:
    """Topics of the broker, with no topic `flights` before and after a test."""
    topics = Topics.of(settings.kafka, settings.kafka.bootstrap_servers)
    if topics.describe(TOPIC):
        topics.delete(TOPIC)
    yield topics
    if topics.describe(TOPIC):
        topics.delete(TOPIC)


Row = tuple[bytes | None, bytes | None, int]


def read_all(settings: Settings, topics: Topics) -> dict[int, list[Row]]:
    """Key, value and timestamp of every record by partition."""
    ends = topics.offsets(TOPIC).latest
    config = client_config(settings.kafka, topics.bootstrap)
    consumer = Consumer(config | {"group.id": "test", "enable.auto.commit": False, "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(TOPIC, partition, 0) for partition in ends])
    rows: dict[int, list[Row]] = {partition: [] for partition in ends}
    deadline = time.monotonic() + 30
    while sum(map(len, rows.values())) < sum(ends.values()):
        assert time.monotonic() < deadline
        for message in consumer.consume(10_000, 0.2):
            assert message.error() is None
            partition = message.partition()
            assert partition is not None
            rows[partition].append((message.key(), message.value(), message.timestamp()[1]))
    consumer.close()
    return rows


def expected(records: dataset.FlightRecords) -> dict[int, list[Row]]:
    rows: dict[int, list[Row]] = {partition: [] for partition in range(4)}
    places = dataset.partitions(4)[: len(records)].tolist()
    for row, partition in zip(zip(records.keys, records.values, records.timestamps, strict=True), places, strict=True):
        rows[partition].append(row)
    return rows


def test_every_flight_is_sent_once_in_order_to_the_partition_of_its_key(settings: Settings, topics: Topics) -> None:
    reported: list[tuple[int, int]] = []
    report = feed(settings, rate=None, share=SHARE, progress=lambda sent, total: reported.append((sent, total)))
    assert (report.records, report.held, report.total, report.stopped) == (COUNT, COUNT, COUNT, False)
    # The partition is librdkafka's choice in one and our own murmur2 in the other.
    assert read_all(settings, topics) == expected(dataset.records(SHARE))
    assert reported[-1] == (COUNT, COUNT)


def test_the_topic_keeps_records_of_2013(settings: Settings, topics: Topics) -> None:
    feed(settings, rate=None, share=0.001)
    info = topics.describe(TOPIC)
    assert info
    assert (info.partitions, info.retention_ms, info.cleanup_policy) == (4, -1, "delete")


def test_feeding_twice_is_refused_unless_asked_for(settings: Settings, topics: Topics) -> None:
    feed(settings, rate=None, share=SHARE)
    assert survey(settings, SHARE).complete
    with pytest.raises(UsageError, match="already holds"):
        feed(settings, rate=None, share=SHARE)
    with pytest.raises(UsageError, match="already holds"):
        feed(settings, rate=None, share=SHARE / 2)
    assert topics.offsets(TOPIC).total == COUNT
    assert feed(settings, rate=None, share=SHARE, again=True).records == COUNT
    assert topics.offsets(TOPIC).total == 2 * COUNT
    assert survey(settings, SHARE).records == 2 * COUNT


def test_a_stopped_feed_goes_on_where_it_stopped(settings: Settings, topics: Topics) -> None:
    stop = threading.Event()
    first = feed(settings, rate=None, share=SHARE, stop=stop, chunk=500, progress=lambda *_: stop.set())
    assert (first.records, first.stopped) == (500, True)
    second = feed(settings, rate=None, share=SHARE)
    assert (second.records, second.held, second.stopped) == (COUNT - 500, COUNT, False)
    assert read_all(settings, topics) == expected(dataset.records(SHARE))


def test_ctrl_c_ends_a_feed_with_a_report(settings: Settings, topics: Topics) -> None:
    def interrupt(sent: int, _: int) -> None:
        if sent >= 1000:
            raise KeyboardInterrupt

    report = feed(settings, rate=None, share=SHARE, chunk=500, progress=interrupt)
    assert (report.records, report.stopped) == (1000, True)
    feed(settings, rate=None, share=SHARE)
    assert read_all(settings, topics) == expected(dataset.records(SHARE))


def test_a_feeder_killed_in_the_middle_leaves_nothing_doubled_or_lost(settings: Settings, topics: Topics) -> None:
    program = f"""
        from pathlib import Path
        from streaming_jobs.examples.flights.feeder import feed
        from streaming_jobs.settings import KafkaSettings, Settings
        kafka = KafkaSettings(bootstrap_servers={topics.bootstrap!r})
        feed(Settings(home=Path({str(settings.home)!r}), kafka=kafka), rate=3000, share={SHARE})
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    try:
        deadline = time.monotonic() + 60
        while not topics.describe(TOPIC) or topics.offsets(TOPIC).total < 1000:
            assert child.poll() is None
            assert time.monotonic() < deadline
    finally:
        child.kill()
        child.wait()
    assert topics.offsets(TOPIC).total < COUNT
    feed(settings, rate=None, share=SHARE)
    assert read_all(settings, topics) == expected(dataset.records(SHARE))


@pytest.mark.long
def test_a_broker_killed_in_the_middle_of_a_feed_gets_every_flight_once(
    broker: Broker, settings: Settings, topics: Topics
) -> None:
    under_way = threading.Event()

    def kill_and_start() -> None:
        assert under_way.wait(60)
        broker.kill()
        broker.start()

    killer = threading.Thread(target=kill_and_start)
    killer.start()

    def told(held: int, _: int) -> None:
        if held >= 1000:
            under_way.set()

    report = feed(settings, rate=4_000, share=SHARE, progress=told)
    killer.join()
    assert (report.records, report.stopped) == (COUNT, False)
    assert read_all(settings, topics) == expected(dataset.records(SHARE))


def test_after_a_lost_connection_the_topic_says_what_is_missing(
    settings: Settings, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that was written, but whose acknowledgement was lost, is not sent again."""
    whole, seen = _Sender.send, []

    def lost_after_half(self: _Sender, positions: Any, rate: float | None, progress: Any) -> int:
        seen.append(len(positions))
        if len(seen) == 1:
            whole(self, positions[: COUNT // 2], rate, progress)
            raise _Lost
        return whole(self, positions, rate, progress)

    monkeypatch.setattr(_Sender, "send", lost_after_half)
    reported: list[int] = []
    report = feed(settings, rate=None, share=SHARE, progress=lambda held, _: reported.append(held))
    assert (report.records, seen) == (COUNT, [COUNT, COUNT - COUNT // 2])
    assert reported == sorted(reported) and reported[-1] == COUNT
    assert read_all(settings, topics) == expected(dataset.records(SHARE))


def test_a_larger_share_later_adds_the_rest(settings: Settings, topics: Topics) -> None:
    feed(settings, rate=None, share=SHARE / 2)
    feed(settings, rate=None, share=SHARE)
    assert read_all(settings, topics) == expected(dataset.records(SHARE))


def test_partitions_never_drift_apart_by_more_than_a_chunk(settings: Settings, topics: Topics) -> None:
    """Before a chunk is sent, all earlier ones are in the topic: what is missing is only of the newest chunk."""
    partitions = dataset.partitions(4)

    def look(sent: int, _: int) -> None:
        counts = topics.offsets(TOPIC).counts
        assert list(counts.values()) == np.bincount(partitions[:sent], minlength=4).tolist()

    feed(settings, rate=None, share=SHARE, chunk=1000, progress=look)


def test_a_chunk_is_never_larger_than_the_bound(settings: Settings, topics: Topics) -> None:
    reported: list[int] = []
    feed(settings, rate=None, share=SHARE, chunk=10**9, progress=lambda sent, _: reported.append(sent))
    assert max(np.diff([0, *reported])) == feeder.CHUNK


def test_a_rate_is_never_exceeded(settings: Settings, topics: Topics) -> None:
    reported: list[int] = []
    report = feed(settings, rate=1_000, share=0.004, progress=lambda sent, _: reported.append(sent))
    assert report.records == dataset.flights_in(0.004)
    assert reported[0] == 1
    assert report.seconds >= (report.records - 1) / 1_000


def test_a_topic_that_would_lose_old_records_is_refused(settings: Settings, topics: Topics) -> None:
    topics.create(TOPIC, 4, retention_ms=7 * 86_400_000)
    with pytest.raises(UsageError, match=r"retention\.ms=604800000"):
        feed(settings, rate=None, share=SHARE)
    topics.delete(TOPIC)
    topics.create(TOPIC, 4, cleanup_policy="compact")
    with pytest.raises(UsageError, match="compact"):
        feed(settings, rate=None, share=SHARE)
    assert topics.offsets(TOPIC).total == 0


def test_a_topic_with_records_of_somebody_else_is_refused(settings: Settings, topics: Topics) -> None:
    topics.create(TOPIC, 4)
    producer = Producer(client_config(settings.kafka, topics.bootstrap))
    producer.produce(TOPIC, value=b"{}", key=b"UA1545")
    assert producer.flush(10) == 0
    with pytest.raises(UsageError, match="not the flight that belongs there"):
        feed(settings, rate=None, share=SHARE)
    assert survey(settings, SHARE).foreign
    assert topics.offsets(TOPIC).total == 1


def test_two_feeders_of_one_home_do_not_run_at_once(settings: Settings, topics: Topics) -> None:
    def second(*_: int) -> None:
        with pytest.raises(LeaseBusy, match="another feeder"):
            feed(settings, rate=None, share=SHARE)

    assert feed(settings, rate=None, share=SHARE, progress=second).records == COUNT


def test_a_topic_recreated_under_its_name_has_another_id(settings: Settings, topics: Topics) -> None:
    first = topics.create(TOPIC, 4)
    assert topics.describe(TOPIC) == first
    with pytest.raises(UsageError, match="exists"):
        topics.create(TOPIC, 4)
    topics.delete(TOPIC)
    assert topics.describe(TOPIC) is None
    assert TOPIC not in topics.names()
    assert topics.create(TOPIC, 4).id != first.id
    assert TOPIC in topics.names()


def test_asking_about_a_topic_that_is_not_there_is_refused(settings: Settings, topics: Topics) -> None:
    for ask in (topics.offsets, topics.delete, lambda name: topics.offsets_for_time(name, 0)):
        with pytest.raises(UsageError, match="there is no topic flights"):
            ask(TOPIC)


def test_offsets_for_a_time_are_the_first_records_not_older(settings: Settings, topics: Topics) -> None:
    feed(settings, rate=None, share=SHARE)
    records = dataset.records(SHARE)
    partitions, stamps = dataset.partitions(4)[:COUNT], np.array(records.timestamps)
    middle = records.timestamps[COUNT // 2]
    before = {p: int(((partitions == p) & (stamps < middle)).sum()) for p in range(4)}
    assert topics.offsets_for_time(TOPIC, middle) == before
    assert topics.offsets_for_time(TOPIC, 0) == dict.fromkeys(range(4), 0)
    assert topics.offsets_for_time(TOPIC, records.timestamps[-1] + 1) == topics.offsets(TOPIC).latest
