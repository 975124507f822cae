"""A replay knows from the ledger when the stream has first read what is read again."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from streaming_jobs.formats import Text
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.sources.kafka import KafkaSource
from streaming_jobs.sources.range_reader import RangeReader
from streaming_jobs.sources.record_blocks import FIRST_READ
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges
from streaming_jobs.state import ledger_file
from streaming_jobs.state.ledger_file import FirstReads, LedgerFile
from streaming_jobs.stream import KafkaTopic
from streaming_jobs.testing.consumer import TOPIC, MemoryConsumer, record
from tests.support.worlds import STREAM, entry


def batch(start: int, end: int, topic_id: str = "id") -> tuple[OffsetRange, ...]:
    """A batch of two partitions; the second one has no new records."""
    return (OffsetRange("t", topic_id, {0: start, 1: 5}, {0: end, 1: 5}),)


class Clock:
    """Stands in for `datetime` where the ledger asks for the time."""

    at = 0.0

    def now(self, zone: tzinfo) -> datetime:
        return datetime.fromtimestamp(self.at, zone)


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LedgerFile:
    """Batches of ten records, one an hour from 1,000,000 s on; then one of a later generation that read them again."""
    made, clock = LedgerFile(tmp_path, timedelta(days=30)), Clock()
    monkeypatch.setattr("streaming_jobs.state.ledger_file.datetime", clock)
    for number in range(60):
        clock.at = 1e6 + number * 3_600
        made.append(replace(entry(number), offsets=batch(number * 10, number * 10 + 10)), {})
    clock.at = 1.9e6
    made.append(replace(entry(0), generation=2, offsets=batch(400, 500)), {})
    return made


def test_a_batch_of_a_replay_has_the_time_at_which_its_last_record_was_first_read_by_its_ledger_or_its_records(
    ledger: LedgerFile,
) -> None:
    first_read = FirstReads(ledger, STREAM)
    assert first_read(batch(100, 110)) == (1_000_000 + 10 * 3_600) * 1_000
    assert first_read(batch(110, 135)) == (1_000_000 + 13 * 3_600) * 1_000, "in the batch to 140"
    assert first_read(batch(590, 600)) == (1_000_000 + 59 * 3_600) * 1_000
    assert first_read(batch(600, 601)) is None, "not read yet"
    assert FirstReads(ledger, STREAM)(batch(100, 110, "another topic of the name")) is None
    asked: list[OffsetRange] = []
    first_read = FirstReads(ledger, STREAM, lambda each: asked.append(each) or 7)  # type: ignore[func-returns-value]
    assert first_read(batch(590, 600)) != 7 and not asked, "its own ledger knows"
    assert first_read(batch(600, 601)) == 7 and asked == list(batch(600, 601))


def test_the_last_records_of_a_range_tell_it_where_the_topic_has_void_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "client.json").write_text('{"recourse.timeout.seconds": 5}')
    headers = {n: [(FIRST_READ, str(n).encode())] for n in range(95, 99)}
    log = {0: {n: record(0, n, headers=headers.get(n)) for n in range(99)}}

    def reader(topic: str, config: object, timeout: timedelta) -> RangeReader:
        return RangeReader(topic, {"bootstrap.servers": ""}, timeout, connect=lambda _: MemoryConsumer(log, {0: 100}))

    monkeypatch.setattr("streaming_jobs.sources.kafka.RangeReader", reader)
    topic = KafkaTopic(TOPIC, Text())
    source = KafkaSource("t", topic, tmp_path / "client.json", None, void=VoidRanges.of([(0, 98, 99)]))
    ranges = OffsetRange(TOPIC, "id", {0: 0}, {0: 100})
    assert source.first_read(ranges) == 97, "98 is void, 99 a marker"
    assert source.first_read(replace(ranges, end={0: 95})) is None
    assert replace(source, void=NO_VOID).first_read(ranges) is None


def test_of_a_day_with_very_many_batches_some_are_looked_at(
    ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "_A_DAY", 4)
    at = FirstReads(ledger, STREAM)(batch(100, 110))
    assert at is not None
    assert 0 <= at / 1_000 - (1_000_000 + 10 * 3_600) <= 6 * 3_600
