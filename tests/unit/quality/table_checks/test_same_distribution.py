"""The distribution of a new version's rows against those before it: who wrote which file, and when it is judged."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltalake import DeltaTable
from deltalake.schema import Field, PrimitiveType

from quality.table_checks import SameDistribution
from quality.table_checks.same_distribution import live_files
from streaming_jobs.stream import DeltaTable as Declared
from tests.support.checked_tables import AT, Orders, Row, row

pytestmark = pytest.mark.slow

ROWS = 300
RANDOM = np.random.default_rng(11)


def normal(shift: float = 0.0, count: int = ROWS) -> list[Row]:
    """Rows with normally distributed values in every column of numbers, and a place of four."""
    return [
        row(
            int(x * 1000),
            value=x,
            price=Decimal(str(round(x, 2))),
            at=datetime.fromtimestamp(AT, UTC) + timedelta(seconds=x),
            place="abcd"[int(i % 4) if not shift else int(i % 2)],
        )
        for i, x in enumerate(RANDOM.normal(shift, 1.0, count))
    ]


def two_codes(home: Path, old: list[Row], new: list[Row]) -> Orders:
    """Batches 0 and 1 of code `a`, then 2 and 3 of code `b`."""
    orders = Orders.begin(home)
    for number, (code, content) in enumerate((("a", old), ("b", new))):
        half = len(content) // 2
        orders.batch(2 * number, content[:half], code=code)
        orders.batch(2 * number + 1, content[half:], code=code)
    return orders


def codes_of(orders: Orders) -> list[list[str]]:
    """The codes of every live file, the newest first."""
    return [sorted(code.hash for code in file.codes) for file in live_files(orders.checked())]


CASES = [("value", "ks"), ("value", "psi"), ("price", None), ("at", None), ("id", "psi"), ("place", None)]


@pytest.mark.parametrize(("column", "method"), CASES)
def test_equal_distributions_pass_and_a_shift_is_found(tmp_path: Path, column: str, method: Any) -> None:
    check = SameDistribution(column, method=method)
    good = check.look(two_codes(tmp_path / "good", normal(), normal()).checked())
    assert good.passed and good.number is not None and good.rows == ROWS, good
    bad = check.look(two_codes(tmp_path / "bad", normal(), normal(1.5)).checked())
    assert not bad.passed and bad.number is not None and bad.number > good.number and not bad.error, bad


@pytest.mark.parametrize("method", ["ks", "psi"])
@pytest.mark.parametrize("wrong", [None, float("nan")])
def test_nulls_and_nan_are_values(tmp_path: Path, method: Any, wrong: float | None) -> None:
    half = [{**each, "value": wrong} if i % 2 else each for i, each in enumerate(normal())]
    check = SameDistribution("value", method=method)
    assert not check.look(two_codes(tmp_path / "new", normal(), half).checked()).passed
    assert not check.look(two_codes(tmp_path / "old", half, normal()).checked()).passed
    assert check.look(two_codes(tmp_path / "both", half, half).checked()).number == pytest.approx(0)


@pytest.mark.parametrize("column", ["value", "place"])
@pytest.mark.parametrize("method", [None, "psi"])
def test_nulls_only_are_equal_to_nulls_only(tmp_path: Path, column: str, method: Any) -> None:
    empty = [row(i, **{column: None}) for i in range(ROWS)]
    outcome = SameDistribution(column, method=method).look(two_codes(tmp_path, empty, empty).checked())
    assert outcome.passed and outcome.number == 0, outcome


def test_a_new_text_is_found_also_if_the_others_stay_as_they_are_to_each_other(tmp_path: Path) -> None:
    new = [{**each, "place": "unknown"} if i % 8 < 4 else each for i, each in enumerate(normal())]
    assert not SameDistribution("place").look(two_codes(tmp_path, normal(), new).checked()).passed


def test_few_rows_and_one_version_of_the_code_are_not_judged(tmp_path: Path) -> None:
    orders = two_codes(tmp_path / "few", normal(), normal(5.0, 100))
    outcome = orders.look(SameDistribution("value"))
    assert outcome.passed and "not judged: 100 rows of code b and 300 of a" in outcome.observed
    assert outcome.number is None
    assert not orders.look(SameDistribution("value", at_least=50)).passed
    one = Orders.begin(tmp_path / "one")
    assert "only one version" in one.look(SameDistribution("value")).observed
    one.batch(0)
    assert "only one version" in one.look(SameDistribution("value")).observed


def test_a_difference_that_chance_may_give_passes(tmp_path: Path) -> None:
    old = [row(i, value=float(i % 2)) for i in range(20)]
    new = [row(i, value=float(i % 4 == 0)) for i in range(20)]
    outcome = SameDistribution("value", at_least=10).look(two_codes(tmp_path, old, new).checked())
    assert outcome.passed and outcome.number == pytest.approx(0.25)


def test_only_the_code_right_before_is_compared(tmp_path: Path) -> None:
    orders = two_codes(tmp_path, normal(9.0), normal())
    orders.batch(4, normal(), code="c")
    assert orders.look(SameDistribution("value")).passed


def test_a_file_that_mixes_codes_is_left_out_and_named(tmp_path: Path) -> None:
    orders = two_codes(tmp_path, normal(), normal(3.0))
    orders.compact()
    outcome = orders.look(SameDistribution("value"))
    assert outcome.passed and "not judged" in outcome.observed and "1 file with rows of several" in outcome.observed
    orders.batch(4, normal(3.0), code="b")
    outcome = orders.look(SameDistribution("value"))
    assert "300 rows of code b and 0 of a" in outcome.observed


def test_a_compaction_of_one_code_keeps_it(orders: Orders) -> None:
    for number in range(2):
        orders.batch(number, normal(count=150))
    orders.compact()
    orders.batch(2, normal(3.0), code="b")
    assert not orders.look(SameDistribution("value")).passed


def test_a_compaction_mixes_no_partitions(tmp_path: Path) -> None:
    orders = Orders.begin(tmp_path, Declared("orders", partition_by=["place"]))
    for number, code in enumerate("aabb"):
        orders.batch(number, [row(number, place=code)], code=code)
    orders.compact()
    assert sorted(codes_of(orders)) == [["a"], ["b"]]


def test_with_a_short_log_files_are_told_by_the_times_of_the_ledger(orders: Orders) -> None:
    orders.batch(0, normal(count=10), code="z")
    for number in range(1, 5):
        time.sleep(0.01)
        orders.batch(number, normal(3.0 * (number > 2), 200), code="a" if number < 3 else "b")
    orders.shorten()
    time.sleep(0.01)
    orders.batch(5, normal(3.0), code="b")
    checked = orders.checked()
    codes = [sorted(code.hash for code in file.codes) for file in live_files(checked)]
    assert codes == [["b"], ["b"], ["b"], ["a"], ["a"], []]  # before the first line, an older code may have written
    outcome = SameDistribution("value").look(checked)
    assert not outcome.passed and "700 rows of code b and 400 of a" in outcome.observed


def test_a_compaction_at_the_change_of_the_code_is_not_taken_for_the_new_code(orders: Orders) -> None:
    """The first batch of the new code was committed after it; nothing but the number of rows tells them apart."""
    for number in range(3):
        orders.batch(number, normal(count=20))
        time.sleep(0.01)
    orders.compact()
    time.sleep(0.01)
    orders.batch(3, normal(count=20), code="b")
    time.sleep(0.01)
    orders.batch(4, normal(count=20), code="b")
    orders.shorten()
    assert codes_of(orders) == [["b"], ["a", "b"], ["a", "b"]]


def test_a_compaction_in_the_time_of_the_newest_code_is_of_no_known_code(orders: Orders) -> None:
    for number, code in enumerate("zabb"):
        orders.batch(number, normal(count=20), code=code)
        time.sleep(0.01)
    orders.compact()
    time.sleep(0.01)
    orders.batch(4, normal(count=30), code="b")
    time.sleep(0.01)
    orders.batch(5, normal(count=20), code="b")
    orders.shorten()
    assert codes_of(orders) == [["b"], [], []]


def test_a_partition_column_and_a_column_that_came_later_are_read(tmp_path: Path) -> None:
    orders = Orders.begin(tmp_path, Declared("orders", partition_by=["place"]))
    orders.batch(0, normal(), code="a")
    orders.batch(1, normal(1.0), code="b")
    assert not orders.look(SameDistribution("place")).passed

    later = Orders.begin(tmp_path / "later")
    later.batch(0, normal())
    DeltaTable(later.path).alter.add_columns([Field("extra", PrimitiveType("double"))])
    later.batch(1, normal(), code="b")
    outcome = later.look(SameDistribution("extra"))
    assert outcome.passed and outcome.number == 0 and outcome.rows == ROWS, outcome


def test_no_more_rows_are_read_than_allowed(tmp_path: Path) -> None:
    orders = two_codes(tmp_path, normal(), normal())
    outcome = orders.look(SameDistribution("value", at_most=200))
    assert "200 rows of code b and 200 of a" in outcome.observed


def test_an_upsert_and_files_that_are_gone_cannot_be_compared(tmp_path: Path) -> None:
    orders = two_codes(tmp_path, normal(), normal())
    outcome = orders.look(SameDistribution("value"), declared=Declared("orders", keys=["id"]))
    assert not outcome.passed and "is an upsert" in outcome.error
    checked = orders.checked()
    for file in orders.path.glob("*.parquet"):
        file.unlink()
    assert "is gone" in SameDistribution("value").look(checked).error
