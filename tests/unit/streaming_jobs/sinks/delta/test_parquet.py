"""Files that executors wrote are described to the table without reading rows, and never described wrongly."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming_jobs.sinks.delta.parquet import add_actions, partition_folder, statistics
from tests.support.delta_table import AWKWARD


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
