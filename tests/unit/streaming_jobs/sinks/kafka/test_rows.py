"""Rows become records or are refused, before anything is sent; what waits in files is sent from the files judged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs import Json, KafkaSink, KafkaTopic, PermanentError, Text
from streaming_jobs.declare.columns import DETAIL_COLUMN, REASON_COLUMN
from streaming_jobs.declare.names import cluster_of
from streaming_jobs.errors import LedgerConflict, TransientError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.runtime.batch_entries import entry_of, refuse_other_letters
from streaming_jobs.settings import TopicSinkSettings
from streaming_jobs.sinks.base import BatchOfRows, SinkSet
from streaming_jobs.sinks.kafka.clients import producer_config
from streaming_jobs.sinks.kafka.output import TopicOutput, TopicWrite
from streaming_jobs.sinks.kafka.producer import Delivered, Outgoing
from streaming_jobs.sinks.kafka.rows import HEADERS, KEY, ROUTE, TIMESTAMP, BatchRecords, KnownTopics, RowJudge
from streaming_jobs.sinks.kafka.writer import Discarded
from streaming_jobs.sources.record_blocks import HEADERS_ARROW
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.testing.tables import MemoryTable, MemoryWrite

VALUE = StructType([StructField("n", LongType()), StructField("note", StringType(), nullable=False)])
ORDERS = KafkaTopic("orders", value=Json(VALUE))
SINK = KafkaSink(ORDERS, key="k", headers="h", timestamp="t", route="r", unknown_topic="dead_letter")
TOPICS = {
    "raw": TopicInfo("raw", "id0", 3, -1, "delete"),
    "orders": TopicInfo("orders", "id1", 3, -1, "delete"),
    "compacted": TopicInfo("compacted", "id2", 3, -1, "compact,delete"),
    "small": TopicInfo("small", "id3", 3, -1, "delete", max_message_bytes=300),
    "orders@eu": TopicInfo("orders@eu", "id4", 3, -1, "delete"),
    "late@eu": TopicInfo("late@eu", "id5", 3, -1, "delete"),
}


class Lookup:
    """The topics above; it counts the questions for single ones."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def describe(self, name: str) -> TopicInfo | None:
        self.asked.append(name)
        return TOPICS.get(name)

    def names(self, cluster: str = "") -> set[str]:
        return {name for name in TOPICS if cluster_of(name) == cluster}


_ARROW = pa.schema(
    [
        ("n", pa.int64()),
        ("note", pa.string()),
        (KEY, pa.binary()),
        (HEADERS, HEADERS_ARROW),
        (TIMESTAMP, pa.int64()),
        (ROUTE, pa.string()),
        ("__topic", pa.string()),
        ("__partition", pa.int32()),
        ("__offset", pa.int64()),
    ]
)
ROW = {"n": 1, "note": "x", KEY: b"k", TIMESTAMP: 5, "__topic": "raw", "__partition": 2, "__offset": 77}
SETTINGS = TopicSinkSettings()


def judged(*rows: Mapping[str, Any], sink: KafkaSink = SINK) -> tuple[list[Outgoing], pa.Table | None]:
    """The records that the rows make, and the refused rows."""
    judge = RowJudge(
        sink, KnownTopics(Lookup(), SETTINGS, {"raw": "is read by the stream"}), [("recourse.batch", b"3")]
    )
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=_ARROW)
    if not any(row.get(HEADERS) for row in rows):  # then blocks are judged by their extremes first
        table = table.drop_columns([HEADERS])
    records = [Outgoing(*record) for block in judge.blocks(iter([table])) for record in judge.records(block)]
    return records, judge.refused_rows()


def test_a_row_becomes_a_record_with_the_batch_s_headers_its_position_and_its_own() -> None:
    extra = [{"key": "a", "value": b"1"}, {"key": "b", "value": None}]
    (record,), refused = judged({**ROW, HEADERS: extra, ROUTE: "compacted"})
    assert refused is None
    assert record == Outgoing(
        "compacted",
        b"k",
        b'{"n":1,"note":"x"}',
        [("recourse.batch", b"3"), ("recourse.source", b"raw/2/77"), ("a", b"1"), ("b", None)],
        5,
    )


