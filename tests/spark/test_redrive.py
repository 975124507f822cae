"""Redrives through Spark: set-aside records go through today's code once, and end as if that had always run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from reprocessing.redrive.redrive import RedriveReport, redrive
from reprocessing.redrive.selection import Choice, OffsetChoice
from reprocessing.slices.rebuild import Tools
from streaming_jobs import DeltaTable, ErrorPolicy, Holds, Json, KafkaTopic, NotNull, Stream, stream
from streaming_jobs.errors import UsageError
from streaming_jobs.sinks.redriven import Kind
from streaming_jobs.sources.connection import NoBroker
from streaming_jobs.testing import StreamTest

WRONG = KafkaTopic("orders", value=Json({"id": "int", "price": "int"}))
"""The format of before: it refuses prices that have a fraction."""
RIGHT = KafkaTopic("orders", value=Json({"id": "int", "price": "double"}))
NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)


def placed(orders: DataFrame) -> DataFrame:
    return orders.selectExpr(
        "id",
        "CAST(price AS DOUBLE) AS price",
        "_source.partition AS p",
        "_source.offset AS o",
        "_source.timestamp AS at",
    )


def made(source: KafkaTopic, **options: Any) -> Stream:
    @stream(name="orders", source=source, sink=DeltaTable("prices"), **options)
    def orders(orders: DataFrame) -> DataFrame:
        return placed(orders)

    return orders


def redriven(test: StreamTest, spark: SparkSession, kind: Kind = "dead letters", **options: Any) -> RedriveReport:
    choice = options.pop("choice", Choice())
    nobody: Any = NoBroker(None)  # type: ignore[arg-type]  # no topic is asked for anything
    tools = Tools(test.settings, nobody, "", lambda: spark)
    return redrive(tools, test.stream, kind, choice, **options)


def test_dead_letters_become_the_rows_of_the_corrected_format_in_any_order(
    stream_test: Callable[..., StreamTest], spark: SparkSession
) -> None:
    rng, test = random.Random(7), stream_test(made(WRONG), partitions=2)
    for number in range(40):
        value = b"{" if number % 13 == 0 else b'{"id": %d, "price": %s}' % (number, b"1" if number % 3 else b"0.5")
        test.send(value, partition=number % 2, timestamp=NOON)
    test.run()
    letters = test.dead_letters()
    fractions = [each for each in letters if each["value"] != b"{"]
    assert len(test.rows()) == 40 - len(letters) and len(fractions) > 8
    test.deploy(made(RIGHT))
    dry = redriven(test, spark, dry_run=True)
    assert dry.outcome == "dry run" and dry.counts == {
        "row": len(fractions),
        "dead again": len(letters) - len(fractions),
    }
    assert test.dead_letters() == letters, "a dry run changes nothing"

    parts = [OffsetChoice("orders", 0), OffsetChoice("orders", 1, 0, 9), OffsetChoice("orders", 1, 10)]
    rng.shuffle(parts)
    for part in parts:
        assert redriven(test, spark, choice=Choice(offsets=(part,))).id is not None
    again = redriven(test, spark)
    assert (again.outcome, set(again.counts)) == ("nothing has changed", {"dead again"})
    test.send({"id": 100, "price": 2.5}, timestamp=NOON)
    test.run()  # the stream goes on

    right = stream_test(made(RIGHT), partitions=2)
    for number in range(40):
        value = b"{" if number % 13 == 0 else b'{"id": %d, "price": %s}' % (number, b"1" if number % 3 else b"0.5")
        right.send(value, partition=number % 2, timestamp=NOON)
    right.run()
    right.send({"id": 100, "price": 2.5}, timestamp=NOON)
    right.run()
    assert test.rows() == right.rows()
    assert test.dead_letters() == right.dead_letters()


class Killed(BaseException):
    """Ends a process at a crash point."""


def kill_at(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    def at(name: str, stream: str, batch: int) -> None:
        if f"{name}:{batch}" == wanted:
            raise Killed(wanted)

    for module in ("streaming_jobs.runtime.redrive_commits", "reprocessing.redrive.redrive"):
        monkeypatch.setattr(f"{module}.crash_point", at)


POINTS = ["redrive_staged:0", "redrive_asked:0", *(f"redrive_next:{n}" for n in range(4)), "redrive_ended:0"]
SHORT = ("redrive_asked:0", "redrive_next:1", "redrive_ended:0")


@stream(
    name="orders",
    source=RIGHT,
    sink={"cheap": DeltaTable("cheap"), "dear": DeltaTable("dear", keys=["id"], order_by=["price"])},
    rules={"cheap": [Holds("price > 0", on_fail="quarantine"), Holds("price < 50", on_fail="drop")]},
)
def two_tables(orders: DataFrame) -> dict[str, DataFrame]:
    rows = placed(orders)
    return {"cheap": rows.where("price < 100"), "dear": rows.where("price >= 100").select("id", "price")}


@pytest.mark.parametrize(
    "point", [point if point in SHORT else pytest.param(point, marks=pytest.mark.long) for point in POINTS]
)
def test_a_kill_at_any_border_leaves_each_record_in_its_tables_once(
    stream_test: Callable[..., StreamTest], spark: SparkSession, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    prices = ["0.5", "-1.5", "70.5", "100.5", "20.5", "1"]
    wrong = replace(two_tables, sources={"orders": WRONG})
    test, right = stream_test(wrong), stream_test(two_tables)
    for each in (test, right):
        for number, price in enumerate(prices):
            each.send(b'{"id": %d, "price": %s}' % (number, price.encode()), timestamp=NOON)
        each.send(b"{", timestamp=NOON)
        each.run()
    assert len(test.dead_letters()) == 6
    test.deploy(two_tables)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        kill_at(patched, point)
        redriven(test, spark)
    report = redriven(test, spark)
    assert report.outcome == ("committed" if point == "redrive_staged:0" else "nothing has changed")
    for table in ("cheap", "dear", "orders_dead_letters"):
        assert test.rows(table) == right.rows(table), table
    assert len(test.rows("cheap_quarantine")) == len(right.rows("cheap_quarantine")) == 1
    test.send({"id": 9, "price": 1.0})
    test.run()
    assert len(test.rows("cheap")) == 4


def test_an_older_record_does_not_replace_a_newer_row_of_its_key(
    stream_test: Callable[..., StreamTest], spark: SparkSession
) -> None:
    def latest(source: KafkaTopic) -> Stream:
        @stream(name="orders", source=source, sink=DeltaTable("latest", keys=["id"], order_by=["at"]))
        def orders(orders: DataFrame) -> DataFrame:
            return orders.selectExpr("id", "CAST(price AS DOUBLE) AS price", "_source.timestamp AS at", "_source")

        return orders

    test, right = stream_test(latest(WRONG)), stream_test(latest(RIGHT))
    for each in (test, right):
        for number, price in enumerate([b"1.5", b"2", b"3.5", b"3", b"2.5"]):  # of equal time: the later offset stays
            each.send(b'{"id": %d, "price": %s}' % (number // 2, price), timestamp=NOON)
        each.run()
    test.deploy(latest(RIGHT))
    for offset in (4, 0, 2):
        assert redriven(test, spark, choice=Choice(offsets=(OffsetChoice("orders", 0, offset, offset),))).id
    assert test.rows() == right.rows()


def test_records_on_which_the_function_raised_are_redriven_or_dead_again(
    stream_test: Callable[..., StreamTest], spark: SparkSession
) -> None:
    def divided(column: str) -> Stream:
        @stream(name="orders", source=RIGHT, sink=DeltaTable("prices"), errors=ErrorPolicy(function="dead_letter"))
        def orders(orders: DataFrame) -> DataFrame:
            return orders.selectExpr("id", f"CAST({column} AS INT) AS price")

        return orders

    test = stream_test(divided("'x' || id"))
    for number in range(3):
        test.send({"id": number, "price": number / 2})
    test.run()
    assert [each["reason"] for each in test.dead_letters()] == ["function_raised"] * 3
    test.deploy(divided("IF(id = 1, 'x', 10 / (id + 1))"))
    report = redriven(test, spark)
    assert report.counts == {"row": 2, "dead again": 1}
    assert [row["id"] for row in test.rows()] == [0, 2]
    (letter,) = test.dead_letters()
    assert letter["offset"] == 1
    test.deploy(divided("price"))
    assert redriven(test, spark).counts == {"row": 1}
    assert [row["id"] for row in test.rows()] == [0, 1, 2] and not test.dead_letters()


def test_a_stream_with_state_or_a_topic_or_unordered_keys_is_refused_with_the_command(
    stream_test: Callable[..., StreamTest], spark: SparkSession
) -> None:
    @stream(name="orders", source=RIGHT, sink=DeltaTable("totals", keys=["id"]))
    def totals(orders: DataFrame) -> DataFrame:
        return orders.groupBy("id").count()

    @stream(name="orders", source=RIGHT, sink=DeltaTable("totals"))
    def distinct(orders: DataFrame) -> DataFrame:
        return orders.selectExpr("id").dropDuplicates(["id"])

    with_state = stream_test(distinct)
    for value in (b'{"id": 1, "price": 1}', b"{"):
        with_state.send(value)
        with_state.run()
    with pytest.raises(UsageError, match="keeps state") as refused:
        redriven(with_state, spark)
    assert "recourse recover plan orders --to-batch 0" in refused.value.next_step
    test = stream_test(made(RIGHT))
    test.send(b"{")
    test.run()
    test.deploy(totals)
    with pytest.raises(UsageError, match="without an order"):
        redriven(test, spark)
    test.deploy(replace(distinct, sinks=made(RIGHT).sinks))
    with pytest.raises(UsageError, match="keeps state") as refused:
        redriven(test, spark)
    assert "recourse recover plan orders" in refused.value.next_step
    test.deploy(made(RIGHT, rules=[NotNull("id", on_fail="quarantine")]))
    with pytest.raises(UsageError, match="no quarantine"):
        redriven(test, spark, "quarantine", table="dear")


@pytest.mark.parametrize(
    ("where", "rules", "left_out"),
    [("price < 1", [], "no row"), ("true", [Holds("price < 1", on_fail="drop")], "dropped")],
)
def test_a_record_of_which_the_code_of_today_makes_no_row_is_set_aside_no_longer(
    stream_test: Callable[..., StreamTest], spark: SparkSession, where: str, rules: list[Any], left_out: str
) -> None:
    @stream(name="orders", source=RIGHT, sink=DeltaTable("prices"), rules=rules)
    def right(orders: DataFrame) -> DataFrame:
        return placed(orders).where(where)

    test = stream_test(made(WRONG))
    for number, price in enumerate([b"0.5", b"1.5", b"2.5", b"0.25"]):
        test.send(b'{"id": %d, "price": %s}' % (number, price))
    test.run()
    test.deploy(right)
    report = redriven(test, spark)
    assert [each.outcome for each in report.records] == ["row", left_out, left_out, "row"]
    assert [row["price"] for row in test.rows()] == [0.5, 0.25] and not test.dead_letters()


def test_records_of_two_topics_and_far_apart_keep_their_places_headers_and_times(
    stream_test: Callable[..., StreamTest], spark: SparkSession
) -> None:
    def union(kind: str) -> Stream:
        topics = {
            name: KafkaTopic(name, value=Json({"id": "int", "price": kind}), headers=True) for name in ("eu", "us")
        }

        @stream(name="orders", source=topics, sink=DeltaTable("prices"))
        def orders(eu: DataFrame, us: DataFrame) -> DataFrame:
            place = ("_source.topic AS t", "_source.offset AS o", "_source.timestamp AS at", "_source.headers AS h")
            return eu.unionByName(us).selectExpr("id", "CAST(price AS DOUBLE) AS price", *place)

        return orders

    test, right = stream_test(union("int")), stream_test(union("double"))
    for each in (test, right):
        for number in range(300):
            price = b"0.5" if number in (3, 290) else b"1"
            value, topic = b'{"id": %d, "price": %s}' % (number, price), ("eu", "us")[number % 2]
            each.send(value, topic=topic, timestamp=NOON, headers={"n": b"%d" % number})
        each.run()
    assert len(test.dead_letters()) == 2
    test.deploy(union("double"))
    assert redriven(test, spark).rows == {"prices": 2}
    assert test.rows() == right.rows()
