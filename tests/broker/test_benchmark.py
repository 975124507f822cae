"""The short form of `benchmarks speed`: the product does each work, and what it wrote is the truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from confluent_kafka import Producer

from benchmarks.feeds import create_topic, feed_backlog
from benchmarks.place import Place
from benchmarks.speed.contestants import Recourse, RecourseTopics
from benchmarks.speed.measure import backlog, live
from benchmarks.speed.records import WORKS, Work, generate, inputs
from benchmarks.speed.topic_watch import OutputTopic
from streaming_jobs.platform.broker import Broker
from tests.support.waiting import wait_for


@pytest.fixture
def place(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A JVM that lives for seconds is quicker without its optimising compiler."""
    monkeypatch.setenv("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")
    return Place(tmp_path, broker.start())


@pytest.mark.parametrize(
    "contestant",
    [Recourse("recourse"), pytest.param(RecourseTopics("topics"), marks=pytest.mark.long)],
    ids=lambda c: c.name,
)
def test_a_backlog_becomes_the_truth_and_gives_figures(contestant: Recourse, place: Place, topic: str) -> None:
    records = generate(4_000, seed=3)
    create_topic(place.bootstrap, topic)
    feed_backlog(place.bootstrap, topic, records)
    figures = backlog(contestant, "windowed", place, topic, records)
    assert figures["records"] == 4_002 and figures["commits"] >= 1
    assert figures["rate"] > 50 and 0 < figures["first_batch_s"] < 60
    assert figures["cpu_s"] > 0 and figures["peak_mb"] > 100


@pytest.mark.long
@pytest.mark.parametrize("work", [work for work in Recourse.works if work not in WORKS])
def test_the_further_works_become_their_truths(work: Work, place: Place, topic: str) -> None:
    records = generate(4_000, seed=3)
    for name in inputs(topic, work):
        create_topic(place.bootstrap, name)
    feed_backlog(place.bootstrap, topic, records, work)
    assert backlog(Recourse("recourse"), work, place, topic, records)["records"] == 4_002


@pytest.mark.long
def test_live_records_become_the_truth_and_give_latencies(place: Place) -> None:
    figures = live(Recourse("recourse"), "stateless", place, seed=3, seconds=1, warm_up=1)
    assert figures["records"] == 4_002
    assert 0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["worst_ms"] < 60_000


def test_an_output_with_an_open_transaction_is_not_settled_and_a_committed_one_is_counted(
    broker: Broker, topic: str
) -> None:
    bootstrap = broker.start()
    create_topic(bootstrap, topic)
    output = OutputTopic(bootstrap, topic, work="running", records=7, rows=2)
    wait_for(lambda: output.settled() == 0, "the leaders of the topic's partitions")
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": topic})
    producer.init_transactions()
    producer.begin_transaction()
    for account, count in (("a", 1), ("b", 3), ("a", 4)):
        value = json.dumps({"account": account, "count": count, "total": 0})
        producer.produce(topic, key=account, value=value, partition=0)
    producer.flush()
    assert output.settled() is None and not output.complete()
    producer.commit_transaction()
    wait_for(lambda: output.settled() == 4, "the three records and the mark of the transaction")
    assert output.complete()  # 4 and 3 records: the newest total of each account
    assert not OutputTopic(bootstrap, topic, work="running", records=8, rows=2).complete()
    assert not OutputTopic(bootstrap, topic, work="running", records=7, rows=None).complete()
