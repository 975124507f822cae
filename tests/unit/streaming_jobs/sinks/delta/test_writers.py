"""The ways rows travel into a table: appended or merged by the driver, one row per key, or in files of executors.

Those files are described to the table without reading rows, and never described wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from threading import Barrier
from typing import Any

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import LongType, StringType, StructField, StructType

from streaming_jobs.errors import Fenced, LedgerConflict, OutputMismatch
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.sinks.base import PendingWrite
from streaming_jobs.sinks.delta.log import newest
from streaming_jobs.sinks.delta.parquet import add_actions, partition_folder, statistics
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


def stats(folder: Path, **columns: Any) -> dict[str, Any]:
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=2)
    return statistics(folder / "a.parquet", pq.read_metadata(folder / "a.parquet"), list(columns))


def test_records_nulls_and_bounds_are_counted_over_all_row_groups_and_nulls_alone_have_no_bounds(
    tmp_path: Path,
) -> None:
    days = [date(2024, 2, 29), None, None, None, date(1, 1, 1)]
    assert stats(tmp_path, n=[5, None, -3, 8, None], d=days, none=pa.nulls(5, pa.int64())) == {
        "numRecords": 5,
        "minValues": {"n": -3, "d": "0001-01-01"},
        "maxValues": {"n": 8, "d": "2024-02-29"},
        "nullCount": {"n": 2, "d": 3, "none": 5},
    }


@pytest.mark.parametrize(
    ("at", "low", "high"),
    [
        ("2024-01-01T05:00:00.123456", "2024-01-01T05:00:00.123", "2024-01-01T05:00:00.124"),
        ("2024-01-01T05:00:00.123", "2024-01-01T05:00:00.123", "2024-01-01T05:00:00.123"),
        ("2024-12-31T23:59:59.999999", "2024-12-31T23:59:59.999", "2025-01-01T00:00:00.000"),
        ("0001-01-01T00:00:00.000001", "0001-01-01T00:00:00.000", "0001-01-01T00:00:00.001"),
        ("0999-05-05T05:00:00", "0999-05-05T05:00:00.000", "0999-05-05T05:00:00.000"),
        ("9999-12-31T23:59:59.999999", "9999-12-31T23:59:59.999", "9999-12-31T23:59:59.999"),
    ],
)
def test_times_are_widened_to_whole_milliseconds_within_the_calendar(
    tmp_path: Path, at: str, low: str, high: str
) -> None:
    zoned = datetime.fromisoformat(at).replace(tzinfo=UTC)
    described = stats(tmp_path, t=pa.array([zoned], pa.timestamp("us", "UTC")))
    assert (described["minValues"]["t"], described["maxValues"]["t"]) == (f"{low}Z", f"{high}Z")
    described = stats(tmp_path, t=pa.array([datetime.fromisoformat(at)], pa.timestamp("us")))
    assert (described["minValues"]["t"], described["maxValues"]["t"]) == (low, high)


def test_a_day_that_sparks_calendar_lacks_is_between_its_neighbours(tmp_path: Path) -> None:
    at = datetime(1582, 10, 10, 12, tzinfo=UTC)
    described = stats(tmp_path, d=[at.date()], t=pa.array([at], pa.timestamp("us", "UTC")))
    assert described["minValues"] == {"d": "1582-10-04", "t": "1582-10-04T00:00:00.000Z"}
    assert described["maxValues"] == {"d": "1582-10-15", "t": "1582-10-15T00:00:00.000Z"}


def test_a_footer_without_statistics_is_made_up_for_by_the_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [4, None, 2]}), tmp_path / "a.parquet", write_statistics=False)
    described = statistics(tmp_path / "a.parquet", pq.read_metadata(tmp_path / "a.parquet"), ["n"])
    assert (described["nullCount"], described["minValues"], described["maxValues"]) == ({"n": 1}, {"n": 2}, {"n": 4})


@settings(max_examples=40)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.none(), min_size=1, max_size=9))
def test_no_value_lies_outside_its_bounds(tmp_path_factory: pytest.TempPathFactory, values: list[int | None]) -> None:
    described = stats(tmp_path_factory.mktemp("bounds"), n=pa.array(values, pa.int64()))
    there = [v for v in values if v is not None]
    assert described["nullCount"]["n"] == len(values) - len(there)
    if there:
        assert (described["minValues"]["n"], described["maxValues"]["n"]) == (min(there), max(there))


def test_each_file_is_named_from_the_table_and_counted_and_one_that_is_not_seen_counts_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "g0001" / "b000000007-1a2b"
    folder.mkdir(parents=True)
    for name, count in (("part-0.parquet", 2), ("part-1.parquet", 3)):
        pq.write_table(pa.table({"n": pa.array(range(count), pa.int64())}), folder / name)
    names = [f"g0001/b000000007-1a2b/part-{i}.parquet" for i in (0, 1, 2)]
    actions, rows = add_actions(tmp_path, names, [], [])
    assert rows == 5 and [a.path for a in actions] == names[:2]
    assert [a.size for a in actions] == [(folder / f"part-{i}.parquet").stat().st_size for i in (0, 1)]
    assert all(a.data_change for a in actions)


def test_footers_of_many_files_are_read_at_the_same_time_and_stay_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"part-{i}.parquet" for i in range(3)]
    for count, name in enumerate(names, 1):
        pq.write_table(pa.table({"n": pa.array(range(count), pa.int64())}), tmp_path / name)
    all_wait, read = Barrier(len(names)), pq.read_metadata

    def read_metadata(file: Path) -> pq.FileMetaData:
        all_wait.wait(10)
        return read(file)

    monkeypatch.setattr(pq, "read_metadata", read_metadata)
    actions, rows = add_actions(tmp_path, reversed(names), [], ["n"])
    assert rows == 6 and [a.path for a in actions] == names
    assert [json.loads(a.stats)["numRecords"] for a in actions] == [1, 2, 3]


@pytest.mark.parametrize("value", [None, "", "2024-01-01", *AWKWARD])
def test_partition_values_are_read_off_the_folders_that_are_named_after_them(tmp_path: Path, value: str | None) -> None:
    name = f"x=1/b0/{partition_folder({'my day': value, 'k': 'a'})}/part-0.parquet"
    (tmp_path / name).parent.mkdir(parents=True)
    pq.write_table(pa.table({"n": [1]}), tmp_path / name)
    (action,), _ = add_actions(tmp_path, [name], ["k", "my day"], [])
    assert action.partition_values == {"k": "a", "my day": value or None}


def test_partition_folders_are_named_as_spark_names_them_and_only_bounded_columns_are_described(tmp_path: Path) -> None:
    assert partition_folder({"my day": "a b", "k": None}) == "my day=a b/k=__HIVE_DEFAULT_PARTITION__"
    assert partition_folder({"k:": "50%\n"}) == "k%3A=50%25%0A"
    table = pa.table({"n": [1], "a.b": [2], "s": [{"n": 3}], "a": [{"b": 4}], "text": ["x"]})
    pq.write_table(table, tmp_path / "a.parquet")
    described = statistics(tmp_path / "a.parquet", pq.read_metadata(tmp_path / "a.parquet"), ["n", "a.b"])
    assert described["minValues"] == described["maxValues"] == {"n": 1, "a.b": 2}