def test_a_row_without_key_route_timestamp_and_source_goes_to_the_sinks_topic_now() -> None:
    (record,), _ = judged({**ROW, TIMESTAMP: None, "__offset": None})
    assert (record.topic, record.timestamp) == ("orders", 0)
    assert record.headers == [("recourse.batch", b"3")]
    (record,), refused = judged({**ROW, KEY: None})
    assert record.key is None and refused is None


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        ({ROUTE: "nowhere"}, "unknown_topic", "'nowhere'"),
        ({ROUTE: "no such/name"}, "unknown_topic", "'no such/name'"),
        ({ROUTE: "."}, "unknown_topic", "'.' does not exist"),
        ({ROUTE: ".."}, "unknown_topic", "'..' does not exist"),
        ({ROUTE: "raw"}, "unknown_topic", "'raw' is read by the stream"),
        ({ROUTE: "__consumer_offsets"}, "unknown_topic", "__consumer_offsets"),
        ({ROUTE: "compacted", KEY: None}, "null_key", "compacted"),
        ({ROUTE: "small", "note": "x" * 300}, "too_large", "takes 300"),
        ({ROUTE: "small", HEADERS: [{"key": "h", "value": b"x" * 250}]}, "too_large", "takes 300"),
        ({"note": "x" * 1_000_000}, "too_large", "takes 1,000,000"),
        ({TIMESTAMP: 0}, "time_out_of_range", "0 ms"),
        ({TIMESTAMP: -5}, "time_out_of_range", "-5 ms"),
        ({HEADERS: [{"key": None, "value": b"1"}]}, "nameless_header", "no name"),
        ({"note": None}, "missing_field", "note"),
    ],
)
def test_a_row_that_no_topic_takes_is_refused_and_its_neighbours_are_written(
    change: dict[str, Any], reason: str, detail: str
) -> None:
    records, refused = judged(ROW, {**ROW, **change}, {**ROW, "n": 3})
    assert [json.loads(record.value or b"")["n"] for record in records] == [1, 3]
    assert refused is not None
    (row,) = refused.to_pylist()
    assert row[REASON_COLUMN] == reason and detail in row[DETAIL_COLUMN] and row["__offset"] == 77


def test_a_topic_that_does_not_exist_stops_the_batch_by_choice() -> None:
    for topic, text in (("nowhere", "'nowhere', which does not exist"), ("raw", "'raw', which is read by the stream")):
        with pytest.raises(PermanentError, match=text):
            judged(ROW, {**ROW, ROUTE: topic}, sink=replace(SINK, unknown_topic="fail"))


def test_a_row_of_nulls_is_a_tombstone_only_where_the_topic_keeps_them() -> None:
    nothing = {**ROW, "n": None, "note": None}
    records, refused = judged(nothing)
    assert records == [] and refused is not None
    kept = replace(SINK, topic=replace(ORDERS, tombstones="keep"))
    (record, other), refused = judged(nothing, {**ROW, "n": None}, sink=kept)
    assert (record.key, record.value, other.value) == (b"k", None, b'{"n":null,"note":"x"}')
    assert refused is None


def test_order_is_that_of_the_rows_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streaming_jobs.sinks.kafka.rows._BLOCK", 7)
    records, _ = judged(*({**ROW, "n": n} for n in range(100)))
    assert [json.loads(record.value or b"")["n"] for record in records] == [*range(100)]


def test_requests_are_no_larger_than_the_most_restrictive_topic_takes() -> None:
    topics = KnownTopics(Lookup(), SETTINGS)
    assert topics["orders"] is not None and topics.smallest_batch == 1_048_588
    assert topics["small"] is not None and topics.smallest_batch == 300
    assert producer_config({}, SETTINGS, "id", topics.smallest_batch)["batch.size"] == 300
    assert topics.ids == {"orders": "id1", "small": "id3"}


def test_a_topic_that_was_asked_for_ahead_is_not_asked_for_again() -> None:
    lookup = Lookup()
    topics = KnownTopics(lookup, SETTINGS)
    topics.ask_ahead("orders")()
    assert topics["orders"] == TOPICS["orders"] and topics.ids == {"orders": "id1"}
    assert lookup.asked == ["orders"]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("first", [None, TransientError("no broker", "start it")])
