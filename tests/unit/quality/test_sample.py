"""The files that a run reads: all rows that may be new, no row that is not in the version, no file more than needed."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from quality.sample import SampleRequest, SuiteSample, TimeRange, choose_sample, open_newest, parse_partition
from quality.sample_rows import SampleReader
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.sinks.delta.store import STORE, ensure_sink
from streaming_jobs.stream import DeltaTable
from tests.conftest import SettingsFactory
from tests.support.checked_orders import SCHEMA, OrdersTable, order
from tests.support.checked_tables import edit_adds
from tests.support.store_server import StoreServer

KEPT, KEPT_COLUMNS = DeltaTable("kept"), StructType([StructField("id", LongType())])


def chosen(table: OrdersTable, request: SampleRequest) -> SuiteSample:
    return choose_sample(table.handle, table.path, request)


def ids(sample: SuiteSample) -> list[int]:
    reader = SampleReader.of(sample)
    return sorted(i for _, rows in reader.tables() for i in rows["id"].to_pylist())


def new(table: OrdersTable, since: int | None) -> SuiteSample:
    return chosen(table, SampleRequest("new", since))


def test_new_rows_are_those_of_later_versions_and_only_their_files_are_read(table: OrdersTable) -> None:
    table.append(order(1))
    since = table.append(order(2))
    table.append(order(3))
    table.append(order(4), order(5, month=2))
    sample = new(table, since)
    assert (ids(sample), len(sample.files), sample.files_in_table) == ([3, 4, 5], 3, 5)
    assert sample.since == since and f"after version {since}" in sample.words


@pytest.mark.parametrize(
    ("since", "found", "whole", "words"),
    [(None, [1], True, "no run of this suite"), (1, [], False, "nothing came"), (8, [1], True, "the table is at")],
    ids=["the first run reads everything", "nothing new is an empty slice", "a table that went back is read whole"],
)
def test_what_is_new_is_said(table: OrdersTable, since: int | None, found: list[int], whole: bool, words: str) -> None:
    assert table.append(order(1)) == 1
    sample = new(table, since)
    assert (ids(sample), sample.rows, sample.whole) == (found, len(found), whole) and words in sample.words


def test_the_version_is_fixed_while_the_table_goes_on(table: OrdersTable) -> None:
    table.append(order(1))
    handle = table.handle
    table.append(order(2))
    table.compact()
    sample = choose_sample(handle, table.path, SampleRequest("all"))
    assert ids(sample) == [1]


def test_a_new_file_that_compaction_rewrote_is_read_as_it_was(table: OrdersTable) -> None:
    since = table.append(order(1))
    table.append(order(2))
    table.append(order(3))
    assert table.compact() > since + 2
    sample = new(table, since)
    assert ids(sample) == [2, 3] and sample.files_in_table == 1


def test_a_compacted_new_file_that_is_gone_makes_the_samplethe_whole_table(table: OrdersTable) -> None:
    since = table.append(order(1))
    table.append(order(2))
    table.compact()
    table.vacuum()
    sample = new(table, since)
    assert ids(sample) == [1, 2] and sample.since is None
    assert "gone" in sample.words


def test_a_log_without_the_versions_makes_the_samplethe_whole_table(table: OrdersTable) -> None:
    since = table.append(order(1))
    table.append(order(2))
    table.append(order(3))
    table.handle.create_checkpoint()
    for version in range(since + 2):
        (table.path / "_delta_log" / f"{version:020d}.json").unlink()
    sample = new(table, since)
    assert ids(sample) == [1, 2, 3] and "no longer holds" in sample.words


def test_rows_that_a_later_commit_removed_are_not_read(table: OrdersTable) -> None:
    since = table.append(order(1))
    table.append(order(2), order(3))
    table.delete("id = 2")
    assert ids(new(table, since)) == [3]


def test_a_delete_after_a_compaction_loses_no_new_row_and_keeps_no_deleted_one(table: OrdersTable) -> None:
    since = table.append(order(1))
    table.append(order(2), order(3), order(4))
    table.compact()
    table.delete("id = 3")
    sample = new(table, since)
    assert set(ids(sample)) == {1, 2, 4}  # 1 came into the same file: read again, never lost


def test_the_other_file_of_a_compaction_is_read_when_one_is_removed(table: OrdersTable) -> None:
    since = table.append(order(1))
    table.append(order(2), order(3, month=2))
    table.append(order(4), order(5, month=2))
    table.compact()
    table.delete("month = '2026-02' AND id = 3")
    sample = new(table, since)
    assert {2, 4, 5} <= set(ids(sample)) and 3 not in ids(sample)


def test_a_partition_reads_its_files_only(table: OrdersTable) -> None:
    table.append(order(1), order(2, month=2))
    sample = chosen(table, SampleRequest("all", partition=parse_partition(["month=2026-02"])))
    assert (ids(sample), len(sample.files)) == ([2], 1)


def test_a_range_skips_files_by_their_statistics_and_filters_rows(table: OrdersTable) -> None:
    table.append(order(1, day=1), order(2, day=10))
    table.append(order(3, day=20))
    sample = chosen(table, SampleRequest("all", times=TimeRange.parse("at", "2026-01-05", "2026-01-15")))
    assert (ids(sample), len(sample.files)) == ([2], 1)


def test_a_range_is_inclusive_at_its_begin_and_exclusive_at_its_end(table: OrdersTable) -> None:
    table.append(order(1, day=5), order(2, day=6))
    times = TimeRange.parse("at", "2026-01-05T00:00:00Z", "2026-01-06")
    assert ids(chosen(table, SampleRequest("all", times=times))) == [1]


@pytest.mark.parametrize(
    "bounds", ['{"numRecords":1}', "not json", '{"numRecords":1,"maxValues":{"at":"+10000-01-01"}}']
)
def test_a_file_with_missing_or_strange_statistics_is_read(table: OrdersTable, bounds: str) -> None:
    table.append(order(1, day=20))
    edit_adds(table.path, lambda add: add.update(stats=bounds))
    times = TimeRange("at", datetime(2026, 1, 20, tzinfo=UTC), datetime(2026, 1, 21, tzinfo=UTC))
    sample = chosen(table, SampleRequest("all", times=times))
    assert (ids(sample), sample.rows) == ([1], 1)


def test_statistics_in_milliseconds_lose_no_row_of_the_last_one(table: OrdersTable) -> None:
    row = {**order(1), "at": datetime(2026, 1, 1, 0, 0, 0, 999, tzinfo=UTC)}
    bound = {"at": "2026-01-01T00:00:00.000Z"}  # as delta-spark writes it
    bounds = json.dumps({"numRecords": 1, "minValues": bound, "maxValues": bound})
    table.append(row)
    edit_adds(table.path, lambda add: add.update(stats=bounds))
    times = TimeRange("at", datetime(2026, 1, 1, 0, 0, 0, 500, tzinfo=UTC), None)
    assert ids(chosen(table, SampleRequest("all", times=times))) == [1]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"times": TimeRange("att", datetime(2026, 1, 1, tzinfo=UTC))}, "no column 'att'"),
        ({"times": TimeRange("item", datetime(2026, 1, 1, tzinfo=UTC))}, "name a column of dates or times"),
        ({"partition": {"week": "1"}}, "no partition column 'week'"),
    ],
)
def test_a_range_or_a_partition_of_a_wrong_column_is_a_usage_error(
    table: OrdersTable, asked: dict[str, Any], words: str
) -> None:
    table.append(order(1))
    with pytest.raises(UsageError) as raised:
        chosen(table, SampleRequest("all", **asked))
    assert words in str(raised.value)


def test_a_column_that_came_later_is_null_in_older_files_and_partitions_come_from_the_log(table: OrdersTable) -> None:
    table.append(order(1))
    wider = pa.schema([*SCHEMA, ("note", pa.string())])
    table.append({**order(2), "note": "n"}, schema=wider)
    reader = SampleReader.of(chosen(table, SampleRequest("all")))
    rows = sorted((r["id"], r["note"], r["month"]) for _, t in reader.tables() for r in t.to_pylist())
    assert rows == [(1, None, "2026-01"), (2, "n", "2026-01")]


def test_a_file_removed_while_it_is_read_is_an_error_and_no_shorter_slice(table: OrdersTable) -> None:
    table.append(order(1))
    sample = chosen(table, SampleRequest("all"))
    table.delete("id = 1")
    table.vacuum()
    with pytest.raises(PreflightRefused, match="was removed while it was read"):
        ids(sample)


def test_a_table_with_deletion_vectors_is_refused(table: OrdersTable) -> None:
    version = table.append(order(1))
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["deletionVectors"]}
    line = json.dumps({"protocol": {**protocol, "writerFeatures": ["deletionVectors"]}})
    (table.path / "_delta_log" / f"{version + 1:020d}.json").write_text(line + "\n")
    with pytest.raises(UsageError, match="deletion vectors"):
        chosen(table, SampleRequest("all"))


def test_no_table_yet_and_a_table_that_is_gone_are_two_errors(table: OrdersTable) -> None:
    with pytest.raises(UsageError, match="does not exist yet"):
        open_newest(table.path, "orders", seen=lambda: False)
    with pytest.raises(PreflightRefused, match="is gone"):
        open_newest(table.path, "orders", seen=lambda: True)


def test_a_staged_table_on_a_store_is_read_with_the_files_that_it_shares_and_no_file_is_looked_for(
    settings: SettingsFactory, tables_on_a_store: dict[str, Any], object_store: StoreServer
) -> None:
    stored = settings(tables_on_a_store)
    live = ensure_sink(stored, KEPT, "s", KEPT_COLUMNS, generation=1)
    for batch in range(3):
        live.append(pa.table({"id": [batch]}), LedgerEntry("batch", "s", "kept", 1, batch))
    staged_at = stored.with_tables(stored.tables / "*/staged-1")
    staged = STORE.create(staged_at, KEPT, "s", live.content(), LedgerEntry("publish", "s", "kept", 2, 2))
    since = staged.version
    staged.append(pa.table({"id": [7]}), LedgerEntry("batch", "s", "kept", 2, 3))
    object_store.clear()
    whole = choose_sample(staged.readable(), staged.path, SampleRequest("all"))
    newer = choose_sample(staged.readable(), staged.path, SampleRequest("new", since))
    assert not [each.key for each in object_store.requests() if each.method == "HEAD"]
    assert (ids(whole), ids(newer)) == ([0, 1, 2, 7], [7])
