"""A topic is gone when the broker says so and says so again; a broker that is not ready yet is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from structlog.testing import capture_logs

from streaming_jobs.errors import BrokerUnreachable, UsageError
from streaming_jobs.sources import topics as module
from streaming_jobs.sources.topics import Topics

UNKNOWN, ELECTION = KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.LEADER_NOT_AVAILABLE


class Admin:
    """Answers to describe in turn: an error's code, or None for the topic; the last answer stays. Polls take time."""

    def __init__(self, clock: Clock, answers: Sequence[int | None]) -> None:
        self.clock = clock
        self.answers = list(answers)
        self.asked = 0
        self.configs: int | None = None

    def poll(self, seconds: float) -> None:
        self.clock.now += seconds

    def describe_topics(self, names: Any, **_: Any) -> dict[str, Future[Any]]:
        self.asked += 1
        code = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        partitions = [SimpleNamespace(replicas=[1, 2]), SimpleNamespace(replicas=[1])]
        return {"flights": answer(code, SimpleNamespace(topic_id="id", partitions=partitions))}

    def describe_configs(self, resources: Any, **_: Any) -> dict[Any, Future[Any]]:
        values = {
            "retention.ms": "-1",
            "cleanup.policy": "delete",
            "min.insync.replicas": "2",
            "max.message.bytes": "9",
        }
        configs = {name: SimpleNamespace(value=value) for name, value in values.items()}
        return {resources[0]: answer(self.configs, configs)}


class Clock:
    """A clock that polls move."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def answer(code: int | None, value: object) -> Future[Any]:
    future: Future[Any] = Future()
    if code is None:
        future.set_result(value)
    else:
        future.set_exception(KafkaException(KafkaError(code)))
    return future


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Topics, Admin]]:
    """Topics whose client gives these answers."""

    def make(*answers: int | None) -> tuple[Topics, Admin]:
        clock = Clock()
        monkeypatch.setattr(module, "time", clock)
        topics = Topics({"bootstrap.servers": "127.0.0.1:1"}, timedelta(seconds=2))
        admin = Admin(clock, answers)
        monkeypatch.setattr(topics, "_admin", admin)
        return topics, admin

    return make


Say = Callable[..., tuple[Topics, Admin]]


def test_a_topic_whose_leader_is_being_elected_is_waited_for(say: Say) -> None:
    info = say(*[ELECTION] * 50, None)[0].describe("flights")
    assert info is not None and (info.id, info.partitions) == ("id", 2)
    assert (info.replicas, info.min_insync_replicas, info.max_message_bytes) == (1, 2, 9)


def test_a_topic_that_is_unknown_for_a_moment_is_there_and_one_that_stays_so_for_half_a_second_is_gone(
    say: Say,
) -> None:
    assert say(UNKNOWN, UNKNOWN, None)[0].describe("flights") is not None
    topics, admin = say(UNKNOWN)
    assert topics.describe("flights") is None
    assert admin.asked > 1
    assert 0.5 <= admin.clock.now - Clock.now < 1


def test_a_request_that_ended_with_its_connection_is_made_again(say: Say) -> None:
    topics, admin = say(KafkaError._DESTROY, None)
    assert topics.describe("flights") is not None
    assert admin.asked == 2


@pytest.mark.parametrize("code", [ELECTION, KafkaError._DESTROY, KafkaError._STATE, KafkaError.REQUEST_TIMED_OUT])
def test_an_election_that_does_not_end_and_an_error_of_the_client_are_a_broker_out_of_reach(
    say: Say, code: int
) -> None:
    """And neither a deleted topic nor a lack of rights."""
    with pytest.raises(BrokerUnreachable, match="describe topic flights"):
        say(code)[0].describe("flights")


def test_a_client_that_has_lost_all_brokers_is_replaced_by_a_new_one(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it is replaced, a client of a broker that is away is not made anew for each request."""
    topics, lost = say(KafkaError._TIMED_OUT)
    made: list[Admin] = []
    monkeypatch.setattr(module, "AdminClient", lambda _: made.append(Admin(lost.clock, [None])) or made[-1])
    for _ in range(3):
        with pytest.raises(BrokerUnreachable):
            topics.describe("flights")
    assert not made
    lost.clock.now += 10
    assert topics.describe("flights") is not None
    assert topics.describe("flights") is not None
    assert (lost.asked, len(made)) == (3, 1)


def test_a_topic_whose_settings_the_user_may_not_see_is_described_without_them(say: Say) -> None:
    topics, admin = say(None)
    admin.configs = KafkaError.TOPIC_AUTHORIZATION_FAILED
    with capture_logs() as logs:
        info = topics.describe("flights")
        assert topics.describe("flights") == info
    assert info is not None and (info.id, info.partitions, info.cleanup_policy) == ("id", 2, "unknown")
    (warning,) = [each for each in logs if each["log_level"] == "warning"]
    assert "DESCRIBE_CONFIGS" in warning["missing"] and warning["topic"] == "flights"


def test_a_request_without_its_right_names_the_right(say: Say) -> None:
    topics, _ = say(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(UsageError, match="describe topic flights: .*\n.*Kafka's right DESCRIBE on the topic"):
        topics.describe("flights")
