"""Rows are compared as they are: how often each is there, whatever their order, values by what they mean."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from streaming_jobs.verification.truths import RowDifference, compare_rows


def table(*rows: Any) -> pa.Table:
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
    difference = words(table(("a", 1), ("a", 1), ("b", 2)), table(("a", 1), ("b", 2), ("b", 2)))
    assert difference == "1 rows missing, first k=a v=1; 1 rows not expected, first k=b v=2"
    difference = words(table(("a", 1), ("b", 2)), table(("a", 1), ("b", 3)), keys=("k",))
    assert difference == "1 row differs, first k=b: v is 3 instead of 2"
    assert not RowDifference(("k",), {}, {}) and RowDifference(("k",), {}, {}).words() == []


def test_floats_may_differ_by_the_tolerance_and_by_no_more_and_null_is_no_zero() -> None:
    assert not compare_rows(table(("a", 0.0)), table(("a", -0.0)))
    assert compare_rows(table(("a", 0.0), ("b", 1.0)), table(("a", None), ("b", 1.0)))
    near, far = 1000.0 * (1 + 1e-12), 1000.0 * (1 + 1e-6)
    assert not compare_rows(table(("a", 1000.0)), table(("a", near)), 1e-9)
    assert compare_rows(table(("a", 1000.0)), table(("a", near)))
    assert compare_rows(table(("a", 1000.0)), table(("a", far)), 1e-9)
    assert compare_rows(table(("a", 1000.0)), table(("b", near)), 1e-9), "and nothing but floats"


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
