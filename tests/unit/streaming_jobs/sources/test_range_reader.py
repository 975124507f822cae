"""Ranges of offsets are read whole, over gaps and changes of place, or it is an error; never in part.

A worker keeps its readers: each reads one topic for one source. tests/broker reads with them.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StructField, StructType

from streaming_jobs.declare.format import Refusal
from streaming_jobs.errors import BrokerUnreachable, ConfigurationError, OffsetsLost, PermanentError, TransientError
from streaming_jobs.formats import Json
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.sources import kafka
from streaming_jobs.sources.base import Span
from streaming_jobs.sources.connection import Failures
from streaming_jobs.sources.kafka import KafkaSource, RangePartition, TopicReading
from streaming_jobs.sources.range_reader import RangeReader, consumer_config
from streaming_jobs.sources.record_blocks import RecordBlocks
from streaming_jobs.stream import KafkaTopic
from streaming_jobs.testing.consumer import TOPIC, MemoryConsumer, failure, record

CONFIG = {"bootstrap.servers": "nowhere:1"}


def log(partition: int, *offsets: int) -> dict[int, Message]:
    return {offset: record(partition, offset) for offset in offsets}


def reader(consumer: MemoryConsumer, seconds: float = 0.0) -> RangeReader:
    return RangeReader(TOPIC, CONFIG, timedelta(seconds=seconds), connect=lambda _: consumer)


def read(reader: RangeReader, spans: Mapping[int, Span], most: int = 1000) -> list[tuple[int, int]]:
    """Partition and offset of what a range gives, those of a partition in order."""
    places = [(m.partition(), m.offset()) for messages in reader.read(spans, most) for m in messages]
    assert sorted(places) == sorted(places, key=lambda place: place[0]), "those of a partition are in order"
    return sorted(places)  # type: ignore[arg-type]


def places(partition: int, *offsets: int) -> list[tuple[int, int]]:
    return [(partition, offset) for offset in offsets]


def test_a_range_is_read_and_what_follows_is_kept_for_the_next_one_which_may_be_further_on() -> None:
    consumer = MemoryConsumer({0: log(0, *range(10)), 1: log(1, *range(10))})
    reading = reader(consumer)
    assert read(reading, {0: (2, 5), 1: (0, 4)}) == [*places(0, 2, 3, 4), *places(1, 0, 1, 2, 3)]
    assert read(reading, {0: (5, 10), 1: (4, 5)}) == [*places(0, 5, 6, 7, 8, 9), *places(1, 4)]
    assert [call for call in consumer.calls if call[0] != "consume"] == [("assign", {0: 2, 1: 0})], "nothing came twice"
    consumer = MemoryConsumer({0: log(0, *range(30))}, most=4)
    reading = reader(consumer)
    assert read(reading, {0: (0, 2)}) == places(0, 0, 1)
    assert read(reading, {0: (20, 22)}) == places(0, 20, 21)


def test_partitions_that_swap_readers_are_read_whole_by_both() -> None:
    consumers = [MemoryConsumer({p: log(p, *range(100)) for p in (0, 1)}, most=7) for _ in range(2)]
    readers = [reader(consumer) for consumer in consumers]
    taken: list[tuple[int, int]] = []
    for turn, start in enumerate(range(0, 100, 10)):
        for partition in (0, 1):
            taken += read(readers[(turn + partition) % 2], {partition: (start, start + 10)})
    assert sorted(taken) == [*places(0, *range(100)), *places(1, *range(100))]


def test_a_large_range_and_large_records_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = MemoryConsumer({0: log(0, *range(100))}, most=10)
    parts = [len(messages) for messages in reader(consumer).read({0: (0, 95)}, 30)]
    assert parts == [30, 30, 30, 5]
    monkeypatch.setattr("streaming_jobs.sources.range_reader.MOST_BYTES", 3000)
    records = {offset: record(0, offset, b"x" * 1000) for offset in range(10)}
    consumer = MemoryConsumer({0: records}, most=1)
    assert [len(part) for part in reader(consumer, 60).read({0: (0, 10)}, 1000)] == [3, 3, 3, 1]
    reading = reader(MemoryConsumer({0: records}, most=1), 60)
    assert reading.follow({0: 0}, 0.1, 1000) == {0: 3}
    assert (reading.buffered, reading.buffered_bytes) == (3, 3000)


def test_a_partition_that_runs_far_ahead_of_another_is_given_back() -> None:
    many = 50_000
    consumer = MemoryConsumer({0: log(0, *range(many)), 1: log(1, *range(many))}, most=many)
    consumer.log = {0: log(0, *range(many)), 1: log(1, many)}
    consumer.ends = {1: many + 1}
    consumer.most = 25_000
    reading = reader(consumer)
    assert read(reading, {0: (0, 5), 1: (0, many + 1)}, 10**6) == [*places(0, 0, 1, 2, 3, 4), (1, many)]
    assert reading.buffered < many
    assert read(reading, {0: (5, 8)}) == places(0, 5, 6, 7)


def test_offsets_that_are_gone_or_beyond_the_end_are_lost_and_not_skipped_and_matter_only_in_the_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumer = MemoryConsumer({0: log(0, 50, 51)}, first={0: 50})
    with pytest.raises(OffsetsLost, match=f"offset 10 of {TOPIC} partition 0 is no longer in the topic"):
        read(reader(consumer), {0: (10, 51)})
    consumer = MemoryConsumer({0: log(0, 0, 1)})
    with pytest.raises(OffsetsLost, match="partition 0 ends at offset 2, and the batch at 9"):
        read(reader(consumer), {0: (0, 9)})
    consumer = MemoryConsumer({0: log(0, *range(5)), 1: log(1, *range(5))})
    reading = reader(consumer, 60)
    read(reading, {0: (0, 2), 1: (0, 2)})
    consumer.failures = [failure(KafkaError._AUTO_OFFSET_RESET, 1, 2)]
    assert read(reading, {0: (2, 5)}) == places(0, 2, 3, 4)


def test_a_broker_that_says_nothing_is_an_error_after_the_deadline() -> None:
    consumer = MemoryConsumer({0: log(0, 0)}, ends={0: 5}, reported={(0, 5)})
    reading = reader(consumer)
    consumer.reported.add((0, 5))
    with pytest.raises(BrokerUnreachable, match=rf"read {TOPIC} partition 0 from offset 1 to 5: no answer"):
        reading._position({0: 0})
        consumer.reported.add((0, 5))
        read(reading, {0: (0, 5)})


@dataclass
class Outage(MemoryConsumer):
    """A consumer that gets nothing any more, once it is `away`."""

    away: bool = False

    def consume(self, num_messages: int, timeout: float) -> list[Message]:
        return [] if self.away else super().consume(num_messages, timeout)


@pytest.mark.parametrize("grown", [0, 1])
def test_an_outage_after_the_end_of_a_partition_is_no_lost_record(grown: int) -> None:
    consumer = Outage({0: log(0, *range(5))})
    reading = reader(consumer)
    read(reading, {0: (0, 5)})  # the end of the partition was heard
    consumer.log = {0: log(0, *range(5 + grown))}
    if grown:
        reading.follow({0: 5}, 0, 100)
    consumer.away = True
    with pytest.raises(BrokerUnreachable):
        read(reading, {0: (5, 9)})


@dataclass
class Scripted(MemoryConsumer):
    """A consumer that returns these answers, and then nothing."""

    answers: list[list[Message]] = field(default_factory=list)

    def consume(self, num_messages: int, timeout: float) -> list[Message]:
        return self.answers.pop(0) if self.answers else []


def test_a_record_behind_the_reported_end_withdraws_that_end() -> None:
    answers = [[record(0, 0), failure(KafkaError._PARTITION_EOF, 0, 1)], [record(0, 1)]]
    with pytest.raises(BrokerUnreachable):
        read(reader(Scripted({}, answers=answers)), {0: (0, 9)})


def test_records_that_come_again_are_taken_once() -> None:
    first = [record(0, 0), record(1, 0), record(0, 1), record(1, 1)]
    again = [record(0, 1), record(1, 1), record(1, 2), record(0, 2)]
    reading = reader(Scripted({}, answers=[first, first, again]), seconds=10)
    assert read(reading, {0: (0, 3), 1: (0, 3)}) == [*places(0, 0, 1, 2), *places(1, 0, 1, 2)]


@pytest.mark.parametrize(
    ("answers", "span"),
    [
        ([[0, 1, 0, 1, 2]], (0, 3)),
        ([[2, 3, 0], [4]], (2, 5)),
        ([[2, 4, 9, 2], [10]], (2, 11)),
        ([[4, 4]], (4, 5)),
        ([[2, 9, 2, 9], [10]], (2, 11)),
    ],
)
def test_records_that_come_again_in_one_answer_are_taken_once(answers: list[list[int]], span: Span) -> None:
    given = [[record(0, offset) for offset in answer] for answer in answers]
    wanted = sorted({offset for answer in answers for offset in answer if offset >= span[0]})
    assert read(reader(Scripted({}, answers=given)), {0: span}) == places(0, *wanted)


def test_a_partition_that_nobody_waits_for_does_not_prolong_the_deadline() -> None:
    now = 0.0

    @dataclass
    class Dripping(MemoryConsumer):
        def consume(self, num_messages: int, timeout: float) -> list[Message]:
            """A record of partition 1 each second, none of partition 0."""
            nonlocal now
            now += 1.0
            return [record(1, int(now))]

    reading = reader(Dripping({0: {}, 1: {}}), 15)
    reading.monotonic = lambda: now
    reading._position({1: 0})
    with pytest.raises(BrokerUnreachable, match="partition 0 from offset 0 to 5"):
        read(reading, {0: (0, 5)})
    assert now < 20


def test_partitions_of_earlier_ranges_hold_few_records_all_together() -> None:
    many = MemoryConsumer({p: log(p, *range(5000)) for p in range(10)}, most=1000)
    reading = reader(many, 60)
    read(reading, dict.fromkeys(range(10), (0, 1)))
    many.log = {**many.log, 10: log(10, *range(50_000))}
    read(reading, {10: (0, 50_000)})
    assert reading.buffered <= 20_000 + 10_000


def test_an_idle_topic_is_followed_through_a_short_restart_of_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streaming_jobs.sources.connection._GRACE", -1.0)
    reading = reader(MemoryConsumer({0: {}}))
    reading.follow({0: 0}, 0.1, 100)
    reading._failures(KafkaError(KafkaError._SSL, "SSL handshake failed: connection closed by peer"))
    assert reading.follow({0: 0}, 0.1, 100) == {0: 0}


def test_forbidden_reading_and_a_failing_client_are_permanent_and_other_errors_pass() -> None:
    consumer = MemoryConsumer({0: log(0, 0, 1)}, failures=[failure(KafkaError.LEADER_NOT_AVAILABLE)])
    assert read(reader(consumer, 5), {0: (0, 2)}) == places(0, 0, 1)
    consumer = MemoryConsumer({0: log(0, 0)}, failures=[failure(KafkaError.TOPIC_AUTHORIZATION_FAILED)])
    with pytest.raises(PermanentError, match="may not be read"):
        read(reader(consumer, 5), {0: (0, 1)})

    @dataclass
    class Failing(MemoryConsumer):
        code: int = KafkaError._FATAL

        def consume(self, num_messages: int, timeout: float) -> list[Message]:
            raise KafkaException(KafkaError(self.code))

    with pytest.raises(PermanentError, match="may not be read"):
        read(reader(Failing({0: {}}, code=KafkaError.TOPIC_AUTHORIZATION_FAILED)), {0: (0, 1)})
    with pytest.raises(TransientError, match="cannot be read"):
        read(reader(Failing({0: {}})), {0: (0, 1)})


def test_a_refused_log_in_is_reported_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streaming_jobs.sources.connection._GRACE", -1.0)
    consumer = MemoryConsumer({0: {}}, ends={0: 5})
    consumer.reported.add((0, 5))
    reading = reader(consumer, 60)
    reading._position({0: 0})
    consumer.reported.add((0, 5))
    reading._failures(KafkaError(KafkaError._AUTHENTICATION, "wrong password"))
    with pytest.raises(ConfigurationError, match="wrong password"):
        read(reading, {0: (0, 5)})


def test_following_waits_once_for_the_records_of_all_partitions_and_keeps_them_for_the_range() -> None:
    consumer = MemoryConsumer({0: log(0, 0, 1, 4), 1: {}}, ends={0: 6})
    reading = reader(consumer)
    assert reading.follow({0: 0, 1: 0}, 0.1, 100) == {0: 6, 1: 0}
    assert reading.buffered == 3
    assert read(reading, {0: (0, 6)}) == places(0, 0, 1, 4)
    consumer.calls.clear()
    assert reading.follow({0: 6, 1: 0}, 0.1, 100) == {0: 6, 1: 0}
    assert [call[2] for call in consumer.calls] == [0.1, 0], "it waits for the first record only"
    reading.release()
    reading.close()
    assert consumer.positions == {} and consumer.calls[-1] == ("close",)

    class Slow(MemoryConsumer):
        def consume(self, num_messages: int, timeout: float) -> list[Message]:
            """One message at a time."""
            return super().consume(1, timeout)

    reading = reader(Slow({p: log(p, 0, 1) for p in range(4)}))
    ends = reading.follow(dict.fromkeys(range(4), 0), 0.1, 100)
    assert ends == dict.fromkeys(range(4), 2)


def test_a_busy_topic_is_fetched_when_its_records_are_asked_for_and_a_quiet_partition_ahead() -> None:
    consumer = MemoryConsumer({0: log(0, 0, 1), 1: log(1, 0)})
    reading = reader(consumer, 60)
    assert reading.follow({0: 0, 1: 0}, 0.1, 100) == {0: 2, 1: 1}
    assert not consumer.positions, "nothing is fetched meanwhile"
    consumer.log = {0: log(0, *range(5)), 1: log(1, *range(3))}
    assert read(reading, {0: (0, 2), 1: (0, 1)}) == [*places(0, 0, 1), *places(1, 0)]
    assert not consumer.positions, "the range was there already"
    assert reading.follow({0: 2, 1: 1}, 0.1, 100) == {0: 5, 1: 3}
    assert read(reading, {0: (2, 5), 1: (1, 3)}) == [*places(0, 2, 3, 4), *places(1, 1, 2)]
    consumer.log = {0: log(0, *range(6)), 1: log(1, *range(3))}
    assert reading.follow({0: 5, 1: 3}, 0.1, 100) == {0: 6, 1: 3}
    assert consumer.positions == {0: 6, 1: 3}, "of partition 1 the next record is waited for"


@pytest.mark.parametrize("records", [log(0, *range(5000)), {at: record(0, at, b"x" * 3000) for at in range(5000)}])
def test_of_partitions_behind_which_more_may_wait_it_fetches_ahead(records: dict[int, Message]) -> None:
    consumer = MemoryConsumer({0: records}, most=1000 if len(records[0].value() or b"") < 10 else 100)
    reading = reader(consumer, 60)
    reading.follow({0: 0}, 0.1, 100_000)
    assert consumer.positions, "more than one answer surely holds"
    consumer.log = {0: log(0, *range(5001))}
    read(reading, {0: (0, 10)})
    reading.follow({0: 10}, 0.1, 100_000)
    assert consumer.positions, "and so while the rest of them waits"


def test_a_range_behind_what_was_followed_is_fetched_and_so_is_one_elsewhere() -> None:
    consumer = MemoryConsumer({0: log(0, *range(3))})
    reading = reader(consumer, 60)
    assert reading.follow({0: 0}, 0.1, 100) == {0: 3}
    consumer.log = {0: log(0, *range(9))}
    assert read(reading, {0: (0, 7)}) == places(0, *range(7))
    assert reading.follow({0: 7}, 0.1, 100) == {0: 9} and consumer.positions, "records 7 and 8 were there already"
    consumer.log = {0: log(0, *range(20)), 1: log(1, 0)}
    assert read(reading, {0: (15, 20), 1: (0, 1)}) == [*places(0, *range(15, 20)), *places(1, 0)]
    assert reading.follow({0: 0, 1: 0}, 0.1, 100) == {0: 20, 1: 1} and not consumer.positions
    reading.release()
    assert read(reading, {0: (4, 6)}) == places(0, 4, 5)


def test_a_broker_that_answers_late_is_asked_ahead_and_after_a_while_tried_again() -> None:
    now = 0.0

    @dataclass
    class Late(MemoryConsumer):
        def consume(self, num_messages: int, timeout: float) -> list[Message]:
            """Each answer takes a fifth of a second."""
            nonlocal now
            now += 0.2
            return super().consume(num_messages, timeout)

    consumer = Late({0: {}})
    reading = reader(consumer, 60)
    reading.monotonic = lambda: now
    rested = []
    for at in range(220):
        consumer.log = {0: log(0, *range(at + 1))}
        assert reading.follow({0: at}, 0.1, 100) == {0: at + 1}
        rested.append(not consumer.positions)
    assert [at for at, each in enumerate(rested) if each] == [0, 100, 200]


@given(
    arrivals=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=12),
    most=st.integers(1, 9),
)
def test_of_records_that_arrive_between_batches_each_is_taken_once(arrivals: list[list[int]], most: int) -> None:
    consumer = MemoryConsumer({p: {} for p in range(3)}, most=most)
    reading = reader(consumer, 60)
    at, written, taken = dict.fromkeys(range(3), 0), [0, 0, 0], []
    for arrived in [*arrivals, [0, 0, 0], [0, 0, 0]]:
        written = [before + more for before, more in zip(written, arrived, strict=True)]
        consumer.log = {p: log(p, *range(count)) for p, count in enumerate(written)}
        ends = reading.follow(at, 0.0, 100)
        taken += read(reading, {p: (at[p], end) for p, end in ends.items()})
        at = ends
    assert sorted(taken) == sorted((p, o) for p, count in enumerate(written) for o in range(count))


@given(
    offsets=st.lists(st.sets(st.integers(0, 60)), min_size=1, max_size=3),
    borders=st.lists(st.integers(0, 70), max_size=6),
    most=st.integers(1, 9),
    again=st.booleans(),
)
def test_batches_over_any_gaps_and_borders_take_each_record_once(
    offsets: list[set[int]], borders: list[int], most: int, again: bool
) -> None:
    consumer = MemoryConsumer({p: log(p, *each) for p, each in enumerate(offsets)}, dict.fromkeys(range(3), 70), most)
    reading = reader(consumer, 60)
    taken: list[tuple[int, int]] = []
    start = 0
    for end in [*sorted(borders), 70]:
        spans = {p: (start, end) for p in range(len(offsets)) if end > start}
        if again:
            read(reading, spans, most)
        taken += read(reading, spans, most)
        start = end
    assert sorted(taken) == sorted((p, o) for p, each in enumerate(offsets) for o in each)


def test_only_committed_records_are_read_no_reset_is_silent_and_no_group_is_needed() -> None:
    config = consumer_config({**CONFIG, "isolation.level": "read_uncommitted"}, Failures("nowhere:1"), 1)
    assert (config["isolation.level"], config["auto.offset.reset"]) == ("read_committed", "error")
    assert config["enable.auto.commit"] is False
    consumer = MemoryConsumer({0: log(0, 0)}, failures=[failure(KafkaError.GROUP_AUTHORIZATION_FAILED)])
    assert read(reader(consumer, 5), {0: (0, 1)}) == places(0, 0)


NUMBER = Json(StructType([StructField("n", LongType())]))


class Reader:
    """A reader that reads nothing."""

    made: list[str]

    def __init__(self, topic: str, *_: Any) -> None:
        Reader.made.append(topic)

    def read(self, spans: Any, most: int) -> Iterator[Any]:
        return iter(())

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Reader.made = []
    monkeypatch.setattr(kafka, "RangeReader", Reader)
    monkeypatch.setattr(kafka, "_readers", {})
    file = tmp_path / "client.json"
    file.write_text(json.dumps({"recourse.timeout.seconds": 1}))
    return file


def run(client: Path, topic: str, name: str = "kafka-all-records") -> None:
    blocks = RecordBlocks(KafkaTopic(topic, value=NUMBER), "all")
    list(TopicReading(name, {0: 0}, {0: 5}, blocks=blocks, client=client).read(RangePartition({0: (0, 5)})))


def test_a_reader_is_kept_for_its_source_and_topic_alone(client: Path) -> None:
    for topic in ("a", "b", "a", "b"):
        run(client, topic)
    assert Reader.made == ["a", "b"]
    run(client, "a", "kafka-refused-records")
    assert Reader.made == ["a", "b", "a"]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_of_cycles_rests_while_a_task_reads(
    client: Path, monkeypatch: pytest.MonkeyPatch, before: bool, fails: bool
) -> None:
    seen: list[bool] = []

    def read(*_: Any) -> Iterator[Any]:
        seen.append(gc.isenabled())
        if fails:
            raise OffsetsLost("records are gone", "see the status")
        return iter(())

    monkeypatch.setattr(Reader, "read", read)
    (gc.enable if before else gc.disable)()
    try:
        with pytest.raises(OffsetsLost) if fails else nullcontext():
            run(client, "a")
        assert (seen, gc.isenabled()) == ([False], before)
    finally:
        gc.enable()


def test_readers_of_a_session_that_has_ended_are_closed(client: Path) -> None:
    run(client, "a")
    other = client.with_name("other.json")
    client.rename(other)
    run(other, "a")
    assert list(kafka._readers) == [(other, "kafka-all-records", "a")]


def test_no_two_streams_have_sources_of_one_name(tmp_path: Path) -> None:
    def name(owner: str, parameter: str) -> str:
        return KafkaSource(parameter, KafkaTopic("t", value=NUMBER), tmp_path, None).reading_name(owner)

    assert name("orders", "clean_events") != name("orders_clean", "events")


def test_dead_letters_of_records_set_aside_are_read_alone_and_others_with_all_of_the_range(
    client: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = dict.fromkeys(range(100), b'{"n": 1}') | {50: b"no number"}
    consumers: list[MemoryConsumer] = []

    def connected(topic: str, config: object, timeout: timedelta) -> RangeReader:
        found = {0: {offset: record(0, offset, value) for offset, value in values.items()}}
        consumers.append(MemoryConsumer(found, {0: 100}))
        return RangeReader(topic, CONFIG, timeout, connect=lambda _: consumers[-1])

    monkeypatch.setattr(kafka, "RangeReader", connected)
    aside = {(0, 42): Refusal("function_raised", ""), (0, 45): Refusal("function_raised", ""), (0, 200): None}
    source = KafkaSource("t", KafkaTopic(TOPIC, value=NUMBER), client, None, aside=aside)

    def letters(begin: int, count: int) -> tuple[list[int], list[object]]:
        kafka._readers.clear()
        rows = source.bad_rows(None, OffsetRange(TOPIC, "id", {0: begin}, {0: 100}), count)  # type: ignore[arg-type]
        return rows["offset"].to_pylist(), [call[:2] for call in consumers[-1].calls if call[0] != "unassign"]

    assert letters(0, 2) == ([42, 45], [("assign", {0: 42}), ("consume", 4)]), "it waits for no others"
    assert letters(43, 1) == ([45], [("assign", {0: 45}), ("consume", 1)])
    assert letters(0, 3) == ([42, 45, 50], [("assign", {0: 0}), ("consume", 100)]), "the format refuses one, too"
    del values[42]
    assert letters(0, 2)[0] == [45, 50], "one of them is no longer in the topic"
    kept = list(kafka._readers.values())
    assert source.read("refused", OffsetRange(TOPIC, "id", {0: 0}, {0: 100})).num_rows == 2
    assert list(kafka._readers.values()) == kept and not consumers[-1].positions, (
        "it stays connected, and fetches nothing"
    )
