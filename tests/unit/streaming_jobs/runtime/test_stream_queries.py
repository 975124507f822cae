"""The queries of a session: their connection, their start, and the check of the topics before each commit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from streaming_jobs.errors import BrokerUnreachable, OffsetsLost
from streaming_jobs.runtime.query_builder import BuiltQuery, QueryHandle
from streaming_jobs.runtime.stream_queries import QueryHooks, SparkQueries, TopicIdCheck, start
from streaming_jobs.sources.connection import Connection
from streaming_jobs.state.stream_record import BoundTopic
from tests.conftest import SettingsFactory
from tests.support.runners import Clock, Make, pipeline_of
from tests.support.worlds import TOPIC, TOPIC_ID, FakeTopics, parity, record


def test_a_pipeline_is_handed_over_before_its_query_starts(make: Make, settings: SettingsFactory) -> None:
    """The first batch can come before the start returns, or while it fails."""
    running = make()
    first, running.pipeline = pipeline_of(running), None

    def starts() -> None:
        assert running.pipeline is first
        raise ConnectionError("the JVM is gone")

    writer: Any = SimpleNamespace(start=starts)
    hooks = QueryHooks("continuous", running.stop.requested, running._built, running.batch_done)
    with pytest.raises(ConnectionError):
        start(BuiltQuery(record(), first, writer, QueryHandle(), nullcontext()), hooks)


def test_a_connection_that_was_given_is_the_one_that_is_used(settings: SettingsFactory) -> None:
    topics: Any = FakeTopics()
    given = Connection({}, topics, topics)
    queries = SparkQueries(settings({"kafka.bootstrap_servers": "127.0.0.1:1"}), connection=given)
    queries.open([])
    queries.close()
    assert queries.connection is given


def test_a_topic_that_is_recreated_under_a_running_stream_stops_it_before_the_commit_and_a_broker_away_does_not(
    settings: SettingsFactory,
) -> None:
    topics = FakeTopics()
    TopicIdCheck(parity, settings(), topics)(record())
    assert topics.info is not None
    topics.info = replace(topics.info, id="new")
    with pytest.raises(OffsetsLost, match="was deleted and made anew while"):
        TopicIdCheck(parity, settings(), topics)(record())

    class Away(FakeTopics):
        def describe(self, name: str) -> Any:
            raise BrokerUnreachable("no broker")

    TopicIdCheck(parity, settings(), Away())(record())
    topics: Any = FakeTopics()
    check = SparkQueries(settings(), connection=Connection({}, topics, topics)).before_commit(parity)
    topics.info = replace(topics.info, id="new")
    with pytest.raises(OffsetsLost, match="was deleted and made anew while stream parity was reading it"):
        check(record())


def test_a_topic_that_the_broker_does_not_know_was_deleted_only_if_that_lasts(
    settings: SettingsFactory, clock: Clock
) -> None:
    """Brokers of a rolling restart answer for a moment before they know their topics."""
    topics = FakeTopics()
    there, check = topics.info, TopicIdCheck(parity, settings(), topics, clock.monotonic)
    for topics.info in (None, None, there, None):
        check(record())
        clock.now += 50
    with pytest.raises(OffsetsLost, match="was deleted while"):
        clock.now += 10
        check(record())


def test_topics_are_asked_for_at_most_once_a_second(settings: SettingsFactory, clock: Clock) -> None:
    described: list[str] = []

    class Counting(FakeTopics):
        def describe(self, name: str) -> Any:
            described.append(name)
            return super().describe(name)

    check = TopicIdCheck(parity, settings(), Counting(), clock.monotonic)
    for _ in range(10):
        check(record(topics=(BoundTopic(TOPIC, TOPIC_ID, {}),)))
    assert described == [TOPIC]
    clock.now += 2
    check(record())
    assert len(described) == 2
