"""The ways rows travel into a table: appended or merged by the driver, one row per key, or in files of executors."""

from __future__ import annotations

from collections.abc import Mapping

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.errors import Fenced, LedgerConflict, OutputMismatch
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.sinks.base import PendingWrite
from streaming_jobs.sinks.delta.log import newest
from streaming_jobs.sinks.delta.parquet import add_actions, partition_folder
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend, ArrowMerge, CommittedBefore, ParquetAppend
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.upsert_order import DELETE_COLUMN, last_per_key, split_null_keys
from tests.support.delta_table import AWKWARD, ROWS, Make, files_below, rows_in
from tests.support.worlds import STREAM, entry


def test_rows_that_an_earlier_attempt_committed_are_not_written_again(make: Make) -> None:
    sink = make()
    ArrowAppend(sink, ROWS).commit(entry(0))
    version = sink.handle.version()
    CommittedBefore(sink, 2).commit(entry(0))
    assert (sink.handle.version(), rows_in(sink)) == (version, ROWS.to_pylist())
    with pytest.raises(LedgerConflict, match=r"had g0001 batch 1 .* is at g0001 batch 0"):
        CommittedBefore(sink, 2).commit(entry(1))
    sink.commit(entry(-1, kind="fence", generation=2), lambda *_: None)
    with pytest.raises(Fenced):
        CommittedBefore(sink, 2).commit(entry(0))


def upsert(sink: DeltaSink, batch: int, rows: pa.Table) -> int | None:
    return ArrowMerge(sink, last_per_key(rows, sink.declared.keys, [])).commit(entry(batch))


def test_an_upsert_has_one_row_a_key_and_repeated_it_changes_nothing(make: Make) -> None:
    sink = make(keys=["k"])
    upsert(sink, 0, ROWS)
    upsert(sink, 1, pa.table({"k": ["y", "z"], "n": [20, 30]}))
    assert upsert(sink, 0, ROWS) is None
    assert rows_in(sink) == [{"k": "x", "n": 1}, {"k": "y", "n": 20}, {"k": "z", "n": 30}]


def test_an_upsert_deletes_the_keys_that_are_marked_and_inserts_none_of_them(make: Make) -> None:
    sink = make(keys=["k"], delete_when="n IS NULL")
    upsert(sink, 0, ROWS)
    marked = pa.table({"k": ["x", "q", "y"], "n": [None, None, 5], DELETE_COLUMN: [True, True, False]})
    upsert(sink, 1, marked)
    assert rows_in(sink) == [{"k": "y", "n": 5}]


def test_a_merge_without_effect_or_rows_still_records_the_batch(make: Make) -> None:
    sink = make(keys=["k"])
    upsert(sink, 0, ROWS)
    marked = pa.table({"k": ["nobody"], "n": [0], DELETE_COLUMN: [True]})
    for batch, rows in enumerate((marked, ROWS.slice(0, 0)), 1):
        assert upsert(sink, batch, rows) is not None
        commit, foreign = newest(sink.path, STREAM)
        assert commit is not None and commit.entry is not None and not commit.changes_data and foreign == []
        assert commit.entry.txn == Txn(1, batch) == sink.position
    assert rows_in(sink) == ROWS.to_pylist()


@pytest.mark.parametrize("key", ["k", "a b", "Käse", "order", "a.b"])
def test_any_column_name_can_be_the_key_of_an_upsert(make: Make, key: str) -> None:
    sink = make(StructType([StructField(key, StringType()), StructField("n", LongType())]), keys=[key])
    for batch, number in enumerate((1, 2)):
        upsert(sink, batch, pa.table({key: ["x"], "n": [number]}))
    assert rows_in(sink) == [{key: "x", "n": 2}]


def staged_files(sink: DeltaSink, values: Mapping[str | None, int]) -> list[str]:
    """Files below the table as executors leave them, one per value of `k`."""
    folder = sink.path / "g0001" / "b000000000-1a2b3c4d"
    for value, number in values.items():
        part = folder / partition_folder({"k": value})
        part.mkdir(parents=True)
        pq.write_table(pa.table({"n": [number]}), part / "part-00000-7d.snappy.parquet")
    return files_below(sink.path, folder)


@pytest.mark.parametrize("by", ["executors", "driver"])
def test_partition_values_of_any_kind_come_back_and_are_committed_once(make: Make, by: str) -> None:
    sink = make(partition_by=["k"])
    values = {value: number for number, value in enumerate((*AWKWARD, None))}
    if by == "executors":
        actions, count = add_actions(sink.path, staged_files(sink, values), ["k"], sink.bounded)
        staged: PendingWrite = ParquetAppend(sink, actions, count)
    else:
        staged = ArrowAppend(sink, pa.table({"k": pa.array(list(values), pa.string()), "n": list(values.values())}))
    assert (staged.commit(entry(0)), staged.commit(entry(0))) == (1, None)
    assert {row["k"]: row["n"] for row in rows_in(sink)} == values


def test_a_reader_skips_files_by_the_statistics_of_executors_and_misses_nothing(make: Make) -> None:
    sink = make(partition_by=["k"])
    actions, _ = add_actions(sink.path, staged_files(sink, {"a": 1, "b": 2, "c": 3}), ["k"], sink.bounded)
    sink.commit(entry(0), lambda _, properties: sink.commit_actions(list(actions), properties))
    rows = DeltaTable(sink.path).to_pyarrow_table(filters=[("n", "=", 2)])
    assert rows.to_pylist() == [{"k": "b", "n": 2}]


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


def test_unique_rows_without_null_keys_need_no_order_and_a_doubled_key_without_one_is_refused_and_named() -> None:
    rows = table(k=["a", ""], n=[None, 1])
    whole, null = split_null_keys(rows, ["k"])
    assert whole is rows and null.num_rows == 0
    assert last_per_key(rows, ["k"], []) is rows
    with pytest.raises(OutputMismatch, match="several rows for the key {'k': 'a'}") as refused:
        last_per_key(table(k=["b", "a", "a"], n=[1, 2, 3]), ["k"], [])
    assert "set order_by on the sink" in refused.value.next_step
