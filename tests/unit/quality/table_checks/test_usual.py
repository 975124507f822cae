"""Usual rows and totals: too few, too many, too short a history, equal numbers, recoveries, and shortened logs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from quality.table_checks import Past, UsualRows, UsualTotal
from quality.validation import CheckOutcome
from tests.support.checked_tables import AT, Orders, Row, row, rows

HOUR = 3600.0


def history(now: float, *numbers: float, every: float = HOUR) -> list[Past]:
    """Outcomes an hour apart, newest first."""
    return [Past(number, now - every * (place + 1)) for place, number in enumerate(numbers)]


STEADY = (100, 103, 98, 101, 99, 100, 102, 97, 100)


def hours(counts: Sequence[int], **changes: Any) -> list[Row]:
    """So many rows in each hour, the oldest first."""
    made = []
    for hour, count in enumerate(counts):
        at = datetime.fromtimestamp(AT // HOUR * HOUR + hour * HOUR, UTC)
        made += [row(i, at=at, **changes) for i in range(count)]
    return made


AFTER = AT + 1000 * HOUR


@pytest.mark.parametrize(("count", "passed"), [(100, True), (97, True), (10, False), (1000, False), (0, False)])
def test_the_rows_since_the_last_validation_are_compared_with_earlier_ones(
    orders: Orders, count: int, passed: bool
) -> None:
    orders.batch(0)
    orders.batch(1, rows(0, count))
    now = time.time()
    outcome = orders.look(UsualRows(), since=1, now=now, past=history(now, *STEADY))
    assert outcome.passed is passed and outcome.number == pytest.approx(count) and not outcome.error


@dataclass
class Growing:
    """The outcomes of a check over its own runs, newest first, each an hour after the one before."""

    now: float
    outcomes: list[tuple[Past, bool]] = field(default_factory=list)

    def newest(self, expectation: str, limit: int) -> Sequence[Past]:
        return [past for past, _ in self.outcomes][:limit]

    def passed(self, expectation: str, limit: int) -> Sequence[Past]:
        return [past for past, passed in self.outcomes if passed][:limit]

    def look(self, check: UsualRows | UsualTotal, orders: Orders, since: int) -> CheckOutcome:
        outcome = check.look(replace(orders.checked(since=since, now=self.now), past=self))
        self.outcomes.insert(0, (Past(outcome.number, self.now, outcome.observed), outcome.passed))
        self.now += HOUR
        return outcome


@pytest.mark.parametrize("check", [UsualRows(at_most=10), UsualTotal("value", at_most=10)])
def test_an_outage_stays_red_until_rows_come_as_usual(orders: Orders, check: UsualRows | UsualTotal) -> None:
    seen = Growing(time.time() - 100 * HOUR)
    orders.batch(0, rows(0, 100, value=1.0))
    for number in range(1, 14):
        orders.batch(number, rows(number * 100, number * 100 + 100, value=1.0))
        assert seen.look(check, orders, since=number).passed
    assert not any(seen.look(check, orders, since=14).passed for _ in range(30))
    assert "declare it: since=" in seen.outcomes[0][0].observed
    orders.batch(14, rows(1400, 1500, value=1.0))
    assert seen.look(check, orders, since=14).passed


def test_a_change_that_is_declared_is_what_later_numbers_are_compared_with(orders: Orders) -> None:
    orders.batch(0, rows(0, 10))
    now = time.time()
    past = history(now, *[10.0] * 8, *[100.0] * 30)
    orders.batch(1, rows(10, 20))
    assert not orders.look(UsualRows(threshold=2), since=1, now=now, past=past).passed
    since = datetime.fromtimestamp(now - 8.5 * HOUR, UTC).isoformat()
    outcome = orders.look(UsualRows(since=since, threshold=2), since=1, now=now, past=past)
    assert outcome.passed and "usually 10 (median of 8)" in outcome.observed


def test_an_outcome_of_a_run_on_a_part_of_the_table_does_not_shorten_the_time(orders: Orders) -> None:
    orders.batch(0)
    began = time.time() - 1800
    orders.batch(1)
    past = [Past(1.0, began + 5000), Past(1.0, began), Past(1.0, began - 5000)]
    outcome = orders.look(UsualRows(), since=1, now=began + 7200, past=past)
    assert outcome.number == pytest.approx(5)


def test_an_upsert_counts_the_rows_that_batches_brought(upsert: Orders) -> None:
    upsert.batch(0)
    upsert.batch(1, rows(0, 10))
    now = time.time()
    assert upsert.look(UsualRows(), since=1, now=now, past=history(now, 1.0)).number == pytest.approx(10)


def test_a_short_history_passes_and_is_recorded(orders: Orders) -> None:
    orders.batch(0)
    now = time.time()
    outcome = orders.look(UsualRows(), since=0, now=now, past=history(now, *STEADY[:7]))
    assert outcome.passed and "7 earlier of 8" in outcome.observed and outcome.number == pytest.approx(10)
    assert "no earlier validation" in orders.look(UsualRows()).observed


def test_rows_are_counted_from_the_ledger_file_once_the_log_is_shorter(orders: Orders) -> None:
    for number in range(4):
        orders.batch(number)
    orders.shorten()
    now = time.time()
    assert orders.look(UsualRows(), since=1, now=now, past=history(now, 1.0)).number == pytest.approx(30)


def test_rows_that_neither_log_nor_ledger_knows_are_an_error(orders: Orders) -> None:
    for number in range(4):
        orders.batch(number, line=number > 2)
    orders.shorten()
    now = time.time()
    outcome = orders.look(UsualRows(), since=1, now=now, past=history(now, 1.0))
    assert not outcome.passed and "cannot be counted" in outcome.error


def test_after_a_recovery_nothing_is_judged(orders: Orders) -> None:
    orders.batch(0)
    table = orders.stored()
    table.mark(replace(orders.entry(0, 2), kind="publish", plan="p"))
    now = time.time()
    outcome = orders.look(UsualRows(), since=0, now=now, past=history(now, *STEADY))
    assert outcome.passed and "recovery" in outcome.observed and outcome.number is None


@pytest.mark.parametrize(
    ("counts", "passed"),
    [
        ([*[10, 11, 9] * 4, 10, 1], True),  # the newest hour is still being filled
        ([*[10, 11, 9] * 4, 1, 10], False),
        ([*[10, 11, 9] * 4, 40, 10], False),
        ([*[10, 11, 9] * 4, 0, 10], False),  # no row at all in the last whole hour
        ([10] * 13, True),
        ([*[10] * 12, 11, 10], True),  # equal numbers, and one within a tenth of them
        ([*[10] * 12, 12, 10], False),
        ([10, 90, 5], True),  # too short a history
    ],
)
def test_the_newest_whole_window_is_compared_with_those_before_it(
    orders: Orders, counts: list[int], passed: bool
) -> None:
    orders.batch(0, hours(counts))
    outcome = orders.look(UsualRows(time="at"), now=AFTER)
    assert outcome.passed is passed and outcome.number == counts[-2]


def test_rows_of_the_future_are_no_window(orders: Orders) -> None:
    orders.batch(0, [*hours([10] * 12), row(1, at=datetime(2999, 1, 1, tzinfo=UTC)), row(2, at=None)])
    assert orders.look(UsualRows(time="at"), now=AFTER).number == 10


def test_a_table_without_rows_or_with_one_is_not_judged(orders: Orders) -> None:
    for content in ([], [row(1)], [row(2, at=None)]):
        orders.batch(len(orders.checked().commits), content)
        for check in (UsualRows(time="at"), UsualTotal("value", time="at")):
            outcome = orders.look(check, now=AFTER)
            assert outcome.passed and "not judged" in outcome.observed


@pytest.mark.parametrize("column", ["value", "price", "id"])
def test_a_total_per_window_is_judged_whatever_the_type(tmp_path: Path, column: str) -> None:
    for last, passed in ((10, True), (60, False)):
        orders = Orders.begin(tmp_path / str(last))
        orders.batch(0, hours([*[10] * 12, last, 1]))
        assert orders.look(UsualTotal(column, time="at"), now=AFTER).passed is passed


def test_the_growth_of_a_total_is_compared_with_earlier_growth(upsert: Orders) -> None:
    upsert.batch(0, [row(0, value=1100.0), row(1, value=None)])
    now = time.time()
    steady = history(now, *[1000.0 - 100 * place for place in range(10)])
    assert upsert.look(UsualTotal("value"), now=now, past=steady).passed
    upsert.batch(1, [row(0, value=9000.0)])
    outcome = upsert.look(UsualTotal("value"), now=now, past=steady)
    assert not outcome.passed and outcome.number == 9000


def test_a_sum_that_is_no_number_fails(orders: Orders) -> None:
    orders.batch(0, [row(0, value=float("nan")), row(1)])
    outcome = orders.look(UsualTotal("value"))
    assert not outcome.passed and outcome.number is None


def test_nulls_only_are_a_total_of_zero(orders: Orders) -> None:
    orders.batch(0, rows(0, 3, value=None))
    outcome = orders.look(UsualTotal("value"))
    assert outcome.passed and outcome.number == 0
