"""Rows of an upsert: none without a key, one per key, and the one that is last."""

from __future__ import annotations

import hypothesis
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming_jobs.errors import OutputMismatch
from streaming_jobs.sinks.delta.upsert_order import last_per_key, split_null_keys

SCHEMA = pa.schema([("k", pa.string()), ("j", pa.int64()), ("at", pa.int64()), ("n", pa.int64())])
row = st.fixed_dictionaries(
    {
        "k": st.sampled_from(["a", "b", "ö", ""]) | st.none(),
        "j": st.integers(0, 2) | st.none(),
        "at": st.integers(-5, 5) | st.none(),
        "n": st.integers(0, 100),
    }
)
batches = st.lists(row, max_size=30).map(lambda rows: pa.Table.from_pylist(rows, SCHEMA))


def table(**columns: list[object]) -> pa.Table:
    return pa.table(columns)


@hypothesis.settings(max_examples=40)
@given(batches)
def test_no_row_is_lost_between_those_with_a_key_and_those_without(rows: pa.Table) -> None:
    whole, null = split_null_keys(rows, ["k", "j"])
    assert sorted(map(repr, whole.to_pylist() + null.to_pylist())) == sorted(map(repr, rows.to_pylist()))
    assert all(r["k"] is not None and r["j"] is not None for r in whole.to_pylist())
    assert all(r["k"] is None or r["j"] is None for r in null.to_pylist())


@hypothesis.settings(max_examples=40)
@given(batches)
def test_of_each_key_the_row_with_the_greatest_order_stays(rows: pa.Table) -> None:
    whole, _ = split_null_keys(rows, ["k", "j"])
    last = last_per_key(whole, ["k", "j"], ["at", "n"])

    def order(r: dict[str, int | None]) -> tuple[int, int]:
        return (-100 if r["at"] is None else r["at"], r["n"] or 0)

    expected = {}
    for r in sorted(whole.to_pylist(), key=order):
        expected[r["k"], r["j"]] = r
    assert {(r["k"], r["j"]): r for r in last.to_pylist()} == expected
    assert last.num_rows == len(expected)
    assert last.column_names == rows.column_names


def test_rows_without_null_keys_and_unique_ones_are_passed_on_as_they_are_and_need_no_order() -> None:
    rows = table(k=["a", ""], n=[None, 1])
    whole, null = split_null_keys(rows, ["k"])
    assert whole is rows and null.num_rows == 0
    assert last_per_key(rows, ["k"], []) is rows


def test_a_doubled_key_without_an_order_is_refused_and_named() -> None:
    with pytest.raises(OutputMismatch, match="several rows for the key {'k': 'a'}") as refused:
        last_per_key(table(k=["b", "a", "a"], n=[1, 2, 3]), ["k"], [])
    assert "set order_by on the sink" in refused.value.next_step
