"""Which streams a recovery takes along: those that read topics, not those that read tables, and no archive."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.types import LongType, StructField, StructType

from reprocessing.planning.downstream import refuse_in_first_batch, refuse_others, through_tables, through_topics
from streaming_jobs.archives.declaration import archive
from streaming_jobs.delta_source import DeltaSource
from streaming_jobs.errors import UsageError
from streaming_jobs.examples.shop.streams import LEVELS, availability, stock, stock_changes
from streaming_jobs.ledger import Txn
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.lease import take
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import DeltaTable, Stream

SCHEMA = StructType([StructField("pieces", LongType())])


def same(rows: DataFrame) -> DataFrame:
    return rows


REPORT = Stream("report", same, {"rows": DeltaSource("availability", schema=SCHEMA)}, {"r": DeltaTable("report")})
COPY = Stream("copy", same, {"rows": LEVELS}, {"c": DeltaTable("copy")})
STREAMS = {each.name: each for each in (REPORT, archive(LEVELS), COPY, availability, stock, stock_changes)}


def test_the_readers_of_topics_are_taken_along_in_the_order_of_records() -> None:
    assert through_topics(STREAMS, ["stock_changes"]) == ["stock_changes", "stock", "copy", "availability"]
    assert through_topics(STREAMS, ["availability"]) == ["availability"]


@pytest.fixture
def read(tmp_path: Path) -> Settings:
    """Settings with a state folder of their own."""
    return Settings.load({"home": tmp_path})


def refuse(settings: Settings) -> None:
    refuse_others(settings, {"copy": COPY}, [LEVELS.name], [])


def test_a_reader_that_did_not_begin_is_left_out(read: Settings) -> None:
    refuse(read)
    refuse_in_first_batch(read, COPY)


def test_a_reader_that_runs_is_not_left_out_also_before_its_first_batch(read: Settings) -> None:
    with take(read, "copy", purpose="session"):
        with pytest.raises(UsageError, match="has routed records"):
            refuse(read)
        with pytest.raises(UsageError, match="runs, and has finished no batch"):
            refuse_in_first_batch(read, COPY)
    refuse(read)


def test_a_reader_that_was_ended_in_its_first_batch_repeats_it_past_the_void_ranges(
    read: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = stream_record.first("copy")
    stream_record.save(read, record)
    offsets = StreamFolder.of(read, "copy").checkpoint(record.generation).folder / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "0").write_text("v1\n{}\n{}\n")
    refuse(read)
    refuse_in_first_batch(read, COPY)
    for position in (Txn(1, -1), Txn(1, 0)):
        tables = {"letters": SimpleNamespace(position=position)}
        monkeypatch.setattr("reprocessing.planning.downstream.open_tables", lambda *_, tables=tables: tables)
        if position.batch < 0:
            refuse_in_first_batch(read, COPY)
            continue
        with pytest.raises(UsageError, match="ended in its first batch, which some of its tables"):
            refuse_in_first_batch(read, COPY)
        with pytest.raises(UsageError, match="has routed records"):
            refuse(read)


def test_a_topic_may_have_the_first_batch_of_a_reader_that_was_ended(read: Settings) -> None:
    record = stream_record.first(stock.name)
    stream_record.save(read, record)
    offsets = StreamFolder.of(read, stock.name).checkpoint(record.generation).folder / "offsets"
    offsets.mkdir(parents=True)
    refuse_in_first_batch(read, stock)
    (offsets / "0").write_text("v1\n{}\n{}\n")
    with pytest.raises(UsageError, match="start the stream over: move"):
        refuse_in_first_batch(read, stock)


def test_the_readers_of_tables_are_another_matter() -> None:
    assert through_tables(STREAMS, ["stock_changes"]) == ["report"]
    assert through_tables(STREAMS, ["copy"]) == []
