"""The verifier on real topics and streams that are not shipped: while records arrive, and as a person runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from streaming_jobs.platform.broker import Broker
from streaming_jobs.proof.topic import read_topic
from streaming_jobs.sources.topics import Topics
from tests.conftest import SettingsFactory
from tests.driver import REPOSITORY, produce, until
from tests.things import thing

_WITHOUT_END = """
import sys
import time

from confluent_kafka import Producer

from tests.things import thing

producer, (key, value) = Producer({"bootstrap.servers": sys.argv[1], "linger.ms": 0}), thing(0)
while not time.sleep(0.001):
    for partition in (0, 1):
        for _ in range(20):
            producer.produce(sys.argv[2], key=key, value=value, partition=partition)
    producer.poll(0)
"""


@contextmanager
def produced_without_end(bootstrap: str, topic: str) -> Iterator[None]:
    """Records keep arriving in both partitions, so that no reader comes to a partition's end and finds it at rest."""
    command = [sys.executable, "-c", _WITHOUT_END, bootstrap, topic]
    sender = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    try:
        yield
    finally:
        sender.kill()
        sender.wait()


@pytest.mark.timeout(45)
def test_a_topic_that_grows_is_read_up_to_where_it_ended(broker: Broker, settings: SettingsFactory, topic: str) -> None:
    bootstrap = broker.start()
    made = settings({"kafka.bootstrap_servers": bootstrap})
    topics = Topics.of(made.kafka, bootstrap)
    topics.create(topic, 2)
    produce(bootstrap, topic, (thing(i) for i in range(5_000)))
    with produced_without_end(bootstrap, topic):
        until(lambda: topics.offsets(topic).total > 6_000, 20, "the sender's first records")
        before, begun = topics.offsets(topic).total, time.monotonic()
        content = read_topic(made.kafka, bootstrap, topic)
        seconds, after = time.monotonic() - begun, topics.offsets(topic).total
    assert before <= content.records <= after and seconds < 15
    assert all(len(p.offsets) == p.high - p.low for p in content.partitions.values())
