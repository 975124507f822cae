"""A table compared with a declared truth: what it is given, when its rows are due, and when it cannot be compared.

Rows are compared as they are: how often each is there, whatever their order, values by what they mean.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.sql.types import StructType, TimestampType

from streaming_jobs.catalog.truths import NotComparable, Record, Truth, truth
from streaming_jobs.declare.format import Block, Refused
from streaming_jobs.errors import UsageError
from streaming_jobs.formats.avro import Avro
from streaming_jobs.formats.framing import ID_HEADER
from streaming_jobs.formats.json import Json
from streaming_jobs.formats.json_reader import JsonReader
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream
from streaming_jobs.verification.delta_log import Entry, Range
from streaming_jobs.verification.lineage import Coverage
from streaming_jobs.verification.offset_ranges import Span
from streaming_jobs.verification.subject import Comparison
from streaming_jobs.verification.topic import CommittedPartition, CommittedTopic, RawRecord
from streaming_jobs.verification.truths import (
    ReadRecords,
    RowDifference,
    TableVersion,
    ValueBlock,
    compare_rows,
    compare_truth,
    too_late,
    watermarks,
)
from streaming_jobs.verification.verification import refusals_of
from tests.support.life import ROWS
from tests.support.proofs import ListedRecords
from tests.unit.streaming_jobs.formats.test_avro import Known, record

BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def hours(orders: Any, payments: Any) -> Any:
    """A stream of two topics; nobody calls it here."""


STREAM = Stream(
    "hours",
    hours,
    {"orders": KafkaTopic("orders", Json(ROWS)), "payments": KafkaTopic("payments", Json(ROWS))},
    {"hours": DeltaTable("hours")},
)
RECORDS = {name: [RawRecord(name, 0, at, 0, None, b'{"id": %d}' % at) for at in range(3)] for name in STREAM.sources}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two windows that are over."""
    ends = [BEGIN + HOUR, BEGIN + 2 * HOUR]
    write_deltalake(tmp_path / "hours", pa.table({"end": pa.array(ends, pa.timestamp("us", "UTC")), "n": [1, 2]}))
    return tmp_path / "hours"


def compared(
    table: Path,
    declared: Truth,
    *,
    mark: datetime | None = None,
    low: int = 0,
    refused: Mapping[str, frozenset[int]] = {},
) -> Comparison:
    content = CommittedPartition(low, 3, np.arange(low, 3))
    records = ReadRecords(
        STREAM,
        Coverage(proved=[Span(name, 0, 0, 3) for name in RECORDS]),
        {name: CommittedTopic(name, "id", {0: content}) for name in RECORDS},
        {name: ListedRecords(listed) for name, listed in RECORDS.items()},
    )
    return compare_truth(declared, records, TableVersion(table, 0, mark, refused))


def windows(count: int) -> list[dict[str, Any]]:
    return [{"end": BEGIN + (n + 1) * HOUR, "n": n + 1} for n in range(count)]


def test_windows_are_due_when_the_watermark_has_reached_them(table: Path) -> None:
    @truth("hours", final="end")
    def four(records: Iterable[Record]) -> list[dict[str, Any]]:
        return windows(4)

    comparison = compared(table, four, mark=BEGIN + 2 * HOUR)
    assert comparison.verdict == "ok" and "2 rows are open: their end is after the watermark" in comparison.text
    late = compared(table, four, mark=BEGIN + 3 * HOUR)
    assert late.verdict == "wrong" and "1 rows missing" in late.text
    early = compared(table, four, mark=BEGIN + HOUR)
    assert early.verdict == "wrong" and "1 rows not expected" in early.text
    assert compared(table, four).verdict == "unproved", "nobody knows the watermark any more"


