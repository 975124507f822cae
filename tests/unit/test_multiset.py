"""Rows are compared as they are: how often each is there, whatever their order, values by what they mean."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from streaming_jobs.proof.multiset import Difference, compare


def table(*rows: Any) -> pa.Table:
    return pa.Table.from_pylist([{"k": key, "v": value} for key, value in rows])


def words(expected: pa.Table, found: pa.Table, tolerance: float = 0.0, keys: tuple[str, ...] = ()) -> str:
    return "; ".join(compare(expected, found, tolerance).words(keys))


@pytest.mark.parametrize(
    "value",
    [float("nan"), None, Decimal("1.10"), "\u2028", b"\xff", [1, None, 2], {"a": [1.5], "b": None}, -0.0],
    ids=repr,
)
def test_equal_rows_are_no_difference_whatever_they_hold(value: Any) -> None:
    one = pa.table({"k": ["a", "b"], "v": pa.array([value, value])})
    assert not compare(one, one.take([1, 0]))


def test_a_row_that_is_there_once_too_often_or_too_seldom_is_told() -> None:
    found = words(table(("a", 1), ("a", 1), ("b", 2)), table(("a", 1), ("b", 2), ("b", 2)))
    assert found == "1 rows missing, first k=a v=1; 1 rows not expected, first k=b v=2"


def test_zero_and_minus_zero_are_equal_and_null_is_no_zero() -> None:
    assert not compare(table(("a", 0.0)), table(("a", -0.0)))
    assert compare(table(("a", 0.0), ("b", 1.0)), table(("a", None), ("b", 1.0)))


def test_floats_may_differ_by_the_tolerance_and_by_no_more() -> None:
    near, far = 1000.0 * (1 + 1e-12), 1000.0 * (1 + 1e-6)
    assert not compare(table(("a", 1000.0)), table(("a", near)), 1e-9)
    assert compare(table(("a", 1000.0)), table(("a", near)))
    assert compare(table(("a", 1000.0)), table(("a", far)), 1e-9)
    assert compare(table(("a", 1000.0)), table(("b", near)), 1e-9), "and nothing but floats"


def test_rows_of_one_key_are_told_by_what_differs() -> None:
    found = words(table(("a", 1), ("b", 2)), table(("a", 1), ("b", 3)), keys=("k",))
    assert found == "1 row differs, first k=b: v is 3 instead of 2"


def test_no_difference_is_falsy_and_has_no_words() -> None:
    assert not Difference(("k",), {}, {}) and Difference(("k",), {}, {}).words() == []
