"""A topic is read up to where it ended when the reading began, whatever arrives or goes meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import KafkaError

from streaming_jobs.errors import BrokerUnreachable, TransientError
from streaming_jobs.formats.framing import ID_HEADER, IdFrame
from streaming_jobs.settings import KafkaSettings
from streaming_jobs.verification.offset_ranges import Span
from streaming_jobs.verification.topic import CommittedReader, DeadlinePassed


@dataclass
class Message:
    """One message, or an event that librdkafka hands out as one."""

    at: int
    code: int | None = None

    def error(self) -> Any:
        return None if self.code is None else KafkaError(self.code)

    def offset(self) -> int:
        return self.at

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000 + self.at

    def key(self) -> bytes:
        return b"k"

    def value(self) -> bytes:
        return b"v"

    def headers(self) -> list[tuple[str, bytes]] | None:
        return [("other", b"x"), (ID_HEADER, b"\0id")] if self.at == 1 else None


END = KafkaError._PARTITION_EOF


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CommittedReader]:
    def make(*answers: list[Message], high: int = 5, **options: Any) -> CommittedReader:
        left = list(answers)

        class Consumer:
            def __init__(self, config: dict[str, Any]) -> None:
                assert config["isolation.level"] == "read_committed" and config["auto.offset.reset"] == "error"

            def assign(self, places: list[Any]) -> None:
                assert [place.offset for place in places] == [1]

            def consume(self, *_: Any, **__: Any) -> list[Message]:
                return left.pop(0) if left else []

            def close(self) -> None:
                """Nothing is held."""

        monkeypatch.setattr("streaming_jobs.verification.topic.Consumer", Consumer)
        kafka = KafkaSettings(timeout=timedelta(seconds=0.3))
        return CommittedReader(kafka, "nowhere:1", "things", "id", {0: 1}, {0: high}, **options)

    return make


def offsets(reader: CommittedReader) -> list[int]:
    return reader.content().partitions[0].offsets.tolist()


READ: dict[str, tuple[tuple[list[Message], ...], int, list[int]]] = {
    "the last offset, and no end of the partition is waited for": (
        ([Message(at) for at in range(1, 5)],),
        5,
        [1, 2, 3, 4],
    ),
    "a record behind the end, where the last offsets are markers": (
        ([Message(1), Message(2)], [Message(9), Message(10)]),
        5,
        [1, 2],
    ),
    "the end of the partition, if it is far enough": (
        ([Message(1), Message(2, END)], [Message(2), Message(5, END)]),
        5,
        [1, 2],
    ),
    "once, where the partition is empty": ((), 1, []),
}


@pytest.mark.parametrize(("answers", "high", "read"), READ.values(), ids=READ)
def test_it_ends_at(
    reader: Callable[..., CommittedReader], answers: tuple[list[Message], ...], high: int, read: list[int]
) -> None:
    assert offsets(reader(*answers, high=high)) == read


def test_a_silent_broker_a_deadline_that_has_passed_and_records_that_are_deleted_meanwhile_are_told(
    reader: Callable[..., CommittedReader],
) -> None:
    with pytest.raises(BrokerUnreachable, match="read topic things, partition 0"):
        offsets(reader([Message(1)]))
    with pytest.raises(DeadlinePassed) as error:
        offsets(reader([Message(1)], until=time.monotonic() - 1))
    assert "recourse verify --timeout" in error.value.next_step
    with pytest.raises(TransientError, match="were deleted while they were read"):
        offsets(reader([Message(1), Message(1, KafkaError._AUTO_OFFSET_RESET)]))


def test_progress_comes_to_all_offsets_and_the_records_have_their_time(reader: Callable[..., CommittedReader]) -> None:
    passed: list[int] = []
    made = reader([Message(at) for at in range(1, 5)])
    made.content(progress=passed.append)
    assert sum(passed) == 4 and 0 not in passed
    again = reader([Message(at) for at in range(1, 5)])
    assert [r.timestamp for r in again.records([Span("things", 0, 0, 3)])] == [1001, 1002]


def test_headers_are_kept_beside_the_value_for_formats_that_read_them(reader: Callable[..., CommittedReader]) -> None:
    made = reader([Message(at) for at in range(1, 5)])
    records = list(made.records([Span("things", 0, 1, 5)]))
    assert [record.headers for record in records] == [[("other", b"x"), (ID_HEADER, b"\0id")], (), (), ()]
    assert [IdFrame().one(b"v", record.headers) for record in records] == [b"\0idv", b"v", b"v", b"v"]
    assert {record.value for record in records} == {b"v"}


def test_the_time_of_who_takes_the_records_is_no_silence_of_the_broker(reader: Callable[..., CommittedReader]) -> None:
    read = []
    for record in reader([Message(1)], [], [Message(2)], high=3).records([Span("things", 0, 1, 3)]):
        read.append(record.offset)
        time.sleep(0.4)
    assert read == [1, 2]
