"""The ledger against the commits: planted contradictions of rows, sums and offsets are found, a sound table is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from quality.table_checks import Reconciled
from quality.table_checks.reconciled import offset_faults
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.state import stream_record
from streaming_jobs.stream import DeltaTable as Declared
from tests.support.checked_tables import ARROW, Orders, edit_adds, rows
from tests.support.stream_on_disk import append

UPSERT = Declared("orders", keys=["id"])


def looked(orders: Orders, **changes: Any) -> str:
    """The text of an outcome that failed; empty if it passed."""
    outcome = orders.look(Reconciled(), **changes)
    assert not outcome.error, outcome.error
    assert outcome.passed is (outcome.number == 0)
    return "" if outcome.passed else outcome.observed


@pytest.mark.parametrize("table", [Declared("orders"), UPSERT], ids=["append", "upsert"])
def test_a_sound_table_passes_also_compacted_and_with_a_short_log(tmp_path: Path, table: Declared) -> None:
    orders = Orders.begin(tmp_path, table)
    assert looked(orders) == ""
    for number in range(4):
        orders.batch(number, [] if number == 2 else rows(number * 5, number * 5 + 10))
    assert looked(orders) == ""
    orders.compact()
    orders.batch(4)
    assert looked(orders) == ""
    orders.shorten()
    orders.batch(5)
    assert looked(orders) == ""
    assert "offsets of 6 batches" in orders.look(Reconciled()).observed


@pytest.mark.parametrize("said", [9, 11])
def test_a_commit_with_other_rows_than_the_ledger_says_is_named(orders: Orders, said: int) -> None:
    orders.batch(0)
    orders.batch(1, said=said)
    text = looked(orders)
    assert f"g0001 batch 1 (version 2) wrote {said} rows by the ledger, its files have 10" in text
    assert "the table has 20 rows more than in version 0" in text


def test_rows_without_statistics_are_not_compared_and_it_says_so(orders: Orders) -> None:
    orders.batch(0, said=99)
    edit_adds(orders.path, lambda add: add.pop("stats"))
    outcome = orders.look(Reconciled())
    assert "1 commit without row counts" in outcome.observed


def test_rows_that_left_the_table_break_the_sum(orders: Orders) -> None:
    orders.batch(0)
    orders.batch(1)
    entry = replace(orders.entry(2), rows={"written": 0})

    def delete(handle: DeltaTable, how: Any) -> None:
        handle.delete("id = 3", commit_properties=how)

    orders.stored().commit(entry, delete)  # type: ignore[attr-defined]
    text = looked(orders)
    assert "g0001 batch 2 (version 3)" in text and "removed 1 file of a table that only grows" in text
    assert "the table has 19 rows more than in version 0, the ledger says 20" in text


def test_an_upsert_that_grew_by_more_than_its_batch_is_named(upsert: Orders) -> None:
    upsert.batch(0)
    upsert.batch(1, rows(5, 25), said=14)
    assert "g0001 batch 1 (version 2) upserted 14 rows by the ledger, the table grew by 15" in looked(upsert)


def test_an_upsert_may_grow_by_less_than_its_batch(upsert: Orders) -> None:
    for number in range(3):
        upsert.batch(number, rows(0, 10))
    assert looked(upsert) == ""


def test_a_commit_of_another_program_is_named_unless_a_person_accepted_it(orders: Orders) -> None:
    orders.batch(0)
    orders.foreign(rows(90, 93))
    orders.batch(1)
    assert "version 2 (WRITE) changed rows of orders without the stream" in looked(orders)
    accepted = stream_record.Accepted("orders", 2, "a test", 1.0)
    orders.save(replace(orders.record, accepted=(accepted,)))
    assert looked(orders) == ""


def test_a_batch_that_is_missing_in_the_log_is_named(orders: Orders) -> None:
    orders.batch(0)
    orders.batch(2)
    assert "1 batch missing between g0001 batch 0 and g0001 batch 2" in looked(orders)


def test_a_line_that_a_crash_lost_is_no_fault(orders: Orders) -> None:
    for number in range(4):
        orders.batch(number, line=number != 1)
    orders.shorten()
    assert looked(orders) == ""


def test_gaps_and_overlaps_of_older_batches_are_found_in_the_ledger_file(orders: Orders) -> None:
    orders.batch(0)
    orders.batch(1, offsets=(OffsetRange("orders", "topic-1", {0: 8}, {0: 20}),))
    orders.batch(2, offsets=(OffsetRange("orders", "topic-1", {0: 23}, {0: 30}),))
    orders.batch(3)
    orders.shorten()
    text = looked(orders)
    assert "g0001 batch 1 reads orders-0 8 to 9 again, after g0001 batch 0" in text
    assert "g0001 batch 2 leaves out orders-0 20 to 22, after g0001 batch 1" in text


def test_only_batches_of_the_fixed_version_are_compared(orders: Orders) -> None:
    orders.batch(0)
    orders.batch(1, said=5, offsets=(OffsetRange("orders", "topic-1", {0: 0}, {0: 20}),))
    assert looked(orders, version=1) == ""
    assert looked(orders, version=2) != ""


def test_batches_after_the_fixed_version_are_left_out_also_if_the_log_left_it_behind(orders: Orders) -> None:
    for number in range(4):
        orders.batch(number)
    checked = orders.checked(version=2)
    orders.shorten()
    assert [entry.batch for _, entry in checked.batches] == [1, 0]


def test_a_secondary_table_is_compared_with_its_own_entries(tmp_path: Path) -> None:
    orders = Orders.begin(tmp_path, Declared("orders"), Declared("others"))
    others = orders.stream.secondary[0]
    for number in range(3):
        if number != 1:  # a batch without rows for it does not commit to it
            data = pa.Table.from_pylist(list(rows(0, 3)), ARROW)
            append(orders.stored("others"), data, replace(orders.entry(number), table="others", rows={"written": 3}))
        orders.batch(number)
    assert looked(orders, declared=others) == ""
    data = pa.Table.from_pylist(list(rows(0, 3)), ARROW)
    append(orders.stored("others"), data, replace(orders.entry(3), table="others", rows={"written": 4}))
    assert "g0001 batch 3 (version 3) wrote 4 rows by the ledger, its files have 3" in looked(orders, declared=others)


def test_after_a_publish_sums_begin_anew_and_offsets_too(orders: Orders) -> None:
    for number in range(3):
        orders.batch(number)
    table = orders.stored()
    table.replace_rows(table.content(1), replace(orders.entry(0, 2), kind="publish", plan="p"), "p-1")
    orders.batch(1, generation=2)
    assert looked(orders) == ""
    orders.batch(2, generation=2, said=11)
    assert "the table has 20 rows more than in version 4, the ledger says 21" in looked(orders)


RANGES = st.lists(st.integers(0, 5), min_size=2, max_size=8)


def entry(batch: int, start: Mapping[int, int], end: Mapping[int, int], generation: int = 1) -> LedgerEntry:
    return LedgerEntry("batch", "s", "t", generation, batch, (OffsetRange("topic", "1", start, end),))


@given(RANGES, st.data())
def test_one_moved_start_is_one_fault_and_none_is_none(sizes: list[int], data: st.DataObject) -> None:
    ends = [sum(sizes[: number + 1]) + 10 for number in range(len(sizes))]
    starts = [10, *ends[:-1]]
    entries = [entry(n, {0: starts[n]}, {0: ends[n]}) for n in range(len(sizes))]
    assert not list(offset_faults(entries))
    at = data.draw(st.integers(1, len(sizes) - 1))
    moved = starts[at] - data.draw(st.integers(1, 9))
    entries[at] = entry(at, {0: moved}, {0: ends[at]})
    [fault] = offset_faults(entries)
    assert f"batch {at} reads topic-0 {moved} to {starts[at] - 1} again" in fault


def test_a_new_partition_begins_at_its_first_offset_and_none_may_vanish() -> None:
    first, second = entry(0, {0: 0}, {0: 5}), entry(1, {0: 5, 1: 0}, {0: 6, 1: 3})
    assert not list(offset_faults([first, second]))
    assert "leaves out topic-1 0 to 1" in next(offset_faults([first, entry(1, {0: 5, 1: 2}, {0: 6, 1: 3})]))
    assert "reads nothing of topic-1" in next(offset_faults([second, entry(2, {0: 6}, {0: 7})]))
    assert "before its start" in next(offset_faults([entry(0, {0: 5}, {0: 4})]))


def test_generations_are_not_compared() -> None:
    assert not list(offset_faults([entry(5, {0: 50}, {0: 60}), entry(3, {0: 30}, {0: 40}, generation=2)]))