def test_where_no_entry_is_left_nobody_knows_whether_records_were_late() -> None:
    timed = StructType([*ROWS.fields]).add("at", TimestampType())
    topic = KafkaTopic("orders", Json(timed), event_time="at", lateness="1 minute")
    stream = Stream("hours", hours, {**STREAM.sources, "orders": topic}, STREAM.sinks)
    known = Entry("batch", "hours", "hours", 1, 0, (), {"written": 2})
    assert too_late(Coverage(entries=[known]), stream, "") == ""
    for covered in (Coverage(), Coverage(entries=[known], missing=1)):
        assert "how many is not known" in too_late(covered, stream, "")
        assert too_late(covered, STREAM, "") == "", "without an event time nothing is late"


def test_each_source_is_given_under_its_name_or_all_as_one(table: Path) -> None:
    given: dict[str, Any] = {}

    @truth("hours")
    def by_source(orders: Iterable[Record], payments: Iterable[Record]) -> list[dict[str, Any]]:
        given["orders"] = [r.value["id"] for r in orders]
        given["payments"] = [(r.topic, r.offset) for r in payments]
        return windows(2)

    @truth("hours")
    def together(records: Iterable[Record]) -> list[dict[str, Any]]:
        given["all"] = [r.topic for r in records]
        return windows(2)

    assert compared(table, by_source, refused={"orders": frozenset({1})}).verdict == "ok"
    assert given == {"orders": [0, 2], "payments": [("payments", n) for n in range(3)]}, "without what was refused"
    assert compared(table, together).verdict == "ok" and given["all"] == ["orders"] * 3 + ["payments"] * 3

    @truth("hours")
    def misnamed(orders: Iterable[Record], others: Iterable[Record]) -> list[dict[str, Any]]:
        return []

    with pytest.raises(UsageError, match="takes"):
        compared(table, misnamed)


def test_what_cannot_be_compared_says_why(table: Path) -> None:
    comparison = compared(table, Truth("hours", lambda records: windows(2)), low=1)
    assert comparison.verdict == "unproved" and "no longer holds the records before orders-0 1" in comparison.text

    @truth("hours")
    def shrug(records: Iterable[Record]) -> Any:
        raise NotComparable("these are not our records")

    assert compared(table, shrug) == Comparison("hours", "truth", "not compared", "these are not our records")


@pytest.mark.parametrize("kind", ["arrow", "pandas", "iterator"])
def test_rows_come_in_any_form(table: Path, kind: str) -> None:
    import pandas as pd

    def rows(records: Iterable[Record]) -> Any:
        listed = windows(2)
        forms = {"arrow": pa.Table.from_pylist, "pandas": pd.DataFrame, "iterator": iter}
        return forms[kind](listed)

    assert compared(table, Truth("hours", rows)).verdict == "ok"


def test_the_watermark_of_a_batch_is_what_spark_planned_it_with(tmp_path: Path) -> None:
    folder = tmp_path / "hours" / "g0002" / "offsets"
    folder.mkdir(parents=True)
    (folder / "7").write_text('v1\n{"batchWatermarkMs":3600000,"conf":{}}\n{"orders":{"0":3}}')
    (folder / "8").write_text("v1\n")
    assert watermarks(tmp_path, "hours") == {(2, 7): datetime(1970, 1, 1, 1, tzinfo=UTC)}


def keyed(*rows: Any) -> pa.Table:
    return pa.Table.from_pylist([{"k": key, "v": value} for key, value in rows])


def words(expected: pa.Table, actual: pa.Table, tolerance: float = 0.0, keys: tuple[str, ...] = ()) -> str:
    return "; ".join(compare_rows(expected, actual, tolerance).words(keys))


@pytest.mark.parametrize(
    "value",
    [float("nan"), None, Decimal("1.10"), "\u2028", b"\xff", [1, None, 2], {"a": [1.5], "b": None}, -0.0],
    ids=repr,
)
def test_equal_rows_are_no_difference_whatever_they_hold(value: Any) -> None:
    one = pa.table({"k": ["a", "b"], "v": pa.array([value, value])})
    assert not compare_rows(one, one.take([1, 0]))


