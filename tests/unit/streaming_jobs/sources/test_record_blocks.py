"""A record of a topic is in the good rows with its values, or among the refused ones with a reason; never in both."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from confluent_kafka import Message
from pyspark.sql.types import DateType, DoubleType, LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.declare.format import Refusal
from streaming_jobs.declare.topic import (
    ComputedTime,
    EpochMicros,
    EpochMillis,
    EpochSeconds,
    EventTime,
    RecordTimestamp,
)
from streaming_jobs.errors import FunctionRaised
from streaming_jobs.formats import Json
from streaming_jobs.sources.record_blocks import FIRST_READ, RecordBlocks, note_used, with_refused
from streaming_jobs.stream import KafkaTopic
from streaming_jobs.testing.consumer import record

SCHEMA = StructType(
    [
        StructField("n", LongType(), nullable=False),
        StructField("name", StringType()),
        StructField("at", TimestampType()),
        StructField("day", DateType()),
    ]
)
MS = 1_700_000_000_000


def rows(
    *messages: Message, what: Literal["all", "refused"] = "all", topic: KafkaTopic | None = None
) -> list[dict[str, Any]]:
    declared = topic or KafkaTopic("things", value=Json(SCHEMA))
    blocks = pickle.loads(pickle.dumps(RecordBlocks(declared, what)))
    batch = blocks.batch(messages)
    assert batch.schema.equals(blocks.schema)
    made = [dict(row) for row in batch.drop_columns("timestamp").to_pylist()]
    for row, micros in zip(made, pc.cast(batch["timestamp"], "int64").to_pylist(), strict=True):
        row["timestamp_ms"] = micros // 1000
    return made


def timed(**values: Any) -> KafkaTopic:
    return KafkaTopic("things", value=Json(SCHEMA), event_time="at", lateness="1 minute", **values)


def test_a_good_record_has_its_values_and_its_place_and_headers_if_they_are_asked_for() -> None:
    (row,) = rows(record(3, 9, b'{"n":5,"at":"2024-01-02T03:04:05Z"}', key=b"\xff", timestamp=(1, MS)))
    assert row["_record"] == {"n": 5, "name": None, "at": datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC), "day": None}
    place = {name: row[name] for name in ("topic", "partition", "offset", "key", "tombstone", "_bad")}
    assert place == {"topic": "things", "partition": 3, "offset": 9, "key": b"\xff", "tombstone": False, "_bad": False}
    assert row["timestamp_ms"] == MS
    assert "headers" not in row
    topic = KafkaTopic("things", value=Json(SCHEMA), headers=True)
    with_some, without = rows(record(0, 0, b'{"n":1}', headers=[("a", b"1"), ("a", None)]), record(0, 1), topic=topic)
    assert with_some["headers"] == [{"key": "a", "value": b"1"}, {"key": "a", "value": None}]
    assert without["headers"] is None
    assert rows() == [] == rows(what="refused")


def test_a_record_is_good_or_refused_with_its_bytes_and_a_reason() -> None:
    messages = [
        record(0, 0, b'{"n":1}'),
        record(0, 1, b'{"n":"x"}', key=b"k", headers=[("h", b"v")]),
        record(0, 2, None),
        record(0, 3, b"{"),
    ]
    assert [row["_bad"] for row in rows(*messages)] == [False, True, True, True]
    assert [row["_record"]["n"] for row in rows(*messages) if not row["_bad"]] == [1]
    refused = rows(*messages, what="refused")
    assert [(r["offset"], r["reason"]) for r in refused] == [(1, "wrong_type"), (2, "tombstone"), (3, "malformed_json")]
    assert (refused[0]["value"], refused[0]["key"], refused[0]["headers"]) == (
        b'{"n":"x"}',
        b"k",
        [{"key": "h", "value": b"v"}],
    )
    assert "$.n" in refused[0]["detail"]


def test_tombstones_are_rows_where_the_topic_keeps_them() -> None:
    topic = KafkaTopic("things", value=Json(SCHEMA), tombstones="keep")
    (row,) = rows(record(0, 0, None, key=b"k"), topic=topic)
    assert (row["tombstone"], row["_bad"], row["key"]) == (True, False, b"k")
    assert row["_record"]["n"] is None
    assert rows(record(0, 0, None), what="refused", topic=topic) == []
    (empty,) = rows(record(0, 0, b""), what="refused", topic=topic)
    assert empty["reason"] == "empty_value"


def test_a_record_that_is_set_aside_is_refused_with_nulls_for_its_fields_and_one_without_a_letter_is_in_no_rows() -> (
    None
):
    long = "x" * 1_000
    aside = {(0, 1): Refusal("function_raised", long, 4_000), (0, 3): None, (1, 0): Refusal("function_raised", "other")}
    messages = [record(0, offset, b'{"n":%d}' % offset if offset != 2 else b"{") for offset in range(5)]
    declared = KafkaTopic("things", value=Json(SCHEMA))
    every = RecordBlocks(declared, "all", aside=aside).batch(messages).to_pylist()
    assert [row["_bad"] for row in every] == [False, True, True, True, False]
    assert [row["_record"]["n"] for row in every] == [0, None, None, None, 4]
    read_before = pa.Table.from_batches([RecordBlocks(declared, "all").batch(messages)])
    later = with_refused(read_before, aside).to_pylist()
    assert [row["_bad"] for row in later] == [row["_bad"] for row in every], "records that the batch has read already"
    assert [row["_record"] and row["_record"]["n"] for row in later] == [0, None, None, None, 4]
    refused = RecordBlocks(declared, "refused", aside=aside).batch(messages).to_pylist()
    assert [(r["offset"], r["reason"]) for r in refused] == [(1, "function_raised"), (2, "malformed_json")]
    assert (refused[0]["detail"], refused[0]["value"]) == (long, b'{"n":1}')
    dropping = RecordBlocks(declared, "refused", aside=aside, drops_refused=True).batch(messages)
    assert dropping["offset"].to_pylist() == [1]


@pytest.mark.parametrize(
    ("event", "stamp", "bad"),
    [
        ("2023-11-15T22:13:20Z", MS, False),
        ("2023-11-15T22:13:20.000001Z", MS, True),
        ("9999-12-31T23:59:59Z", MS, True),
        ("9999-12-31T23:59:59Z", -1, False),
        ("9999-12-31T23:59:59Z", -(2**63), False),
        ("9999-12-31T23:59:59Z", 2**63 - 1, False),
        ("0001-01-01T00:00:00Z", 0, False),
    ],
)
def test_an_event_time_far_after_the_records_own_timestamp_is_refused(event: str, stamp: int, bad: bool) -> None:
    message = record(0, 0, f'{{"n":1,"at":"{event}"}}'.encode(), timestamp=(1, stamp))
    (row,) = rows(message, topic=timed())
    assert row["_bad"] is bad
    refused = rows(message, what="refused", topic=timed())
    assert [r["reason"] for r in refused] == ["event_time_ahead"] * bad
    if bad:
        assert "more than 1 day after the record's own timestamp, 2023-11-14 22:13:20" in refused[0]["detail"]
    assert rows(message, topic=timed(max_ahead=None))[0]["_bad"] is False


@pytest.mark.parametrize(
    ("headers", "recovered", "bad"),
    [
        ([("recourse.batch", b"7"), (FIRST_READ, str(MS).encode())], True, True),
        ([("recourse.batch", b"7"), (FIRST_READ, str(MS + 1).encode())], True, False),
        ([(FIRST_READ, str(MS).encode())], False, False),
        ([(FIRST_READ, b"soon"), (FIRST_READ, None)], True, False),
        (None, True, False),
    ],
)
def test_what_a_replay_of_its_writer_wrote_again_is_ahead_as_it_was_the_first_time(
    headers: list[tuple[str, bytes | None]] | None, recovered: bool, bad: bool
) -> None:
    """Written three days later, an event of the day after tomorrow is no longer ahead of its record."""
    message = record(
        0, 1, b'{"n":1,"at":"2023-11-15T22:13:20.000001Z"}', timestamp=(1, MS + 3 * 86_400_000), headers=headers
    )
    other = record(0, 0, b'{"n":1,"at":"2023-11-14T22:13:20Z"}', timestamp=(1, MS))
    blocks = RecordBlocks(timed(), "all", recovered=recovered)
    assert blocks.batch([other, message])["_bad"].to_pylist() == [False, bad]
    assert blocks.batch([other, message])["timestamp"].to_pylist()[1].day == 17, "its own timestamp stays"
    refused = replace(blocks, rows="refused").batch([other, message])["detail"].to_pylist()
    assert len(refused) == bad
    assert all("more than 1 day after its source was first read, 2023-11-14 22:13:20" in each for each in refused)


def test_a_record_without_event_time_is_not_ahead_and_a_refused_one_has_one_reason() -> None:
    without, broken = record(0, 0, b'{"n":1}', timestamp=(1, 5)), record(0, 1, b'{"at":"9999-01-01T00:00:00Z"}')
    assert [row["_bad"] for row in rows(without, broken, topic=timed())] == [False, True]
    assert [row["reason"] for row in rows(without, broken, what="refused", topic=timed())] == ["missing_field"]


COUNTED = Json(
    StructType([StructField("n", LongType()), StructField("seconds", DoubleType()), StructField("day", DateType())])
)


def counted(time: EventTime, **values: Any) -> KafkaTopic:
    return KafkaTopic("things", value=COUNTED, event_time=time, lateness="1 minute", **values)


def of(**fields: Any) -> Message:
    return record(0, 0, json.dumps(fields).encode(), timestamp=(1, MS))


@pytest.mark.parametrize(
    ("time", "fields", "made"),
    [
        (EpochSeconds("n"), {"n": 1_700_000_000}, datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
        (EpochMillis("n"), {"n": MS + 5}, datetime(2023, 11, 14, 22, 13, 20, 5_000, tzinfo=UTC)),
        (EpochMicros("n"), {"n": -1}, datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)),
        (EpochSeconds("seconds"), {"seconds": 0.25}, datetime(1970, 1, 1, 0, 0, 0, 250_000, tzinfo=UTC)),
        (EpochMillis("n"), {"n": None}, None),
        (EpochMillis("n"), {}, None),
    ],
)
def test_a_number_becomes_an_event_time_in_a_column_of_its_own(time: EventTime, fields: Any, made: Any) -> None:
    (row,) = rows(of(**fields), topic=counted(time))
    assert (row["_record"]["event_time"], row["_bad"]) == (made, False)
    assert row["_record"]["n"] == fields.get("n"), "the field stays"


@pytest.mark.parametrize(
    ("time", "fields", "reason"),
    [
        (EpochMillis("n"), {"n": MS + 86_400_001}, "event_time_ahead"),
        (EpochSeconds("n"), {"n": MS}, "event_time_out_of_range"),
        (EpochMicros("n"), {"n": -(2**63)}, "event_time_out_of_range"),
        (EpochSeconds("seconds"), {"seconds": 1.7e308}, "event_time_out_of_range"),
    ],
)
def test_a_number_that_is_no_possible_time_is_a_dead_letter(
    time: EventTime, fields: Any, reason: str, tmp_path: Path
) -> None:
    messages, topic = [of(n=1), of(**fields)], counted(time, max_ahead="1 day")
    good, bad = rows(*messages, topic=topic)
    assert (good["_bad"], bad["_bad"]) == (False, True)
    (refused,) = rows(*messages, what="refused", topic=topic)
    assert refused["reason"] == reason
    if reason == "event_time_out_of_range":
        assert set(bad["_record"].values()) == {None}
        assert f"'event_time' of {time.field} = " in refused["detail"]  # type: ignore[union-attr]
        assert reason in topic.records.reasons
    note_used(tmp_path / "used.json", {"_bad"})
    blocks = RecordBlocks(topic, "all", tmp_path / "used.json")
    assert blocks.batch(messages)["_bad"].to_pylist() == [False, True], "whichever columns are used"


def noon(day: Any) -> Any:
    return pc.add(pc.cast(day, pa.timestamp("s")), pa.scalar(43_200, pa.duration("s")))


def test_an_event_time_may_be_computed_from_fields_and_named() -> None:
    messages = [of(day="2023-11-15"), of(day="2023-11-16"), of(day="nonsense"), of()]
    topic = counted(ComputedTime(noon, column="at"), max_ahead="1 day")
    made = rows(*messages, topic=topic)
    assert [row["_bad"] for row in made] == [False, True, True, False]
    assert made[0]["_record"]["at"] == datetime(2023, 11, 15, 12, tzinfo=UTC) and made[3]["_record"]["at"] is None
    assert [r["reason"] for r in rows(*messages, what="refused", topic=topic)] == ["event_time_ahead", "wrong_type"]


def test_the_event_time_may_be_the_timestamp_of_the_record() -> None:
    unstamped = record(0, 1, b'{"n":2}', timestamp=(0, -1))
    messages = [of(n=1), unstamped, record(0, 2, b"no JSON", timestamp=(1, MS)), record(0, 3, None, timestamp=(1, MS))]
    topic = counted(RecordTimestamp(), max_ahead="1 day", tombstones="keep")
    at = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    made = rows(*messages, topic=topic)
    assert [(row["_record"]["event_time"], row["_bad"]) for row in made] == [
        (at, False),
        (None, False),
        (None, True),
        (at, False),
    ]
    assert [row["reason"] for row in rows(*messages, what="refused", topic=topic)] == ["malformed_json"]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda day: day, r"<lambda> .* returned 1 x date32\[day\], not an Arrow array of 1 timestamps"),
        (lambda day: None, "returned NoneType"),
        (lambda day: pc.cast(day, pa.timestamp("s")).slice(1), "returned 0 x timestamp"),
        (lambda day: day.nope, r"the event time's function <lambda> \(.*py:\d+\) raised AttributeError"),
    ],
)
def test_a_function_that_makes_no_times_is_named(function: Any, words: str) -> None:
    with pytest.raises(FunctionRaised, match=words):
        RecordBlocks(counted(ComputedTime(function)), "all").batch([of(day="2023-11-15")])


@dataclass(frozen=True)
class Fragile:
    """A format that raises."""

    schema: StructType = SCHEMA
    reasons: frozenset[str] = frozenset()

    def reader(self, fields: object = None) -> Any:
        return self

    def read(self, values: object) -> Any:
        raise ValueError("no\nvalue")


def test_a_format_that_raises_or_returns_another_number_of_columns_is_named() -> None:
    with pytest.raises(FunctionRaised, match=r"the format Fragile of topic things raised ValueError: no value\n"):
        rows(record(0, 0), topic=KafkaTopic("things", value=Fragile()))
    with pytest.raises(FunctionRaised, match="returned 1 columns for 4 fields"):
        rows(record(0, 0, b'{"n":1}'), topic=KafkaTopic("things", value=TooFew(SCHEMA)))


def test_columns_that_nobody_looks_at_are_null_and_every_verdict_stays_also_that_of_an_event_time(
    tmp_path: Path,
) -> None:
    values = [b'{"n":5,"name":"x","day":"2024-01-02"}', b'{"n":"wrong"}', b'{"n":1,"day":"wrong"}', b"{"]
    messages = [record(0, at, value, key=b"k") for at, value in enumerate(values)]
    declared = KafkaTopic("things", value=Json(SCHEMA))
    whole = RecordBlocks(declared, "all", tmp_path / "there is none").batch(messages)
    assert whole.equals(RecordBlocks(declared, "all").batch(messages))
    note_used(tmp_path / "used.json", {"offset", "_record", "_record.name", "_bad"})
    used = pickle.loads(pickle.dumps(RecordBlocks(declared, "all", tmp_path / "used.json"))).batch(messages)
    assert used.schema == whole.schema
    assert used["_bad"].equals(whole["_bad"]) and used["offset"].equals(whole["offset"])
    assert used["_record"].to_pylist()[0] == {"n": None, "name": "x", "at": None, "day": None}
    for name in ("topic", "partition", "timestamp", "key"):
        assert used[name].null_count == len(messages)
    note_used(tmp_path / "used.json", {"_bad"})
    blocks = RecordBlocks(timed(max_ahead="1 hour"), "all", tmp_path / "used.json")
    late = record(0, 0, b'{"n":1,"at":"2099-01-01T00:00:00Z"}', timestamp=(1, MS))
    assert blocks.batch([late])["_bad"].to_pylist() == [True]


@dataclass(frozen=True)
class TooFew(Json):
    """Returns one column, whatever it is asked for."""

    def reader(self, fields: Any = None) -> Any:
        return super().reader(["n"])
