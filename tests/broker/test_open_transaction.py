"""A transaction that another program leaves open: the lag counts its records, and names the partition."""

from __future__ import annotations

from typing import Any

from confluent_kafka import Producer

from streaming_jobs.platform.broker import Broker
from streaming_jobs.runtime.lag import EndOffsets, LagClock
from streaming_jobs.sources.connection import client_config
from streaming_jobs.sources.topics import Topics
from tests.conftest import SettingsFactory
from tests.support.driver import produce
from tests.support.things import thing
from tests.support.waiting import wait_for


def test_a_transaction_that_hangs_is_unread_records_and_no_end(
    broker: Broker, settings: SettingsFactory, topic: str
) -> None:
    bootstrap = broker.start()
    topics = Topics(client_config(settings().kafka, bootstrap))
    topics.create(topic, 2)
    produce(bootstrap, topic, (thing(i) for i in range(10)), partition=1)
    config: dict[str, Any] = {"bootstrap.servers": bootstrap, "transactional.id": topic}
    hanging = Producer(config)
    hanging.init_transactions(30)
    hanging.begin_transaction()
    for _ in range(20):
        hanging.produce(topic, b"x", partition=1)
    assert hanging.flush(30) == 0
    looking, position = EndOffsets(topics, [topic]), {topic: {0: 0, 1: 10}}
    looking.look()
    looking.look()
    ends = looking.newest([topic])
    assert ends is not None and list(ends.blocked(position)[topic]) == [1]
    assert LagClock().measure(position, ends).records == 20
    hanging.abort_transaction(30)

    def free() -> bool:
        looking.look()
        ends = looking.newest([topic])
        return ends is not None and not ends.open_since

    wait_for(free, "the end of the transaction")