def test_a_row_too_often_or_too_seldom_and_what_differs_in_a_key_is_told_and_no_difference_has_no_words() -> None:
    difference = words(keyed(("a", 1), ("a", 1), ("b", 2)), keyed(("a", 1), ("b", 2), ("b", 2)))
    assert difference == "1 rows missing, first k=a v=1; 1 rows not expected, first k=b v=2"
    difference = words(keyed(("a", 1), ("b", 2)), keyed(("a", 1), ("b", 3)), keys=("k",))
    assert difference == "1 row differs, first k=b: v is 3 instead of 2"
    assert not RowDifference(("k",), {}, {}) and RowDifference(("k",), {}, {}).words() == []


def test_floats_may_differ_by_the_tolerance_and_by_no_more_and_null_is_no_zero() -> None:
    assert not compare_rows(keyed(("a", 0.0)), keyed(("a", -0.0)))
    assert compare_rows(keyed(("a", 0.0), ("b", 1.0)), keyed(("a", None), ("b", 1.0)))
    near, far = 1000.0 * (1 + 1e-12), 1000.0 * (1 + 1e-6)
    assert not compare_rows(keyed(("a", 1000.0)), keyed(("a", near)), 1e-9)
    assert compare_rows(keyed(("a", 1000.0)), keyed(("a", near)))
    assert compare_rows(keyed(("a", 1000.0)), keyed(("a", far)), 1e-9)
    assert compare_rows(keyed(("a", 1000.0)), keyed(("b", near)), 1e-9), "and nothing but floats"


def held(kind: pa.DataType, *values: Any) -> pa.Table:
    return pa.table({"k": ["a"] * len(values), "v": pa.array(values, kind)})


DEEP = pa.map_(pa.string(), pa.list_(pa.struct([("a", pa.float64()), ("b", pa.map_(pa.int32(), pa.float64()))])))


def deep(value: float, *, turned: bool = False) -> list[Any]:
    inner = [(10, value), (9, float("nan"))]
    entries = [("x", [{"a": value, "b": inner[::-1] if turned else inner}, None]), ("y", None), ("z", [])]
    return entries[::-1] if turned else entries


def test_maps_are_equal_whatever_the_order_of_their_entries_and_whatever_they_hold() -> None:
    assert not compare_rows(held(DEEP, deep(1.5), None), held(DEEP, None, deep(1.5, turned=True)))
    assert compare_rows(held(DEEP, deep(1.5)), held(DEEP, deep(2.5, turned=True)))
    counts = pa.map_(pa.string(), pa.int64())
    assert not compare_rows(held(counts, [("x", 1), ("y", 2)]), held(counts, [("y", 2), ("x", 1)]))
    assert compare_rows(held(counts, [("x", 1), ("y", 2)]), held(counts, [("x", 2), ("y", 1)]))
    assert compare_rows(held(pa.list_(pa.int64()), [1, 2]), held(pa.list_(pa.int64()), [2, 1])), "an array has an order"


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        (pa.list_(pa.float64()), lambda value: [1.0, value, None]),
        (pa.struct([("a", pa.float64()), ("b", pa.string())]), lambda value: {"a": value, "b": "b"}),
        (pa.map_(pa.string(), pa.float64()), lambda value: [("x", value), ("y", float("inf"))]),
        (DEEP, deep),
    ],
    ids=["array", "struct", "map", "deep"],
)
def test_floats_inside_of_a_value_may_differ_by_the_tolerance(kind: pa.DataType, made: Any) -> None:
    near, far = 1000.0 * (1 + 1e-12), 1000.0 * (1 + 1e-6)
    assert not compare_rows(held(kind, made(1000.0)), held(kind, made(near)), 1e-9)
    assert compare_rows(held(kind, made(1000.0)), held(kind, made(near)))
    assert compare_rows(held(kind, made(1000.0)), held(kind, made(far)), 1e-9)


