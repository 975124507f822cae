"""Records are sent once each, also through a full queue, and the sender knows which were not acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from streaming_jobs.errors import BrokerUnreachable
from streaming_jobs.settings import KafkaSettings
from streaming_jobs.sources import producing
from streaming_jobs.sources.producing import NewRecord, produce


class Queue:
    """A producer whose queue has room for two records; `refuse` are the values that the broker does not take."""

    def __init__(self, config: dict[str, Any], refuse: tuple[bytes, ...] = (), silent: bool = False) -> None:
        self.config, self.refuse, self.silent = config, refuse, silent
        self.waiting: list[tuple[bytes, Callable[..., None]]] = []
        self.taken: list[bytes] = []

    def produce(self, topic: str, *, value: bytes, on_delivery: Callable[..., None], **_: object) -> None:
        if len(self.waiting) == 2:
            raise BufferError
        self.waiting.append((value, on_delivery))

    def poll(self, timeout: float) -> None:
        if timeout:
            self.flush(timeout)

    def flush(self, _: float) -> int:
        if self.silent:
            return len(self.waiting)
        for value, on_delivery in self.waiting:
            self.taken += [] if value in self.refuse else [value]
            on_delivery("too large" if value in self.refuse else None, None)
        self.waiting.clear()
        return 0


def send(monkeypatch: pytest.MonkeyPatch, count: int, **of_the_broker: Any) -> tuple[Queue, Callable[[], int]]:
    queue = Queue({}, **of_the_broker)
    monkeypatch.setattr(producing, "Producer", lambda config: queue)
    records = [NewRecord(b"%d" % number) for number in range(count)]
    return queue, lambda: produce(KafkaSettings(), "broker:1", "t", records, timedelta(seconds=1))


def test_each_record_is_sent_once_also_when_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, sent = send(monkeypatch, 5)
    assert sent() == 5 and queue.taken == [b"0", b"1", b"2", b"3", b"4"]


def test_records_that_are_refused_or_never_acknowledged_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _, sent = send(monkeypatch, 3, refuse=(b"1",))
    with pytest.raises(BrokerUnreachable, match="1 of 3 records were not acknowledged by broker:1: too large"):
        sent()
    _, sent = send(monkeypatch, 2, silent=True)
    with pytest.raises(BrokerUnreachable, match="2 of 2 records .*: no answer"):
        sent()
