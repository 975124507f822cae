"""Redrives through Spark: what was set aside goes through the code of today, once, and ends as if that had always run."""

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
from streaming_jobs.sources.connection import NoBroker
from streaming_jobs.sinks.redriven import Kind
from streaming_jobs.testing import StreamTest

pytestmark = pytest.mark.timeout(600)
WRONG = KafkaTopic("orders", value=Json({"id": "int", "price": "int"}))
"""The format of before: it refuses prices that have a fraction."""
RIGHT = KafkaTopic("orders", value=Json({"id": "int", "price": "double"}))
NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)


def placed(orders: DataFrame) -> DataFrame:
    return orders.selectExpr(
        "id", "CAST(price AS DOUBLE) AS price", "_source.partition AS p", "_source.offset AS o", "_source.timestamp AS at"
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
    assert dry.outcome == "dry run" and dry.counts == {"row": len(fractions), "dead again": len(letters) - len(fractions)}
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
