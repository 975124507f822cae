"""The readers that a worker keeps: each reads one topic for one source. tests/broker reads with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from streaming_jobs.formats import Json
from streaming_jobs.sources import kafka
from streaming_jobs.sources.kafka import KafkaSource, RangePartition, TopicReading
from streaming_jobs.sources.record_blocks import RecordBlocks
from streaming_jobs.stream import KafkaTopic

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
