"""A run of a suite: every planted error is found, counted and shown with its key; nothing that fails passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import great_expectations.expectations as gxe
import pytest
from great_expectations.expectations.row_conditions import Column

from quality import Suite, suite_from_json
from quality.history import history
from quality.runs.runner import RunRequest, run_suite
from quality.validation import CheckOutcome, Validation
from streaming_jobs.errors import PreflightRefused, UsageError
from tests.support.checked_orders import TOPOLOGY, OrdersTable, order

pytestmark = pytest.mark.slow

QUICK = RunRequest(docs=False)
NOT_NEGATIVE = gxe.ExpectColumnValuesToBeBetween(column="amount", min_value=0)
HAS_ITEM = gxe.ExpectColumnValuesToNotBeNull(column="item")


def run(table: OrdersTable, *expectations: Any, request: RunRequest = QUICK, **of_suite: Any) -> Validation:
    suite = Suite("orders_rows", "orders", lambda: expectations, **{"key": ["id"], **of_suite})
    return run_suite(table.settings, TOPOLOGY, suite, request)


def only(validation: Validation) -> CheckOutcome:
    (outcome,) = validation.outcomes
    return outcome


TEA = Column("item") == "tea"
SHORT, GREATER = "item_value_lengths_between", "id_amount_a_greater_than_b"
PLANTED = [
    (HAS_ITEM, {"item": None}, "item_not_null"),
    (NOT_NEGATIVE, {"amount": -1}, "amount_between"),
    (gxe.ExpectColumnValuesToBeInSet(column="item", value_set=["tea"]), {"item": "tee"}, "item_in_set"),
    (gxe.ExpectColumnValuesToMatchRegex(column="item", regex="^[a-z]+$"), {"item": "T"}, "item_match_regex"),
    (gxe.ExpectColumnValueLengthsToBeBetween(column="item", max_value=5), {"item": "x" * 6}, SHORT),
    (gxe.ExpectColumnValuesToNotBeNull(column="amount", row_condition=TEA), {"amount": None}, "amount_not_null"),
    (gxe.ExpectColumnPairValuesAToBeGreaterThanB(column_A="id", column_B="amount"), {"amount": 100}, GREATER),
]


@pytest.mark.parametrize(("expectation", "wrong", "name"), PLANTED, ids=[name for *_, name in PLANTED])
def test_each_kind_of_planted_error_is_counted_and_shown_with_its_key(
    table: OrdersTable, expectation: Any, wrong: dict[str, Any], name: str
) -> None:
    table.append(*(order(i) for i in range(2, 12)))
    table.append({**order(50), **wrong}, {**order(51), **wrong}, order(52))
    validation = run(table, expectation)
    outcome = only(validation)
    assert (outcome.expectation, outcome.passed, outcome.failing, outcome.rows) == (name, False, 2, 13)
    assert [row["id"] for row in outcome.sample] == [50, 51] and next(iter(outcome.sample[0])) == "id"
    assert wrong.items() <= outcome.sample[0].items()
    assert not validation.passed and validation.broken


def test_doubled_rows_are_found(table: OrdersTable) -> None:
    table.append(order(1), order(2), order(3))
    table.append(order(2))
    outcome = only(run(table, gxe.ExpectColumnValuesToBeUnique(column="id")))
    assert (outcome.failing, [row["id"] for row in outcome.sample]) == (2, [2, 2])


def test_a_figure_of_the_whole_table_is_a_number(table: OrdersTable) -> None:
    table.append(order(1, amount=3), order(2, amount=4))
    outcome = only(run(table, gxe.ExpectColumnMeanToBeBetween(column="amount", max_value=3)))
    assert (outcome.passed, outcome.number, outcome.observed, outcome.failing) == (False, 3.5, "3.5", None)


def test_no_more_than_twenty_failing_rows_are_shown_and_they_are_the_first(table: OrdersTable) -> None:
    table.append(*(order(i, amount=-1) for i in range(15)))
    table.append(*(order(i, amount=-1) for i in range(15, 40)))
    outcome = only(run(table, NOT_NEGATIVE))
    assert outcome.failing == 40 and [row["id"] for row in outcome.sample] == list(range(20))


class Broken(gxe.ExpectColumnValuesToBeBetween):
    """Raises while it is evaluated."""

    def _validate(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("wrong", "name", "error"),
    [
        (gxe.ExpectColumnValuesToNotBeNull(column="price"), "price_not_null", "price"),
        (Broken(column="amount", min_value=0, meta={"name": "broken"}), "broken", "boom"),
        pytest.param(
            gxe.ExpectColumnValuesToNotBeNull(column="id", meta={"name": "unreadable", "object": object()}),
            "unreadable",
            "",
            id="one that ends the whole run",
        ),
    ],
)
def test_an_expectation_that_cannot_be_evaluated_is_an_error_and_hides_nothing(
    table: OrdersTable, wrong: Any, name: str, error: str
) -> None:
    table.append(order(1, amount=-1))
    first, second = run(table, wrong, NOT_NEGATIVE).outcomes
    assert (first.expectation, first.passed) == (name, False) and first.error and error in first.error
    assert (second.failing, second.error) == (1, "")


def test_a_suite_that_cannot_be_built_has_not_passed(table: OrdersTable) -> None:
    def build() -> Sequence[Any]:
        raise KeyError("oops")

    table.append(order(1))
    outcome = only(run_suite(table.settings, TOPOLOGY, Suite("s", "orders", build), QUICK))
    assert (outcome.expectation, outcome.passed) == ("build", False) and "oops" in outcome.error


def test_sql_is_not_silently_failed_by_pandas(table: OrdersTable) -> None:
    table.append(order(1))
    sql = gxe.UnexpectedRowsExpectation(unexpected_rows_query="SELECT * FROM {batch} WHERE amount < 0")
    outcome = only(run(table, sql, request=replace(QUICK, engine="pandas")))
    assert not outcome.passed and "--engine spark" in outcome.error


def test_a_slice_too_large_for_pandas_asks_for_spark(table: OrdersTable) -> None:
    table.append(order(1), order(2))
    small = table.settings.model_copy(update={"quality": table.settings.quality.model_copy(update={"pandas_rows": 1})})
    asked: list[bool] = []

    def factory() -> Any:
        asked.append(True)
        raise UsageError("no Spark in this test")

    suite = Suite("s", "orders", lambda: [gxe.ExpectColumnValuesToNotBeNull(column="id")])
    with pytest.raises(UsageError, match="no Spark"):
        run_suite(small, TOPOLOGY, suite, replace(QUICK, spark=factory))
    assert asked


def test_names_are_unique_and_severities_kept(table: OrdersTable) -> None:
    table.append(order(1, amount=-5))
    twice = [
        gxe.ExpectColumnValuesToBeBetween(column="amount", min_value=low, severity=severity)
        for low, severity in ((0, "warning"), (-10, "critical"), (1, "info"))
    ]
    validation = run(table, *twice)
    names = {outcome.expectation: (outcome.severity, outcome.passed) for outcome in validation.outcomes}
    between = ("amount_between", "amount_between_2", "amount_between_3")
    assert names == dict(zip(between, [("warning", False), ("critical", True), ("info", False)], strict=True))
    assert not validation.passed and not validation.broken


def test_the_second_run_reads_only_the_new_file(table: OrdersTable, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    table.append(order(1))
    first = run(table, HAS_ITEM)
    table.append(order(2, item=None))
    read: list[str] = []
    real = pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda path: read.append(Path(path).name) or real(path))
    second = run(table, HAS_ITEM)
    assert (first.files, first.since, second.files, second.files_in_table) == (1, None, 1, 2)
    assert second.since == first.version and only(second).failing == 1
    assert len(set(read)) == 1


def test_an_empty_slice_is_legal_and_evaluates_nothing(table: OrdersTable) -> None:
    table.append(order(1))
    run(table, NOT_NEGATIVE)
    validation = run(table, NOT_NEGATIVE)
    assert (validation.engine, validation.rows, validation.files) == ("none", 0, 0)
    assert only(validation).observed == "no rows" and only(validation).passed and only(validation).number is None


def test_what_a_run_has_found_stands_until_new_rows_come(table: OrdersTable) -> None:
    table.append(order(1, amount=-1))
    assert run(table, NOT_NEGATIVE).broken
    again = run(table, NOT_NEGATIVE)
    assert again.broken and (again.rows, only(again).failing) == (1, 1) and again.first_failing is not None
    table.append(order(2, amount=-2))
    run(table, NOT_NEGATIVE)
    again = run(table, NOT_NEGATIVE)
    assert again.broken and again.rows == 1 and [row["id"] for row in only(again).sample] == [2]
    table.append(order(3))
    assert run(table, NOT_NEGATIVE).passed
    assert run(table, NOT_NEGATIVE).rows == 0


def test_rows_that_came_while_an_expectation_could_not_be_evaluated_are_looked_at_later(table: OrdersTable) -> None:
    negative = gxe.ExpectColumnValuesToBeBetween(column="amount", min_value=0, meta={"name": "paid"})
    misspelt = gxe.ExpectColumnValuesToBeBetween(column="amonut", min_value=0, meta={"name": "paid"})
    table.append(order(1, amount=1))
    first = run(table, negative, HAS_ITEM)
    table.append(order(2, amount=-7))
    assert "amonut" in run(table, misspelt, HAS_ITEM).outcomes[0].error
    table.append(order(3))
    validation = run(table, negative, HAS_ITEM)
    assert first.passed and (validation.since, validation.rows) == (first.version, 2)
    assert [row["id"] for row in validation.outcomes[0].sample] == [2]


def test_rows_that_came_while_a_suite_could_not_be_built_are_looked_at_later(table: OrdersTable) -> None:
    def build() -> Sequence[Any]:
        raise KeyError("typo")

    table.append(order(1, amount=-7))
    broken = run_suite(table.settings, TOPOLOGY, Suite("orders_rows", "orders", build), QUICK)
    assert not broken.passed and broken.rows == 1
    table.append(order(2))
    assert only(run(table, NOT_NEGATIVE)).failing == 1


def test_an_expectation_that_was_added_looks_at_every_row_once(table: OrdersTable) -> None:
    table.append(order(1, amount=-7))
    assert run(table, HAS_ITEM).passed
    assert [outcome.failing for outcome in run(table, HAS_ITEM, NOT_NEGATIVE).outcomes] == [0, 1]
    table.append(order(2))
    assert run(table, HAS_ITEM, NOT_NEGATIVE).rows == 1


def test_a_suite_that_expects_nothing_has_not_passed(table: OrdersTable) -> None:
    table.append(order(1))
    outcome = only(run(table))
    assert (outcome.expectation, outcome.passed) == ("empty", False) and "no expectation" in outcome.error
    table.append(order(2))
    assert run(table).broken


def test_an_empty_table_is_looked_at_as_a_whole(table: OrdersTable) -> None:
    table.append(order(1))
    table.delete("id = 1")
    outcome = only(run(table, gxe.ExpectTableRowCountToBeBetween(min_value=1), slice="all"))
    assert not outcome.passed and outcome.number == 0


def test_a_range_does_not_count_as_the_last_run(table: OrdersTable) -> None:
    from quality.sample import TimeRange

    table.append(order(1, day=1), order(2, day=9))
    part = run(table, HAS_ITEM, request=replace(QUICK, times=TimeRange.parse("at", "2026-01-05", None)))
    assert (part.rows, part.narrowed) == (1, True)
    assert run(table, HAS_ITEM).rows == 2


def test_a_table_that_does_not_exist_or_has_vanished_is_an_error(table: OrdersTable) -> None:
    with pytest.raises(UsageError, match="does not exist yet"):
        run(table, HAS_ITEM)
    table.append(order(1))
    run(table, HAS_ITEM)
    shutil.rmtree(table.path)
    with pytest.raises(PreflightRefused, match="is gone"):
        run(table, HAS_ITEM)


def during(table: OrdersTable, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something to the table after the slice is chosen and before it is read."""
    import quality.runs.runner

    real = quality.runs.runner.choose_sample

    def choose(*args: Any) -> Any:
        chosen = real(*args)
        act()
        return chosen

    monkeypatch.setattr(quality.runs.runner, "choose_sample", choose)


