"""The reader reads every version, sees what is not a whole batch, and says what it could not read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from streaming_jobs.verification.chaos.flight_subject import JUDGED, NEWEST, SHIPPED, SPLIT
from streaming_jobs.verification.chaos.version_reader import ConcurrentReader, TableReader, WatchedStream
from streaming_jobs.verification.delta_log import commit_file, versions
from tests.support.delta_table import shorten_log
from tests.support.proofs import (
    BATCHES,
    CLEAN,
    HOURS,
    SIZES,
    TOTALS,
    Spoiler,
    clean_rows,
    entry,
    hour_rows,
    make_split,
    make_tables,
    properties,
    write_judged,
    write_split,
)

pytestmark = pytest.mark.slow

Row = dict[str, Any]
SUBJECTS = {subject.table: subject for subject in SHIPPED}


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    return make_tables(tmp_path)


def reader(tables: Path, table: str) -> TableReader:
    made = TableReader(SUBJECTS[table], tables)
    made.advance()
    return made


def said(tables: Path, table: str) -> list[str]:
    return [str(fault) for fault in reader(tables, table).faults]


@pytest.mark.parametrize("table", [CLEAN, HOURS, TOTALS])
def test_every_version_is_read_and_is_whole(tables: Path, table: str) -> None:
    made = reader(tables, table)
    assert (made.seen, made.unseen, made.faults) == (BATCHES + 1, 0, [])


def test_versions_are_read_as_they_appear(tables: Path) -> None:
    made = reader(tables, CLEAN)
    assert not made.advance()
    rows = pa.Table.from_pylist(clean_rows(BATCHES), schema=DeltaTable(tables / CLEAN).to_pyarrow_table().schema)
    write_deltalake(
        tables / CLEAN, rows, mode="append", commit_properties=properties(entry(CLEAN, BATCHES, rows.num_rows))
    )
    assert made.advance()
    assert (made.seen, made.faults) == (BATCHES + 2, [])


def test_half_a_batch_is_seen_in_its_version_although_the_next_one_completes_it(tables: Path) -> None:
    schema = DeltaTable(tables / CLEAN).to_pyarrow_table().schema
    rows = clean_rows(BATCHES)
    for part, value in ((rows[:7], entry(CLEAN, BATCHES, 15)), (rows[7:], entry(CLEAN, BATCHES, 0, "upkeep"))):
        write_deltalake(
            tables / CLEAN,
            pa.Table.from_pylist(part, schema=schema),
            mode="append",
            commit_properties=properties(value),
        )
    whole, rest = said(tables, CLEAN)
    assert whole.startswith("flights_clean version 5: 8 offsets are covered by an entry and in no row")
    assert "after batch g0001 batch 4" in whole
    assert rest == "flights_clean version 6: changed rows (WRITE) under an entry of kind upkeep"


def test_a_version_that_was_wrong_only_for_a_while_is_told(tables: Path) -> None:
    table = DeltaTable(tables / TOTALS)
    right = table.to_pyarrow_table()
    wrong = right.set_column(1, "flights", pa.array([1, 2], pa.int64()))
    for rows in (wrong, right):
        write_deltalake(
            tables / TOTALS, rows, mode="overwrite", commit_properties=properties(entry(TOTALS, 9, 0, "upkeep"))
        )
    faults = said(tables, TOTALS)
    assert any("version 5: the sum of flights is 3" in text for text in faults)
    assert not any("version 6: the sum" in text for text in faults)


@pytest.mark.parametrize(
    ("table", "change", "says"),
    [
        (CLEAN, lambda rows: [*rows, rows[0]], ["1 offset is in more than one row: flights-0 30..30"]),
        (
            TOTALS,
            lambda rows: [{**rows[0], "flights": 41}, *rows[1:]],
            ["the sum of flights is 61, the entries cover"],
        ),
        (
            TOTALS,  # the sum is right
            lambda rows: [{**rows[0], "flights": 30}, {**rows[0], "flights": 10}, *rows[1:]],
            ["1 key is in more than one row, first C0"],
        ),
        (
            HOURS,
            lambda rows: [{**rows[0], "flights": 1000}],
            ["5 rows are there, the entries wrote 6", "more than the 60 records covered"],
        ),
    ],
    ids=["a row twice", "a wrong count", "a key twice", "windows gone and too large"],
)
def test_rows_that_are_not_those_of_the_batches_are_told(
    tables: Path, table: str, change: Callable[[list[Row]], list[Row]], says: list[str]
) -> None:
    Spoiler(tables / table).rows(change)
    faults = [text for text in said(tables, table) if f"version {BATCHES}:" in text]
    assert len(faults) >= len(says) and all(any(part in text for text in faults) for part in says), faults


def test_a_window_that_comes_twice_and_one_that_goes_again_are_told(tables: Path) -> None:
    schema = DeltaTable(tables / HOURS).to_pyarrow_table().schema

    def write(rows: list[dict[str, Any]], mode: Any, batch: int) -> None:
        write_deltalake(
            tables / HOURS,
            pa.Table.from_pylist(rows, schema=schema),
            mode=mode,
            commit_properties=properties(entry(HOURS, batch, len(rows))),
        )

    write(hour_rows(1), "append", BATCHES)
    write(hour_rows(2), "overwrite", BATCHES + 1)
    faults = said(tables, HOURS)
    assert any("version 5: 2 windows are in more than one row" in text for text in faults)
    assert any("version 6: gone or changed since the version before: 4 rows" in text for text in faults)


def test_a_compaction_changes_nothing_and_a_version_before_the_first_entry_of_a_cut_log_is_not_judged(
    tables: Path,
) -> None:
    DeltaTable(tables / CLEAN).optimize.compact(commit_properties=properties(entry(CLEAN, -1, 0, "upkeep")))
    made = reader(tables, CLEAN)
    assert (made.seen, made.faults) == (BATCHES + 2, [])
    shorten_log(tables / CLEAN)
    made = reader(tables, CLEAN)
    assert (made.unseen, made.unjudged, made.seen, made.faults) == (BATCHES + 1, 1, 0, [])


def test_a_lost_data_file_and_a_damaged_commit_are_told(tables: Path) -> None:
    newest = sorted(DeltaTable(tables / CLEAN).file_uris(), key=lambda uri: Path(uri).stat().st_mtime_ns)[-1]
    Path(newest).unlink()
    assert [text for text in said(tables, CLEAN) if "version 4" in text and "is missing" in text]
    commit_file(tables / TOTALS, 4).write_text('{"commitInfo": ')
    assert [text for text in said(tables, TOTALS) if "version 4: cannot be read" in text]


def test_versions_that_clean_up_took_are_counted_and_the_rest_is_judged_windows_too(tables: Path) -> None:
    shorten_log(tables / CLEAN, 2, at=3)
    made = reader(tables, CLEAN)
    assert (made.unseen, made.seen, made.faults) == (3, 2, [])
    Spoiler(tables / CLEAN).rows(lambda rows: rows[1:])
    assert "1 offset is covered by an entry and in no row" in said(tables, CLEAN)[0]
    shorten_log(tables / HOURS, 2, at=3)
    made = reader(tables, HOURS)
    assert (made.unseen, made.seen, made.faults) == (3, 2, [])


def test_a_version_that_comes_while_the_log_is_listed_is_not_taken_for_a_lost_one(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, aside = commit_file(tables / CLEAN, 2), tables / "aside"
    commit.rename(aside)

    def listed(table: Path) -> list[int]:
        there = versions(table)
        if aside.exists():
            aside.rename(commit)
        return there

    monkeypatch.setattr("streaming_jobs.verification.chaos.version_reader.versions", listed)
    made = reader(tables, CLEAN)
    assert (made.unseen, made.seen, made.faults) == (0, BATCHES + 1, [])


def test_dead_letters_are_not_missed_in_the_table(tables: Path) -> None:
    def counted(value: dict[str, Any]) -> dict[str, Any]:
        return {**value, "rows": {"written": 14, "dead_letters": 1}}

    Spoiler(tables / CLEAN).rows(lambda rows: rows[1:])
    Spoiler(tables / CLEAN).entry(BATCHES, counted)
    letter = pa.table({"partition": pa.array([0], pa.int32()), "offset": pa.array([30], pa.int64())})
    write_deltalake(tables / f"{CLEAN}_dead_letters", letter)
    assert said(tables, CLEAN) == []


def test_the_second_table_of_a_stream_may_be_ahead_and_never_behind(tmp_path: Path) -> None:
    tables = make_split(tmp_path)
    write_split(tables, BATCHES, "flights_long")
    made = TableReader(SPLIT, tables)
    made.advance()
    assert (made.seen, made.faults) == (BATCHES + 1, [])
    write_split(tables, BATCHES, SPLIT.table)
    write_split(tables, BATCHES + 1, SPLIT.table)
    made.advance()
    (missing,) = made.faults
    assert (missing.version, missing.kind) == (BATCHES + 2, "rows")
    assert "2 offsets are covered by an entry and in no row: flights-0 52..52, flights-1 27..27" in missing.text


@pytest.mark.parametrize(
    ("table", "change", "offset"),
    [
        ("flights_long", lambda rows: rows[1:], 32),
        (SPLIT.table, lambda rows: [*rows, {**rows[0], "source_offset": 32, "flight": 32}], 32),
    ],
    ids=["in neither table", "in both tables"],
)
def test_a_record_that_is_not_in_one_of_two_tables_is_told(
    tmp_path: Path, table: str, change: Callable[[list[Row]], list[Row]], offset: int
) -> None:
    Spoiler(make_split(tmp_path) / table).rows(change)
    assert any(f"flights-0 {offset}..{offset}" in text for text in judged_faults(tmp_path, SPLIT))


def judged_faults(tables: Path, subject: WatchedStream) -> list[str]:
    made = TableReader(subject, tables)
    made.advance()
    return [fault.text for fault in made.faults]


def test_rows_that_rules_took_out_are_not_missed(tmp_path: Path) -> None:
    for batch in (0, 1):
        rows = clean_rows(batch)
        write_judged(tmp_path, JUDGED, batch, rows[3:], rows[:1], 2)
    assert judged_faults(tmp_path, JUDGED) == []


@pytest.mark.parametrize(("first", "dropped"), [(4, 2), (2, 2)])
def test_more_or_fewer_rows_missing_than_the_entries_dropped_are_seen(tmp_path: Path, first: int, dropped: int) -> None:
    rows = clean_rows(0)
    write_judged(tmp_path, JUDGED, 0, rows[first:], rows[:1], dropped)
    (text,) = judged_faults(tmp_path, JUDGED)
    assert f"flights-0 1..{first - 1}; the entries dropped 2 rows (after batch g0001 batch 0)" in text


def test_a_row_in_table_and_quarantine_is_seen(tmp_path: Path) -> None:
    rows = clean_rows(0)
    write_judged(tmp_path, JUDGED, 0, rows, rows[:1], 0)
    (text,) = judged_faults(tmp_path, JUDGED)
    assert text.startswith("1 offset is in a row and covered by no entry: flights-0 0..0")


def newest_rows(batch: int) -> list[Row]:
    """One key of each partition, at its last record of the batch."""
    return [
        row | {"flight": 1}
        for row in clean_rows(batch)
        if row["source_offset"] == SIZES[row["source_partition"]] * (batch + 1) - 1
    ]


def test_an_upsert_that_only_grows_newer_is_right(tmp_path: Path) -> None:
    for batch in (0, 1):
        write_judged(tmp_path, NEWEST, batch, newest_rows(batch), clean_rows(batch)[:1], 0)
    assert judged_faults(tmp_path, NEWEST) == []


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (newest_rows(0), "2 keys are older than in the version before, or gone, first C01"),
        (newest_rows(2)[1:], "1 key is older than in the version before, or gone, first C01"),
        (newest_rows(2) * 2, "2 keys are in more than one row"),
        (newest_rows(5), "2 offsets are in a row and covered by no entry, or set aside"),
        ([clean_rows(2)[0] | {"flight": 1}, newest_rows(2)[1]], "1 offset is in a row and covered by no entry, or set"),
    ],
)
def test_a_version_of_an_upsert_that_goes_back_or_doubles_is_seen(tmp_path: Path, rows: list[Row], says: str) -> None:
    for batch in (0, 1):
        write_judged(tmp_path, NEWEST, batch, newest_rows(batch), clean_rows(batch)[:1], 0)
    write_judged(tmp_path, NEWEST, 2, rows, clean_rows(2)[:1], 0)
    (text,) = judged_faults(tmp_path, NEWEST)
    assert text.startswith(says)


def test_the_thread_reads_all_of_all_tables_before_it_ends(tables: Path) -> None:
    both = ConcurrentReader(SHIPPED, tables)
    both.start()
    both.finish()
    assert (both.seen, both.unseen, both.faults) == (3 * (BATCHES + 1), 0, [])


def test_an_error_of_the_reader_itself_is_raised_and_not_lost(tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TableReader, stop: threading.Event | None = None) -> bool:
        if stop is not None:
            raise AssertionError("a bug")
        return advance(self)

    advance = TableReader.advance
    monkeypatch.setattr(TableReader, "advance", broken)
    both = ConcurrentReader(SHIPPED, tables)
    both.start()
    both._thread.join(10)
    with pytest.raises(AssertionError, match="a bug"):
        both.finish()
