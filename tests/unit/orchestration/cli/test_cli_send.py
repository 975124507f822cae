"""`recourse send`: each line is a record, refusals are told, and nothing reaches a cluster without consent."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from streaming_jobs.formats import Json
from streaming_jobs.sources.producing import NewRecord
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream
from tests.unit.orchestration.cli.conftest import Declare, Run

NUMBERS = KafkaTopic("numbers", value=Json(StructType([StructField("n", LongType(), nullable=False)])))
STREAM = Stream("doubled", lambda numbers: numbers, {"numbers": NUMBERS}, {"doubled": DeltaTable("doubled")})


@pytest.fixture
def sent(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes]]:
    """Topic and value of each record that was sent."""
    declare(STREAM)
    values: list[tuple[str, bytes]] = []

    def take(_: object, bootstrap: str, topic: str, records: Iterable[NewRecord]) -> int:
        values.extend((topic, record.value) for record in records)
        return len(values)

    monkeypatch.setattr("streaming_jobs.sources.producing.produce", take)
    monkeypatch.setattr("tests.support.life.Topics.names", lambda *_: {"numbers"}, raising=False)
    Path("records").write_bytes(b'{"n": 1}\n\n{"m": 2}\n')
    return values


def test_each_line_is_a_record_and_those_that_will_be_dead_letters_are_told(
    sent: list[tuple[str, bytes]], run: Run
) -> None:
    said = run.ended(0, "send", "numbers", "records", "--yes").err
    assert sent == [("numbers", b'{"n": 1}'), ("numbers", b'{"m": 2}')]
    assert "sent 2 records to topic numbers" in said and "1 of them will be dead letters: missing_field" in said


def test_a_configured_cluster_gets_nothing_without_consent(sent: list[tuple[str, bytes]], run: Run) -> None:
    said = run.said("send", "numbers", "records")
    assert "send 2 records to topic numbers of nowhere:1?" in said and "recourse send numbers FILE --yes" in said
    assert sent == []


def test_a_topic_that_no_stream_reads_is_refused_with_the_nearest_name(sent: list[tuple[str, bytes]], run: Run) -> None:
    assert "did you mean 'numbers'?" in run.said("send", "number", "records", "--yes")
    assert "no-such-file: No such file" in run.said("send", "numbers", "no-such-file", "--yes")
    assert sent == []


def test_a_topic_that_the_cluster_does_not_have_is_not_created(
    sent: list[tuple[str, bytes]], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.life.Topics.names", lambda *_: set(), raising=False)
    assert "has no topic numbers" in run.said("send", "numbers", "records", "--yes", code=1) and sent == []
