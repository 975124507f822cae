"""Files that executors wrote are described to the table without reading rows, and never described wrongly."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming_jobs.sinks.parquet import add_actions, statistics


def stats(folder: Path, **columns: Any) -> dict[str, Any]:
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=2)
    return statistics(pq.read_metadata(folder / "a.parquet"))


def test_records_nulls_and_bounds_are_counted_over_all_row_groups(tmp_path: Path) -> None:
    found = stats(tmp_path, n=[5, None, -3, 8, None], k=["b", "a", "ö", None, "c"])
    assert found == {
        "numRecords": 5,
        "minValues": {"n": -3, "k": "a"},
        "maxValues": {"n": 8, "k": "ö"},
        "nullCount": {"n": 2, "k": 1},
    }


def test_a_column_of_nulls_has_a_count_and_no_bounds(tmp_path: Path) -> None:
    found = stats(tmp_path, n=pa.array([None, None, None], pa.int64()))
    assert (found["nullCount"], found["minValues"], found["maxValues"]) == ({"n": 3}, {}, {})


def test_timestamps_are_widened_to_whole_milliseconds(tmp_path: Path) -> None:
    at = datetime(2024, 1, 1, 5, 0, 0, 123_456, tzinfo=UTC)
    found = stats(tmp_path, t=pa.array([at, at.replace(microsecond=999_999)], pa.timestamp("us", "UTC")))
    assert found["minValues"]["t"] == "2024-01-01T05:00:00.123Z"
    assert found["maxValues"]["t"] == "2024-01-01T05:00:01.000Z"


def test_a_whole_millisecond_stays_itself(tmp_path: Path) -> None:
    at = datetime(2024, 1, 1, 5, 0, 0, 123_000, tzinfo=UTC)
    found = stats(tmp_path, t=pa.array([at], pa.timestamp("us", "UTC")))
    assert found["minValues"]["t"] == found["maxValues"]["t"] == "2024-01-01T05:00:00.123Z"


def test_dates_decimals_and_booleans_have_bounds_as_delta_writes_them(tmp_path: Path) -> None:
    found = stats(tmp_path, d=[date(2024, 2, 29)], m=[Decimal("1.50")], b=[True])
    assert found["minValues"] == {"d": "2024-02-29", "m": 1.5, "b": True}


@pytest.mark.parametrize("text", ["12345678901234567.89", "-12345678901234567.89", "1180591620717411303424"])
def test_a_decimal_that_a_json_number_would_round_gets_no_bound(tmp_path: Path, text: str) -> None:
    found = stats(tmp_path, m=[Decimal(text)])
    assert (found["minValues"], found["maxValues"], found["nullCount"]) == ({}, {}, {"m": 0})


def test_an_everyday_price_keeps_its_bounds(tmp_path: Path) -> None:
    found = stats(tmp_path, m=[Decimal("1.10"), Decimal("99999.99")])
    assert (found["minValues"], found["maxValues"]) == ({"m": 1.1}, {"m": 99999.99})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_json_does_not_know_get_no_bound(tmp_path: Path, value: float) -> None:
    found = stats(tmp_path, f=[1.0, value])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert "f" not in found["maxValues"] or found["maxValues"]["f"] == 1.0


def test_long_text_bytes_and_nested_fields_get_no_bound(tmp_path: Path) -> None:
    found = stats(tmp_path, long=["x" * 33], raw=[b"\x00\xff"], s=[{"inner": 1}], short=["x" * 32])
    assert found["minValues"] == {"short": "x" * 32}


@settings(max_examples=40)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.none(), min_size=1, max_size=9))
def test_no_value_lies_outside_its_bounds(tmp_path_factory: pytest.TempPathFactory, values: list[int | None]) -> None:
    found = stats(tmp_path_factory.mktemp("bounds"), n=pa.array(values, pa.int64()))
    there = [v for v in values if v is not None]
    assert found["nullCount"]["n"] == len(values) - len(there)
    if there:
        assert (found["minValues"]["n"], found["maxValues"]["n"]) == (min(there), max(there))


def test_each_file_is_named_from_the_table_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / "table" / "g0001" / "b000000007-1a2b"
    folder.mkdir(parents=True)
    for name, count in (("part-0.parquet", 2), ("part-1.parquet", 3), ("part-2.parquet", 0)):
        pq.write_table(pa.table({"n": pa.array(range(count), pa.int64())}), folder / name)
    (folder / "_SUCCESS").touch()
    actions, rows = add_actions(tmp_path / "table", folder, [])
    assert rows == 5
    assert [a.path for a in actions] == [f"g0001/b000000007-1a2b/part-{i}.parquet" for i in (0, 1)]
    assert [a.size for a in actions] == [(folder / f"part-{i}.parquet").stat().st_size for i in (0, 1)]
    assert all(a.data_change for a in actions)


def test_a_folder_without_files_adds_nothing(tmp_path: Path) -> None:
    assert add_actions(tmp_path, tmp_path, ["k"]) == ([], 0)


def test_partition_values_are_read_off_the_folders_as_spark_names_them(tmp_path: Path) -> None:
    folder = tmp_path / "g0001" / "b0" / "my%20day=2024-01-01" / "k=__HIVE_DEFAULT_PARTITION__"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"n": [1]}), folder / "part-0.parquet")
    (action,), _ = add_actions(tmp_path, tmp_path / "g0001" / "b0", ["k", "my day"])
    assert action.partition_values == {"k": None, "my day": "2024-01-01"}


def test_a_folder_that_only_looks_like_a_partition_above_the_batch_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "x=1" / "b0"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"n": [1]}), folder / "part-0.parquet")
    (action,), _ = add_actions(tmp_path, folder, [])
    assert action.partition_values == {}