def test_records_with_a_schemas_id_in_a_header_are_decoded_and_judged_with_it() -> None:
    schema = record(("id", "long"))
    topic = KafkaTopic("orders", Avro(schema, ids="header"))
    stream = Stream("copies", lambda orders: orders, {"orders": topic}, {"copies": DeltaTable("copies")})
    raw = RawRecord("orders", 0, 0, 0, None, b"\x0e", [(ID_HEADER, b"\0\0\0\0\1")])
    without = RawRecord("orders", 0, 1, 0, None, b"\x0e")
    refusals = refusals_of(stream, Known(schema))
    refusals.take([raw, without])
    assert refusals.found == {"orders": {without.place: "not_framed"}}
    content = {"orders": CommittedTopic("orders", "id", {0: CommittedPartition(0, 1, np.arange(1))})}
    listed = {"orders": ListedRecords([raw])}
    records = ReadRecords(stream, Coverage(proved=[Span("orders", 0, 0, 1)]), content, listed, schemas=Known(schema))
    declared = Truth("copies", lambda orders: [])
    (read,) = records.arguments(declared, {})["orders"]
    assert read.value == {"id": 7}


def test_values_are_decoded_together_and_one_that_is_refused_raises_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    read = JsonReader.read

    def counted(self: JsonReader, values: Sequence[bytes | None]) -> Block:
        decoded.append(len(values))
        return read(self, values)

    monkeypatch.setattr(JsonReader, "read", counted)
    values: list[bytes | None] = [b'{"id": %d}' % at for at in range(2_500)]
    values[7:9] = [None, b"{"]
    raw = [RawRecord("orders", 0, at, 0, None, value) for at, value in enumerate(values)]
    stream = Stream("copies", lambda orders: orders, {"orders": STREAM.sources["orders"]}, STREAM.sinks)
    coverage = Coverage(proved=[Span("orders", 0, 0, len(raw))])
    records = ReadRecords(stream, coverage, {}, {"orders": ListedRecords(raw)})
    given = records.arguments(Truth("hours", lambda orders: []), {})["orders"]
    first = [next(given) for _ in range(10)]
    assert decoded == [], "not before a value is asked for"
    assert [each.value.get("id") for each in first[:8]] == [*range(7), None] and first[7].value == {}
    with pytest.raises(Refused, match="malformed_json"):
        _ = first[8].value
    assert first[9].value is first[9].value
    assert [each.value["id"] for each in given] == list(range(10, 2_500))
    assert decoded == [1_000, 1_000, 500]


def test_a_record_that_a_truth_keeps_keeps_no_other_one() -> None:
    block = ValueBlock(Json(ROWS).reader, None)
    raw = [RawRecord("orders", 0, at, 0, None, b'{"id": %d}' % at) for at in range(100)]
    values = [block.value_of(each) for each in raw]
    alive = weakref.WeakSet(values)
    record = Record("orders", 0, 41, 0, None, raw[41].value, values[41])
    values.clear()
    assert [each.raw.offset for each in alive] == [41]
    copied = copy.copy(record)
    assert record.value["id"] == 41 and copied.value == record.value
    assert [each.raw.offset for each in alive] == [41]


def test_records_of_other_code_are_decoded_apart_and_named() -> None:
    raw = [RawRecord("orders", 0, at, 0, None, b'{"id": 1}' if at % 2 else b"{") for at in range(4)]
    stream = Stream("copies", lambda orders: orders, {"orders": STREAM.sources["orders"]}, STREAM.sinks)
    ranges = tuple(Range("orders", "id", {0: at}, {0: at + 1}) for at in (1, 3))
    entry = Entry("batch", "copies", "hours", 1, 0, ranges, {}, code="today")
    coverage = Coverage(proved=[Span("orders", 0, 0, 4)], entries=[entry])
    records = ReadRecords(stream, coverage, {}, {"orders": ListedRecords(raw)}, code=frozenset({"today"}))
    read = list(records.arguments(Truth("hours", lambda orders: []), {})["orders"])
    assert [read[at].value["id"] for at in (1, 3)] == [1, 1]
    with pytest.raises(NotComparable, match="record orders-0 0 was read by other code"):
        _ = read[0].value
