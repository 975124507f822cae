"""Unique keys and references: planted doubles, nulls and orphans, awkward values, wrong statistics."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from quality.table_checks import References, UniqueKey
from tests.support.checked_tables import Orders, edit_adds, row, rows


def test_an_upsert_table_has_every_key_once(upsert: Orders) -> None:
    upsert.batch(0)
    upsert.batch(1, rows(5, 15))
    outcome = upsert.look(UniqueKey())
    assert (outcome.passed, outcome.rows, outcome.failing, outcome.number) == (True, 15, 0, 0.0)


def test_a_doubled_and_a_null_key_are_found(upsert: Orders) -> None:
    upsert.batch(0)
    upsert.foreign([row(3), row(3), row(4), {**row(0), "id": None}])
    outcome = upsert.look(UniqueKey())
    assert (outcome.passed, outcome.rows, outcome.failing) == (False, 14, 6)
    assert outcome.sample == ({"id": 3, "rows": 3}, {"id": 4, "rows": 2}, {"id": None, "rows": 1})
    assert "2 keys are in more than one row" in outcome.observed and "1 row with a null" in outcome.observed


def test_only_the_fixed_version_is_looked_at(upsert: Orders) -> None:
    upsert.batch(0)
    version = upsert.checked().version
    upsert.foreign([row(3)])
    assert upsert.look(UniqueKey(), version=version).passed
    assert not upsert.look(UniqueKey()).passed


@pytest.mark.parametrize(("column", "value"), [("value", float("nan")), ("price", Decimal("1.50")), ("at", None)])
def test_awkward_values_in_two_rows_are_found(orders: Orders, column: str, value: Any) -> None:
    orders.batch(0, [row(1, **{column: value}), row(2, **{column: value})])
    outcome = orders.look(UniqueKey(["place", column]))
    assert outcome.passed is (value is not None)  # the places differ
    assert orders.look(UniqueKey([column])).failing == 2


def test_an_empty_table_and_one_row_pass(upsert: Orders) -> None:
    assert upsert.look(UniqueKey()).passed
    upsert.batch(0, [row(1)])
    assert upsert.look(UniqueKey()).passed


def test_a_sample_has_twenty_rows_at_most(upsert: Orders) -> None:
    upsert.batch(0, rows(0, 50))
    upsert.foreign(rows(0, 50))
    outcome = upsert.look(UniqueKey())
    assert (len(outcome.sample), outcome.failing) == (20, 100)


def wrong_statistics(add: dict[str, Any]) -> None:
    """The values of the file are above all, and none is null."""
    wrong = {"minValues": {"id": 10**9}, "maxValues": {"id": 10**9}, "nullCount": {"id": 0}}
    add["stats"] = json.dumps({**json.loads(add["stats"]), **wrong})


def test_wrong_statistics_hide_nothing(orders: Orders) -> None:
    orders.batch(0, [row(1), row(1), {**row(1), "id": None}])
    orders.batch(1, [row(7), row(8)])
    orders.other("known", pa.table({"id": [7]}))
    edit_adds(orders.path, wrong_statistics)
    assert orders.look(UniqueKey(["id"])).failing == 3
    outcome = orders.look(References("id", "known", "id"))
    assert outcome.failing == 3 and {row["id"] for row in outcome.sample} == {1, 8}


def test_a_null_in_a_column_that_must_have_none_is_never_a_pass(orders: Orders) -> None:
    """Another writer may not have kept to it; a query planner does."""
    orders.batch(0, [row(1), {**row(1), "id": None}])
    first = orders.path / "_delta_log" / f"{0:020d}.json"
    text = first.read_text()
    nullable = '{\\"name\\":\\"id\\",\\"type\\":\\"long\\",\\"nullable\\":true'
    assert nullable in text
    first.write_text(text.replace(nullable, nullable.replace("true", "false")))
    outcome = orders.look(UniqueKey(["id"]))
    assert not outcome.passed and "non-nullable but contains null" in outcome.error


def test_the_keys_of_the_suite_come_before_those_of_the_table(upsert: Orders) -> None:
    upsert.batch(0)
    assert upsert.look(UniqueKey(), key=("place",)).failing == 10


def test_values_that_are_in_the_other_table_pass(orders: Orders) -> None:
    orders.batch(0, [*rows(0, 10), row(11, place=None)])
    orders.other("places", pa.table({"name": list("abcdef")}))
    outcome = orders.look(References("place", "places", "name"))
    assert (outcome.passed, outcome.rows, outcome.failing) == (True, 11, 0)


def test_values_that_are_nowhere_are_found_and_the_key_comes_first(orders: Orders) -> None:
    orders.batch(0, rows(0, 10))
    orders.other("places", pa.table({"name": ["a", "b", "c", "d", None]}))
    outcome = orders.look(References("place", "places", "name"), key=("at",))
    assert (outcome.passed, outcome.failing, outcome.number) == (False, 2, 2.0)
    assert [list(each)[:2] for each in outcome.sample] == [["at", "place"]] * 2
    assert {each["place"] for each in outcome.sample} == {"e"}
    assert "2 rows with 1 value of place not in places.name" in outcome.observed


def test_the_newest_version_of_the_other_table_counts(orders: Orders) -> None:
    orders.batch(0, rows(0, 1))
    orders.other("places", pa.table({"name": ["z"]}))
    checked = orders.checked()
    assert not References("place", "places", "name").look(checked).passed
    orders.other("places", pa.table({"name": ["a"]}))
    assert References("place", "places", "name").look(checked).passed


def test_an_empty_other_table_has_no_value(orders: Orders) -> None:
    orders.batch(0)
    orders.other("places", pa.table({"name": pa.array([], pa.string())}))
    assert orders.look(References("place", "places", "name")).failing == 10


def test_decimals_of_another_scale_are_the_same_values(orders: Orders) -> None:
    orders.batch(0, rows(0, 3))
    orders.other("prices", pa.table({"p": pa.array([Decimal(0), Decimal(1)], pa.decimal128(20, 4))}))
    assert orders.look(References("price", "prices", "p")).failing == 1


def test_files_that_are_gone_are_an_error(upsert: Orders) -> None:
    upsert.batch(0)
    for file in upsert.path.glob("*.parquet"):
        file.unlink()
    outcome = upsert.look(UniqueKey())
    assert not outcome.passed and "cannot be queried" in outcome.error
    assert DeltaTable(upsert.path).version() == 1