def test_without_an_answer_ahead_the_topic_is_asked_for_when_a_row_needs_it(first: TransientError | None) -> None:
    class Late(Lookup):
        def describe(self, name: str) -> TopicInfo | None:
            info = super().describe(name)
            if len(self.asked) > 1:
                return info
            if first is not None:
                raise first
            return None

    lookup = Late()
    topics = KnownTopics(lookup, SETTINGS)
    topics.ask_ahead("orders")()
    assert topics.ids == {}
    assert topics["orders"] == TOPICS["orders"] and lookup.asked == ["orders", "orders"]


class _Report:
    def __init__(self, topic: str, partition: int, offset: int | None) -> None:
        self.topic, self.partition, self.offset = (lambda: topic), (lambda: partition), (lambda: offset)


def test_delivery_reports_become_ranges() -> None:
    delivered = Delivered()
    for place in (("a", 0, 7), ("a", 0, 5), ("b", 1, 0), ("a", 1, 3), ("a", 0, 9)):
        delivered.of(place[0])(None, _Report(*place))  # type: ignore[arg-type]
    assert delivered.ranges({"a": "id"}) == (
        WrittenRange("a", "id", 0, 5, 10, 3),
        WrittenRange("a", "id", 1, 3, 4, 1),
        WrittenRange("b", "", 1, 0, 1, 1),
    )


@pytest.mark.parametrize("offset", [None, -1001])
def test_a_record_without_a_known_offset_is_counted_and_in_no_range(offset: int | None) -> None:
    delivered = Delivered()
    for each in (7, offset):
        delivered.of("a")(None, _Report("a", 0, each))  # type: ignore[arg-type]
    assert delivered.count == 2
    assert delivered.ranges({"a": "id"}) == (WrittenRange("a", "id", 0, 7, 8, 1),)


def _staged(refused: int) -> tuple[SinkSet, dict[str, Any]]:
    topics = KnownTopics(Lookup(), SETTINGS)
    output = TopicOutput(SINK, "s", SETTINGS, Discarded(), topics, None)  # type: ignore[arg-type]
    rows = pa.table({"n": [*range(refused)]}) if refused else None
    judge = RowJudge(SINK, topics, [])
    write = TopicWrite(Discarded(), BatchRecords(judge, [], 5, {}, 1), rejected=rows)
    return SinkSet(MemoryTable("p"), [], MemoryTable("letters"), external=[output]), {output.name: write}


def test_dead_letters_say_how_many_rows_each_topic_refused_and_a_repetition_must_refuse_as_many() -> None:
    sinks, staged = _staged(3)
    batch = LedgerEntry("batch", "s", "p", 1, 7)
    letters = MemoryWrite(MemoryTable("letters"), pa.table({"n": [1, 2, 3, 4]}))
    done = entry_of(sinks.dead_letters, batch, staged, sinks, letters)
    assert done.rows == {"written": 4, "topic:orders": 3}
    refuse_other_letters(done, staged, sinks, batch)
    refuse_other_letters(None, staged, sinks, batch)
    refuse_other_letters(done, {}, sinks, batch)
    with pytest.raises(LedgerConflict, match="refused 3 rows of g0001 batch 7 before the driver ended, and refuses 2"):
        refuse_other_letters(done, _staged(2)[1], sinks, batch)


def test_names_that_no_topic_has_are_not_looked_up_and_thousands_of_unknown_ones_are_judged_quickly() -> None:
    lookup = Lookup()
    topics = KnownTopics(lookup, SETTINGS, {"raw": "is read by the stream"})
    assert [topics[name] for name in ("", ".", "..", "raw", "__x", "a b")] == [None] * 6
    assert lookup.asked == [] and topics.ids == {}
    lookup = Lookup()
    topics = KnownTopics(lookup, SETTINGS)
    assert all(topics[f"unknown-{n}"] is None for n in range(1000)) and len(lookup.asked) == 5
    assert topics["orders"] is not None


