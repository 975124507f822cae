"""The comparison with the truth, and the shipped truths: equal tables pass, and every kind of difference is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from streaming_jobs.catalog.topology import Topology, truths_in
from streaming_jobs.catalog.truths import NotComparable, Record
from streaming_jobs.errors import UsageError
from streaming_jobs.examples.flights import dataset
from streaming_jobs.examples.flights import truth as truths
from streaming_jobs.examples.flights.content import rank
from streaming_jobs.examples.flights.streams import STREAMS
from streaming_jobs.examples.flights.truth import TruthCheck, as_frame, compare, differences, truth, watermark
from streaming_jobs.settings import Settings

pytestmark = pytest.mark.slow

SHARE = 0.05
LATENESS = timedelta(days=10)

Change = Callable[[pd.DataFrame], pd.DataFrame]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


def write(settings: Settings, table: str, rows: pd.DataFrame) -> None:
    arrow = pa.Table.from_pandas(rows, preserve_index=False)
    write_deltalake(str(settings.tables / table), arrow, mode="overwrite", schema_mode="overwrite")


def write_all(settings: Settings) -> None:
    hours = truth("airport_hours", SHARE)
    write(settings, "flights_clean", truth("flights_clean", SHARE))
    write(settings, "airport_hours", hours[hours["window_end"] <= watermark(SHARE, LATENESS)])
    write(settings, "carrier_totals", truth("carrier_totals", SHARE))


def check_of(checks: list[TruthCheck], table: str) -> TruthCheck:
    return next(check for check in checks if check.table == table)


def test_truth_has_every_flight_once() -> None:
    clean, hours, totals = (truth(table, SHARE) for table in truths.KEYS)
    assert len(clean) == hours["flights"].sum() == totals["flights"].sum() == dataset.flights_in(SHARE)
    assert clean["cancelled"].sum() == hours["cancelled"].sum() == totals["cancelled"].sum() > 0
    assert clean["dep_delay"].sum() == totals["dep_delay_minutes"].sum()
    assert not any(
        frame.duplicated(list(truths.KEYS[name])).any()
        for name, frame in (("flights_clean", clean), ("airport_hours", hours), ("carrier_totals", totals))
    )


def test_truth_agrees_with_the_records_though_worked_out_apart() -> None:
    clean = truth("flights_clean", SHARE)
    assert clean["source_partition"].tolist() == dataset.partitions(4)[: len(clean)].tolist()
    flights = dataset.departures(SHARE)
    for column in ("sched_dep", "actual_dep", "carrier", "flight", "origin", "dest", "distance", "cancelled"):
        same = clean[column] == flights[column]
        assert (same | (clean[column].isna() & flights[column].isna())).all(), column


def test_tables_that_hold_the_truth_pass(settings: Settings) -> None:
    write_all(settings)
    checks = compare(settings, STREAMS, SHARE)
    assert [(check.table, check.ok) for check in checks] == [(table, True) for table in truths.KEYS]
    assert all(check.expected_rows == check.found_rows > 0 for check in checks)


def test_windows_that_are_open_are_listed_and_a_difference_in_the_table(settings: Settings) -> None:
    write_all(settings)
    hours = check_of(compare(settings, STREAMS, SHARE), "airport_hours")
    still_open = len(truth("airport_hours", SHARE)) - hours.expected_rows
    assert still_open > 0
    assert f"{still_open:,} windows" in hours.detail
    assert "still open" in hours.detail
    write(settings, "airport_hours", truth("airport_hours", SHARE))
    hours = check_of(compare(settings, STREAMS, SHARE), "airport_hours")
    assert not hours.ok
    assert "rows not expected" in hours.detail


def test_lateness_from_the_settings_moves_what_is_closed(tmp_path: Path) -> None:
    declared = Settings(home=tmp_path)
    longer = Settings(home=tmp_path, streams={"airport_hours": {"lateness": "12 days"}})
    write_all(declared)
    assert check_of(compare(declared, STREAMS, SHARE), "airport_hours").ok
    assert not check_of(compare(longer, STREAMS, SHARE), "airport_hours").ok


def put(frame: pd.DataFrame, column: str, value: Any) -> pd.DataFrame:
    changed = frame.copy()
    changed.loc[changed.index[7], column] = value
    return changed


@pytest.mark.parametrize(
    ("table", "change", "words"),
    [
        ("flights_clean", lambda rows: rows.iloc[1:], "1 rows missing"),
        ("flights_clean", lambda rows: pd.concat([rows, rows.iloc[[5]]]), "1 rows twice or more"),
        ("flights_clean", lambda rows: put(rows, "dep_delay", 9_999), "1 row with another dep_delay"),
        ("flights_clean", lambda rows: put(rows, "dep_delay", pd.NA), "1 row with another dep_delay"),
        ("flights_clean", lambda rows: put(rows, "source_offset", 1_000_000), "1 row with another source_offset"),
        ("flights_clean", lambda rows: put(rows, "month", "2013-02"), "1 row with another month"),
        ("flights_clean", lambda rows: rows.drop(columns="tailnum"), "columns are"),
        ("airport_hours", lambda rows: put(rows, "flights", 0), "1 row with another flights"),
        ("airport_hours", lambda rows: put(rows, "mean_dep_delay", 0.123), "1 row with another mean_dep_delay"),
        ("carrier_totals", lambda rows: put(rows, "dep_delay_minutes", 1), "1 row with another dep_delay_minutes"),
        ("carrier_totals", lambda rows: put(rows, "carrier", "ZZ"), "1 rows not expected, first ZZ"),
    ],
)
def test_a_difference_is_found_and_said_in_words(settings: Settings, table: str, change: Change, words: str) -> None:
    write_all(settings)
    rows = truths._read(settings, table)
    assert rows is not None
    write(settings, table, change(rows))
    checks = compare(settings, STREAMS, SHARE)
    assert [check.table for check in checks if not check.ok] == [table]
    assert words in check_of(checks, table).detail


def test_a_missing_table_is_named_and_an_unknown_one_refused(settings: Settings) -> None:
    checks = compare(settings, STREAMS, SHARE)
    assert [(check.ok, check.detail) for check in checks] == [(False, "the table does not exist yet")] * 3
    with pytest.raises(UsageError, match="no truth"):
        truth("nothing")


def test_dead_letters_and_late_rows_that_the_watermark_dropped_are_differences(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(settings)
    write(settings, "airport_hours_dead_letters", pd.DataFrame({"reason": ["wrong_type"]}))
    letters = check_of(compare(settings, STREAMS, SHARE), "airport_hours_dead_letters")
    assert not letters.ok
    assert "not decoded: 1 record" in letters.detail
    status = SimpleNamespace(late_rows_dropped=3)
    monkeypatch.setattr(truths, "read_status", lambda _, name: status if name == "airport_hours" else None)
    hours = check_of(compare(settings, STREAMS, SHARE), "airport_hours")
    assert not hours.ok
    assert "dropped 3 late rows" in hours.detail


def test_a_topic_with_more_than_one_feed_is_not_comparable(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(settings)
    monkeypatch.setattr(truths, "_records_in_topic", lambda _: 2 * dataset.flights_in(SHARE))
    checks = compare(settings, STREAMS, SHARE)
    assert not any(check.ok for check in checks)
    assert all("not comparable" in check.detail for check in checks)


def test_numbers_are_compared_exactly_and_means_by_more_than_the_order_of_summing() -> None:
    expected = pd.DataFrame({"key": [1], "total": [2**53]})
    actual = pd.DataFrame({"key": [1], "total": pd.array([2**53 + 1], dtype="Int64")})
    assert differences(expected, actual, ["key"])
    frame = as_frame(pa.table({"total": pa.array([2**53 + 1, None], pa.int64())}))
    assert int(frame["total"][0]) == 2**53 + 1
    assert frame["total"].isna().tolist() == [False, True]
    expected = pd.DataFrame({"key": [1], "mean": [12.3]})
    assert not differences(expected, pd.DataFrame({"key": [1], "mean": [12.3 * (1 + 1e-12)]}), ["key"])
    assert differences(expected, pd.DataFrame({"key": [1], "mean": [12.3 * (1 + 1e-6)]}), ["key"])


COUNT = 3_000


def records(partitions: int, end: int = COUNT) -> list[Record]:
    """The first flights as they lie in a topic of so many partitions."""
    keys = dataset.keys_of(truths._all_flights())[:end]
    places = truths._partition(keys, partitions)
    ranks = rank(places).tolist()
    return [
        Record("flights", p, o, 0, key, b"", json.loads) for p, o, key in zip(places.tolist(), ranks, keys, strict=True)
    ]


def test_every_shipped_table_has_a_truth() -> None:
    topology = Topology.load(["streaming_jobs.examples.flights.streams"])
    tables = [sink.name for stream in topology.streams.values() for sink in stream.sinks.values()]
    assert (
        {declared.table for declared in truths_in(["streaming_jobs.examples.flights.streams"], tables)}
        == set(truths.KEYS)
        == set(tables)
    )


@pytest.mark.parametrize("partitions", [4, 7])
def test_of_one_feed_it_is_what_the_share_of_the_flights_makes(partitions: int) -> None:
    share = COUNT / dataset.TOTAL
    for table, keys in truths.KEYS.items():
        due = truths.truth(table, share, partitions=partitions)
        assert truths.differences(due, truths.truth_of(table, records(partitions)), keys) == []


def test_partitions_read_to_different_ends_are_no_matter_and_records_that_are_no_flights_are_not_compared() -> None:
    half = [record for record in records(4) if record.partition != 1 or record.offset < 5]
    assert truths.truth_of("carrier_totals", half)["flights"].sum() == len(half)
    first, *others = records(4)
    alien = Record("flights", first.partition, first.offset, 0, others[0].key, b"", json.loads)
    with pytest.raises(NotComparable):
        truths.truth_of("carrier_totals", [alien, *others])