def test_a_compaction_in_the_middle_changes_nothing(table: OrdersTable, monkeypatch: pytest.MonkeyPatch) -> None:
    table.append(order(1))
    version = table.append(order(2, item=None))
    during(table, monkeypatch, lambda: (table.append(order(3, item=None)), table.compact()))
    validation = run(table, HAS_ITEM)
    assert (validation.version, validation.rows, only(validation).failing) == (version, 2, 1)


def test_a_vacuum_in_the_middle_is_an_error_and_leaves_no_history(
    table: OrdersTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.append(order(1))
    table.append(order(2))
    during(table, monkeypatch, lambda: (table.compact(), table.vacuum()))
    with pytest.raises(PreflightRefused, match="was removed while it was read"):
        run(table, HAS_ITEM)
    assert history(table.settings) == []


@dataclass(frozen=True)
class Check:
    name: str
    error: str = ""

    def look(self, checked: Any) -> CheckOutcome:
        if self.error:
            raise RuntimeError(self.error)
        return CheckOutcome(self.name, "test", passed=checked.version > 0, number=float(checked.version))


def test_checks_of_the_table_are_evaluated_and_one_that_raises_hides_no_other(table: OrdersTable) -> None:
    table.append(order(1))
    checks = [Check("breaks", "bang"), Check("works")]
    first, second = run(table, checks=checks).outcomes
    assert (first.passed, "bang" in first.error, second.passed) == (False, True, True)


def test_checks_are_evaluated_on_an_empty_slice_too(table: OrdersTable) -> None:
    table.append(order(1))
    run(table, HAS_ITEM)
    assert [o.expectation for o in run(table, HAS_ITEM, checks=[Check("works")]).outcomes] == ["item_not_null", "works"]


def test_a_suite_of_a_json_file_is_read_when_it_runs(table: OrdersTable, tmp_path: Path) -> None:
    import json

    file = tmp_path / "orders.json"
    between = {"type": "expect_column_values_to_be_between", "kwargs": {"column": "amount", "min_value": 0}}
    given = {**between, "severity": "warning", "meta": {"name": "amount is positive"}}
    file.write_text(json.dumps({"name": "from_json", "expectations": [given]}))
    suite = suite_from_json(file, table="orders", key=["id"])
    table.append(order(1, amount=-1))
    outcome = only(run_suite(table.settings, TOPOLOGY, suite, QUICK))
    assert suite.name == "from_json"
    assert (outcome.expectation, outcome.severity, outcome.failing) == ("amount_is_positive", "warning", 1)


def test_a_json_file_with_an_unknown_kind_has_not_passed(table: OrdersTable, tmp_path: Path) -> None:
    file = tmp_path / "orders.json"
    file.write_text('{"name": "s", "expectations": [{"type": "expect_magic", "kwargs": {}}]}')
    table.append(order(1))
    outcome = only(run_suite(table.settings, TOPOLOGY, suite_from_json(file, table="orders"), QUICK))
    assert not outcome.passed and "expect_magic" in outcome.error