def test_a_route_names_a_topic_of_the_sinks_cluster_since_a_transaction_reaches_no_other() -> None:
    abroad = replace(SINK, topic=replace(ORDERS, cluster="eu"))
    lookup = Lookup()
    judge = RowJudge(abroad, KnownTopics(lookup, SETTINGS, cluster="eu"), [])
    rows = [{**ROW, ROUTE: route} for route in (None, "late", "raw", "late@eu")]
    table = pa.Table.from_pylist(rows, schema=_ARROW).drop_columns([HEADERS])
    records = [Outgoing(*record) for block in judge.blocks(iter([table])) for record in judge.records(block)]
    assert [record.topic for record in records] == ["orders@eu", "late@eu"]
    refused = judge.refused_rows()
    assert refused is not None and refused[REASON_COLUMN].to_pylist() == ["unknown_topic"] * 2
    assert "late@eu@eu" not in lookup.asked
    records, refused = judged({**ROW, ROUTE: "late@eu"})
    assert records == [] and refused is not None, "the default cluster's transaction would write its own topic `late`"


def test_a_topic_that_an_earlier_batch_found_is_waited_for_while_the_broker_does_not_know_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookup = Lookup()
    topics = KnownTopics(lookup, SETTINGS)
    assert topics["orders"] == TOPICS["orders"]
    topics.forget()
    answers = iter([None, None, TOPICS["orders"]])
    monkeypatch.setattr(lookup, "describe", lambda _: next(answers))
    assert topics["orders"] == TOPICS["orders"], "a broker that has just started"
    topics.forget()
    monkeypatch.setattr("streaming_jobs.sinks.kafka.rows.UNKNOWN_FOR", 0.01)
    monkeypatch.setattr(lookup, "describe", lambda _: None)
    assert topics["orders"] is None, "deleted"


@pytest.mark.parametrize(("size", "refused"), [(124, 0), (125, 1)])
def test_a_block_is_looked_at_row_by_row_as_soon_as_one_row_may_be_too_large(size: int, refused: int) -> None:
    """The record of the last row has exactly the bytes that its topic takes, or one more."""
    sink = KafkaSink(KafkaTopic("small", value=Json(VALUE)), key="k")
    rows = [{**ROW, TIMESTAMP: None}, {**ROW, TIMESTAMP: None, "note": "x" * size}]
    records, letters = judged(*rows, sink=sink)
    assert len(records) == 2 - refused and (0 if letters is None else letters.num_rows) == refused


class Frame:
    """A frame of two partitions, as far as it is written."""

    parts = ({"value": ["a", "b"]}, {"value": ["c"]})

    @property
    def write(self) -> Frame:
        return self

    def parquet(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)
        for number, rows in enumerate(self.parts):
            pq.write_table(pa.table(rows), f"{folder}/part-{number:05d}.parquet")


class Removed(Frame):
    """Its files are removed as soon as they are written."""

    def parquet(self, folder: str) -> None:
        super().parquet(folder)
        shutil.rmtree(folder)


def output(folder: Path) -> TopicOutput:
    sink = KafkaSink(KafkaTopic("orders", value=Text()))
    return TopicOutput(sink, "s", SETTINGS, Discarded(), KnownTopics(Lookup(), SETTINGS), folder)


def prepared(made: TopicOutput, frame: Any) -> Any:
    return made.prepare(frame, BatchOfRows(1, 0, driver=False))


def test_rows_in_files_are_records_in_the_order_of_the_partitions_each_time(tmp_path: Path) -> None:
    write = prepared(output(tmp_path), Frame())
    assert [[value for _, _, value, *_ in write.records] for _ in range(2)] == [[b"a", b"b", b"c"]] * 2
    assert write.rows == write.records.count == 3


def test_records_of_a_replay_say_when_their_source_was_first_read(tmp_path: Path) -> None:
    made, frame = output(tmp_path), Frame()
    rows = BatchOfRows(2, 0, driver=False, first_read=1_700_000_000_000)
    for headers in ([headers for *_, headers, _, _ in made.prepare(frame, rows).records] for _ in range(2)):
        assert all(dict(each)["recourse.first_read"] == b"1700000000000" for each in headers) and len(headers) == 3
    (first, *_) = prepared(made, frame).records
    assert "recourse.first_read" not in dict(first[3])


def test_files_that_another_driver_removed_are_no_empty_batch(tmp_path: Path) -> None:
    made = output(tmp_path)
    write = prepared(made, Frame())
    output(tmp_path).remove_leftovers()
    with pytest.raises(TransientError, match=r"part-00000\.parquet, are gone"):
        list(write.records)
    with pytest.raises(TransientError, match="are gone"):
        prepared(made, Removed())
