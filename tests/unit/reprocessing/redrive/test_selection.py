"""The choice of what is redriven, and the ranges in which its records are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from reprocessing.redrive.records import ranges
from reprocessing.redrive.refusals import check_stream, refused_rows
from reprocessing.redrive.selection import OffsetChoice, SetAside, by_reason, choice
from streaming_jobs import DeltaTable, Holds, Json, KafkaSink, KafkaTopic, Stream, Unique
from streaming_jobs.declare.postgres_table import PUT_RIGHT, PostgresTable
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.sinks.delta.log import noted
from streaming_jobs.sinks.redriven import Place
from tests.support.days import BEGIN, Days, declared
from tests.support.redrives import REASON, with_letters

TOPIC = KafkaTopic("orders", value=Json({"id": "int"}))
NOW = datetime(2026, 11, 26, tzinfo=UTC).timestamp()


def aside(place: Place | None = ("orders", 0, 5), reason: str = "malformed_json", **values: Any) -> SetAside:
    given = {"of": "", "detail": "at byte 3", "rules": (), "at": NOW - 3600, "values": {}, **values}
    return SetAside(place=place, reason=reason, **given)


def chosen(row: SetAside, **options: Any) -> bool:
    names = ("older_than", "newer_than", "reason", "rule", "error", "offsets")
    return choice(*(options.get(name) for name in names)).has(row, NOW)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"older_than": "30 minutes"}, True),
        ({"older_than": "2 hours"}, False),
        ({"newer_than": "2 hours"}, True),
        ({"newer_than": "30 minutes"}, False),
        ({"reason": "malformed_json"}, True),
        ({"reason": "json"}, False),
        ({"error": "BYTE 3"}, True),
        ({"error": "byte 4"}, False),
        ({"rule": "cheap"}, False),
        ({"offsets": ["orders"]}, True),
        ({"offsets": ["orders/1", "orders/0:4-6"]}, True),
        ({"offsets": ["orders/0:6", "orders/1:5", "others/0:5"]}, False),
        ({"reason": "malformed_json", "offsets": ["orders/0:6"]}, False),
    ],
)
def test_what_meets_every_condition_is_chosen(options: Mapping[str, Any], expected: bool) -> None:
    assert chosen(aside(), **options) == expected


def test_what_names_no_record_or_no_time_is_old_and_in_no_range() -> None:
    row = aside(None, at=None)
    assert chosen(row, older_than="1 hour") and not chosen(row, newer_than="1 hour")
    assert not chosen(row, offsets=["orders"])


@pytest.mark.parametrize("text", ["", "orders/", "orders/x", "orders/0:", "orders/0:5-", "a:5"])
def test_a_wrong_range_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="no range of offsets"):
        OffsetChoice.parse(text)


@given(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 5_000))))
def test_ranges_have_every_place_once_and_no_long_gap(places: set[tuple[int, int]]) -> None:
    made = list(ranges(places))
    within = [(p, o) for p, o in places for partition, (begin, end) in made if p == partition and begin <= o < end]
    assert sorted(within) == sorted(places)
    for partition, (begin, end) in made:
        offsets = sorted(o for p, o in places if p == partition and begin <= o < end)
        assert (offsets[0], offsets[-1]) == (begin, end - 1)
        assert all(after - before <= 501 for before, after in pairwise(offsets))


def test_letters_are_counted_by_reason_and_topic_the_most_first(tmp_path: Path) -> None:
    life = Days.of(tmp_path, 1)
    assert by_reason(life.settings, life.stream, "dead letters") == []
    for offsets, reason, number in (((100, 101), REASON, 0), ((102,), "null_key", 1), ((103, 104), "null_key", 2)):
        with_letters(life, *offsets, reason=reason, at=BEGIN + timedelta(hours=number))  # a file each
    assert by_reason(life.settings, life.stream, "dead letters") == [
        {
            "reason": "null_key",
            "topic": "days",
            "number": 3,
            "oldest": "2013-03-01 01:00:00+00:00",
            "newest": "2013-03-01 02:00:00+00:00",
            "example": "x",
        },
        {
            "reason": REASON,
            "topic": "days",
            "number": 2,
            "oldest": "2013-03-01 00:00:00+00:00",
            "newest": "2013-03-01 00:00:00+00:00",
            "example": "x",
        },
    ]


def test_quarantined_rows_are_counted_by_their_rules_with_the_times_of_their_batches(tmp_path: Path) -> None:
    stream = replace(declared(), rules={"days": [Holds("n >= 0", on_fail="quarantine")]})
    life = Days.of(tmp_path, 2, stream)
    columns = {
        "n": [1, 2, 3, 4],
        "_rules": pa.array([["a", "b"], ["a"], ["a"], ["a"]], pa.list_(pa.string())),
        "_reason": ["x", None, "z", "y"],
        "_topic": ["days", "days", None, "days"],
        "_generation": [1, 1, 1, 9],
        "_batch": pa.array([0, 0, 1, 1], pa.int64()),
    }
    entry = LedgerEntry("upkeep", "days", "days_quarantine", 1, -1, note="rows of the test")
    table = life.settings.tables / "days_quarantine"
    write_deltalake(str(table), pa.table(columns), mode="append", schema_mode="merge", commit_properties=noted(entry))
    found = by_reason(life.settings, stream, "quarantine")
    assert [(each["reason"], each["topic"], each["number"], each["example"]) for each in found] == [
        ("a", "days", 2, "y"),
        ("a", "", 1, "z"),
        ("a, b", "days", 1, "x"),
    ]
    assert all(each["oldest"] and each["oldest"] == each["newest"] for each in found)


def rows(orders: Any) -> Any:
    return orders


@pytest.mark.parametrize(
    ("sinks", "rules", "why"),
    [
        ({"out": KafkaSink(KafkaTopic("out", value=Json({"id": "int"})))}, {}, "writes topic out"),
        ({"t": DeltaTable("t", keys=["id"])}, {}, "without an order"),
        ({"t": DeltaTable("t", keys=["id"], order_by=["id"], delete_when="id < 0")}, {}, "deletes keys"),
        ({"t": DeltaTable("t")}, {"t": [Unique("id", on_fail="drop")]}, "compares the rows of one batch"),
    ],
)
def test_a_stream_that_cannot_be_redriven_is_refused_with_a_command(sinks: Any, rules: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        check_stream(Stream("orders", rows, {"orders": TOPIC}, sinks, rules=rules))
    assert "recourse recover plan orders" in refused.value.next_step


def test_a_stream_that_writes_a_table_of_postgresql_is_not_advised_a_recovery() -> None:
    sinks = {"t": DeltaTable("t"), "p": PostgresTable("p")}
    with pytest.raises(UsageError, match="writes the PostgreSQL table p") as refused:
        check_stream(Stream("orders", rows, {"orders": TOPIC}, sinks))
    assert PUT_RIGHT in refused.value.next_step and "recover plan" not in refused.value.next_step


def test_rows_without_their_record_or_of_an_unknown_table_are_left_with_the_reason() -> None:
    one = Stream("orders", rows, {"orders": TOPIC}, {"t": DeltaTable("t")})
    two = Stream("orders", rows, {"orders": TOPIC}, {"t": DeltaTable("t"), "u": DeltaTable("u")})
    check_stream(Stream("orders", rows, {"orders": TOPIC}, {"t": DeltaTable("t")}, rules={"t": [Holds("id > 0")]}))
    of_row = aside(reason="null_key")
    assert not list(refused_rows(one, [aside(), of_row]))
    assert [row.reason for row, _ in refused_rows(two, [aside(), of_row])] == ["null_key"]
    why = [why for _, why in refused_rows(one, [aside(None), aside(("others", 0, 1))])]
    assert "does not name its record" in why[0] and "no longer reads topic others" in why[1]
