"""Streams that write tables of PostgreSQL, in `StreamTest`: the tables are in memory, and need no psycopg."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs import DeltaTable, Json, KafkaTopic, PostgresTable, UsageError, stream
from streaming_jobs.testing import StreamTest

CHANGE = StructType(
    [StructField("id", StringType()), StructField("version", LongType()), StructField("price", LongType())]
)
CHANGES = KafkaTopic("changes", value=Json(CHANGE))
Make = Callable[..., StreamTest]


@stream(
    source=CHANGES,
    sink={
        "log": DeltaTable("change_log"),
        "newest": PostgresTable("prices", keys=["id"], order_by=["version"], delete_when="price IS NULL"),
        "all": PostgresTable("all_prices"),
    },
)
def prices(changes: DataFrame) -> dict[str, DataFrame]:
    """Each change, and the newest price of each product."""
    return {"log": changes.drop("_source"), "newest": changes, "all": changes.select("id", "price")}


def change(product: str | None, version: int, price: int | None) -> dict[str, Any]:
    return {"id": product, "version": version, "price": price}


def test_the_newest_row_of_a_key_is_there_over_restarts_crashes_and_deletes(stream_test: Make) -> None:
    test = stream_test(prices)
    for each in (change("a", 1, 10), change("b", 1, 20), change("a", 3, 30), change(None, 1, 5)):
        test.send(each)
    test.crash_at("secondary_committed")
    test.run()
    test.run()
    newest = [(row["id"], row["version"], row["price"]) for row in test.postgres("prices")]
    assert newest == [("a", 3, 30), ("b", 1, 20)]
    assert len(test.postgres("all_prices")) == 4, "the repeated batch is there once"
    assert [letter["reason"] for letter in test.dead_letters()] == ["null_key"]
    for each in (change("a", 2, 99), change("b", 2, None), change("b", 1, 98)):
        test.send(each)
    test.run()
    assert [(row["id"], row["version"]) for row in test.postgres("prices")] == [("a", 3)]
    with pytest.raises(UsageError, match="prices, all_prices"):
        test.postgres()


def test_a_stream_under_test_does_not_import_psycopg(stream_test: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "psycopg"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "streaming_jobs.sinks.postgres.database", raising=False)
    test = stream_test(prices)
    test.send(change("a", 1, 10))
    test.run()
    assert test.postgres("all_prices") == [{"id": "a", "price": 10}]
