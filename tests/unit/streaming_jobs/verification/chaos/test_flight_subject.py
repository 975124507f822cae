"""The expected rows of the kill loop's streams, on a few flights by hand, and how a difference is reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from streaming_jobs.catalog.truths import Record
from streaming_jobs.verification.chaos import flight_subject
from streaming_jobs.verification.chaos.flight_streams import long_flights, short_flights
from streaming_jobs.verification.chaos.flight_subject import EXPECTED, RuleCheck, compare_rules, judged, newest
from tests.support.proofs import entry, properties

FLIGHTS = [
    # flight, dep_delay, arr_delay, air_time, distance
    (1, 0, 2, 100, 400),
    (2, 15, 2, 250, 2000),  # warned: more than four hours in the air
    (3, 16, 2, 100, 500),  # dropped
    (4, 16, None, None, 399),  # set aside, also as late and as not arrived
    (5, None, None, None, 2001),  # cancelled and far
    (6, None, None, None, 500),
    (1, 3, None, None, 400),  # warned: departed and not arrived
    (1, 6, 7, 100, 500),  # of the upsert: too late to replace the flight 1 before it
]
JUDGED = {"dep_delay_not_null": 2, "distance_between": 2, "dep_delay_between": 2, "air_time_between": 1, "arrived": 2}


@pytest.fixture
def flights(monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    """The flights above as one partition of a topic."""
    frame = pd.DataFrame(FLIGHTS, columns=["flight", "dep_delay", "arr_delay", "air_time", "distance"], dtype="Int64")
    frame = frame.astype({"flight": "int64", "distance": "int64"})
    placed = frame.assign(carrier="UA", source_partition=0, source_offset=range(len(frame)))
    monkeypatch.setattr(flight_subject, "truth", lambda *_, **__: placed)
    return placed


def test_of_several_broken_rules_the_strictest_decides_and_a_row_set_aside_replaces_no_other(
    flights: pd.DataFrame,
) -> None:
    expected = judged(flights)
    assert expected.table["source_offset"].tolist() == [0, 1, 6, 7]
    assert dict(zip(expected.quarantine["source_offset"], expected.quarantine["_rules"], strict=True)) == {
        3: "distance_between",
        4: "dep_delay_not_null distance_between",
        5: "dep_delay_not_null",
    }
    assert (expected.good, expected.dropped, expected.broken) == (4, 1, JUDGED)
    expected = newest(flights)
    assert sorted(expected.table["source_offset"]) == [4, 5, 6]
    assert expected.quarantine["source_offset"].tolist() == [1, 2, 3, 7]
    assert (expected.good, expected.dropped, expected.broken) == (4, 0, {"dep_delay_between": 4})


def write(path: Path, content: pd.DataFrame, **counts: Any) -> None:
    """A table with one batch, whose entry has these counts."""
    if "_rules" in content:
        content = content.assign(_rules=content["_rules"].str.split(" "))
    value = {**entry(path.name, 0, len(content)), **counts}
    table = pa.Table.from_pandas(content, preserve_index=False)
    write_deltalake(path, table, mode="append", commit_properties=properties(value))


@pytest.fixture
def tables(tmp_path: Path, flights: pd.DataFrame) -> Path:
    """The tables of both streams as they should be."""
    for stream, computed in EXPECTED.items():
        expected = computed(flights)
        rows = {"written": 4, f"quarantined:{stream}": len(expected.quarantine), f"dropped:{stream}": expected.dropped}
        write(tmp_path / f"{stream}_quarantine", expected.quarantine)
        write(tmp_path / stream, expected.table, rows=rows, rules={stream: expected.broken})
    return tmp_path


def test_rows_and_numbers_as_expected_are_right_and_the_sum_is_told(tables: Path) -> None:
    first, second = (compare_rules(tables, stream, len(FLIGHTS)) for stream in EXPECTED)
    assert (first.differences, second.differences) == ((), ()) and first.ok and second.ok
    assert str(first) == "8 records = 4 good + 3 quarantined + 1 dropped"
    assert str(second) == "8 records = 4 good + 4 quarantined + 0 dropped"


def doubled(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([rows, rows[:1]])


def without_first(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[1:]


@pytest.mark.parametrize(
    ("change", "says"), [(doubled, "1 rows twice or more, first 0 3"), (without_first, "1 rows missing, first 0 3")]
)
def test_a_quarantine_written_twice_or_not_at_all_is_told(
    tables: Path, flights: pd.DataFrame, change: Callable[[pd.DataFrame], pd.DataFrame], says: str
) -> None:
    quarantine = tables / "flights_judged_quarantine"
    DeltaTable(quarantine).delete()
    write(quarantine, change(judged(flights).quarantine))
    check = compare_rules(tables, "flights_judged", len(FLIGHTS))
    assert not check.ok and check.differences == (f"flights_judged_quarantine: {says}",)


@pytest.mark.parametrize(
    ("rows", "rules", "says"),
    [
        ({"dropped:flights_judged": 1}, {}, ["count 2 of dropped:flights_judged, expected are 1"]),
        ({"dead_letters": 2}, {}, ["count 2 of dead_letters, expected are 0"]),
        ({}, {"arrived": 1}, ["count 3 of arrived, expected are 2"]),
    ],
)
def test_other_numbers_of_the_entries_are_told(
    tables: Path, rows: dict[str, int], rules: dict[str, int], says: Sequence[str]
) -> None:
    value = {**entry("flights_judged", 1, 0), "rows": rows, "rules": {"flights_judged": rules}}
    path = tables / "flights_judged"
    none = DeltaTable(path).to_pyarrow_table().slice(0, 0)
    write_deltalake(path, none, mode="append", commit_properties=properties(value))
    check = compare_rules(tables, "flights_judged", len(FLIGHTS))
    assert not check.ok and list(check.differences) == [f"the entries of flights_judged {text}" for text in says]


def test_a_table_that_is_missing_and_records_that_are_not_accounted_for_are_told(
    tmp_path: Path, flights: pd.DataFrame
) -> None:
    check = compare_rules(tmp_path, "flights_newest", len(FLIGHTS))
    assert "flights_newest: the table does not exist, expected are 3 rows" in check.differences
    assert not RuleCheck("flights_newest", 9, 5, 3, 0, ()).ok


def record(offset: int, distance: int) -> Record:
    value = {"carrier": "UA", "flight": offset, "distance": distance}
    return Record("flights", 2, offset, 0, b"UA", json.dumps(value).encode(), json.loads)


def test_each_flight_is_due_in_the_table_that_its_distance_demands_with_its_place() -> None:
    records = [record(4, 999), record(5, 1000), record(6, 2000)]
    short = {"carrier": "UA", "flight": 4, "source_partition": 2, "source_offset": 4}
    assert short_flights(records) == [short]
    assert [row["source_offset"] for row in long_flights(records)] == [5, 6]
