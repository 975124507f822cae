"""The feeder of numbers: whole keys at the end, bursts, and failures that end the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from streaming_jobs.verification.chaos import number_subject
from streaming_jobs.verification.chaos.number_subject import NumberFeed
from streaming_jobs.verification.chaos.numbers import Fed
from streaming_jobs.verification.chaos.sessions import ChaosFailed
from streaming_jobs.verification.topic import RawRecord


class FakeProducer:
    """Takes records, and reports those before `fails_from` as delivered, the others as failed."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.records: list[tuple[bytes, bytes]] = []
        self.full_once, self.fails_from, self.unanswered = True, 1_000_000, 0
        self.lock = threading.Lock()

    def produce(self, topic: str, key: bytes, value: bytes, on_delivery: Callable[[Any, Any], None]) -> None:
        if self.full_once:
            self.full_once = False
            raise BufferError
        with self.lock:
            self.records.append((key, value))
            on_delivery("broken" if len(self.records) > self.fails_from else None, None)

    def poll(self, seconds: float) -> None: ...

    def flush(self, seconds: float) -> int:
        return self.unanswered


@pytest.fixture
def producers(monkeypatch: pytest.MonkeyPatch) -> list[FakeProducer]:
    made: list[FakeProducer] = []

    def connect(config: dict[str, Any]) -> FakeProducer:
        made.append(FakeProducer(config))
        return made[-1]

    monkeypatch.setattr(number_subject, "Producer", connect)
    return made


def test_at_the_end_every_key_has_all_its_numbers_and_a_burst_is_at_full_speed(producers: list[FakeProducer]) -> None:
    made = NumberFeed({"bootstrap.servers": "x"}, "t", seed=1, rate=20)
    made.start()
    assert made.burst(5000, 3600) >= 5000, "at the feed's rate of 20 a second this test would run into its time limit"
    held = made.finish()
    sent = producers[0].records
    assert held == len(sent) >= 5000 and not made.dry
    fed = Fed([RawRecord("t", 0, i, 0, *each) for i, each in enumerate(sent)])
    assert fed.faults() == [] and len(fed.numbers) >= 40
    assert producers[0].config["enable.idempotence"] and producers[0].config["partitioner"] == "murmur2_random"


def test_a_record_that_is_not_delivered_ends_the_run(producers: list[FakeProducer]) -> None:
    made = NumberFeed({}, "t", seed=1, rate=10_000)
    producers[0].fails_from = 3
    made.start()
    with pytest.raises(ChaosFailed, match="could not be sent to t: broken"):
        made.burst(5000, 30)
    with pytest.raises(ChaosFailed, match="could not be sent"):
        made.finish()


def test_records_that_nobody_acknowledges_end_the_run(producers: list[FakeProducer]) -> None:
    made = NumberFeed({}, "t", seed=1, rate=10)
    producers[0].unanswered = 7
    with pytest.raises(ChaosFailed, match="7 records are not acknowledged"):
        made.finish()


def test_a_burst_that_takes_too_long_ends_the_run(producers: list[FakeProducer]) -> None:
    made = NumberFeed({}, "t", seed=1, rate=10)
    with pytest.raises(ChaosFailed, match="0 of 100 records are fed"):
        made.burst(100, 0)
