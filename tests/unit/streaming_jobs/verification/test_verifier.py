"""The verifier proves what is right, and sees every way in which it could be wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from streaming_jobs.verification.chaos.subjects import FLIGHTS, JUDGED, NEWEST, SPLIT
from streaming_jobs.verification.delta_log import commit_file
from streaming_jobs.verification.offset_ranges import Span, sweep, total
from streaming_jobs.verification.subject import Subject
from streaming_jobs.verification.topic import PartitionContent, TopicContent
from streaming_jobs.verification.verdict import StreamVerdict
from streaming_jobs.verification.verifier import newest_versions, verify
from tests.support.proofs import (
    BATCHES,
    CLEAN,
    HOURS,
    SCHEMAS,
    SIZES,
    TOPIC,
    TOPIC_ID,
    TOTALS,
    Spoiler,
    clean_rows,
    entry,
    judged,
    make_split,
    make_tables,
    properties,
    topic,
    write_judged,
    write_split,
)

OFFSETS = BATCHES * sum(SIZES.values())


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    return make_tables(tmp_path)


def told(tables: Path, table: str, **options: Any) -> str:
    verdict = judged(tables, table, **options)
    assert not verdict.ok
    return "\n".join(fault.text for fault in verdict.faults)


def test_what_is_right_is_proved(tables: Path) -> None:
    verdict = verify(FLIGHTS, tables, topic(), finished=True)
    assert verdict.whole, [str(fault) for stream in verdict.streams for fault in stream.faults]
    assert (verdict.verified, verdict.lost, verdict.doubled, verdict.unread) == (3 * OFFSETS, 0, 0, 0)
    assert [stream.batches for stream in verdict.streams] == [BATCHES] * 3
    assert verdict.records == OFFSETS


def test_a_commit_without_its_entry_is_lost_offsets_and_foreign_rows(tables: Path) -> None:
    Spoiler(tables / CLEAN).entry(2, lambda _: None)
    verdict = judged(tables, CLEAN)
    assert verdict.lost == (Span(TOPIC, 0, 10, 20), Span(TOPIC, 1, 5, 10))
    faults = told(tables, CLEAN)
    assert "carries no ledger entry" in faults and "15 offsets are in a row and covered by no entry" in faults
    assert "starts at 20 of flights-0, the batch before ended at 10" in faults


def test_a_range_read_twice_is_doubled(tables: Path) -> None:
    Spoiler(tables / TOTALS).read(4, 0, start=-3)
    verdict = judged(tables, TOTALS)
    assert verdict.doubled == (Span(TOPIC, 0, 27, 30),) and not verdict.lost
    assert "starts at 27 of flights-0, the batch before ended at 30" in told(tables, TOTALS)


def test_a_gap_between_two_ranges_is_lost(tables: Path) -> None:
    Spoiler(tables / TOTALS).read(3, 1, start=2)
    assert judged(tables, TOTALS).lost == (Span(TOPIC, 1, 10, 12),)


def test_a_row_that_is_gone_is_a_lost_offset(tables: Path) -> None:
    Spoiler(tables / CLEAN).rows(lambda rows: rows[1:])
    verdict = judged(tables, CLEAN)
    assert verdict.lost == (Span(TOPIC, 0, 30, 31),)
    assert "1 offset is covered by an entry and in no row: flights-0 30..30" in told(tables, CLEAN)


def test_a_row_that_is_there_twice_is_a_doubled_offset(tables: Path) -> None:
    Spoiler(tables / CLEAN).rows(lambda rows: [*rows, rows[0]])
    assert judged(tables, CLEAN).doubled == (Span(TOPIC, 0, 30, 31),)


def test_a_row_of_no_record_is_told(tables: Path) -> None:
    Spoiler(tables / CLEAN).rows(lambda rows: [*rows, {**rows[0], "source_offset": 99}])
    assert "1 offset is in a row and covered by no entry: flights-0 99..99" in told(tables, CLEAN)


def test_a_row_of_another_record_than_it_names_is_told(tables: Path) -> None:
    Spoiler(tables / CLEAN).rows(lambda rows: [{**rows[0], "flight": 777}, *rows[1:]])
    assert "1 row is not of the record named there: flights-0 30..30" in told(tables, CLEAN)


def test_an_append_and_a_delete_of_somebody_else_are_told(tables: Path) -> None:
    DeltaTable(tables / CLEAN).delete("source_offset = 3")
    faults = told(tables, CLEAN)
    assert "changed rows (DELETE) and carries no ledger entry" in faults
    assert judged(tables, CLEAN).lost == (Span(TOPIC, 0, 3, 4), Span(TOPIC, 1, 3, 4))
    write_deltalake(tables / HOURS, DeltaTable(tables / HOURS).to_pyarrow_table().slice(0, 1), mode="append")
    assert "1 window is in more than one row" in told(tables, HOURS)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"batch": 7}, "batch g0001 batch 7 comes right after batch g0001 batch 1"),
        ({"batch": 1}, "batch g0001 batch 1 comes after batch g0001 batch 1"),
        ({"generation": 0}, "comes after"),
        ({"generation": 2}, "carries the transaction"),
        ({"stream": "another"}, "carries the entry of stream another"),
        ({"kind": "upkeep"}, "changed rows (WRITE) under an entry of kind upkeep"),
        ({"rows": None}, "cannot be read"),
    ],
)
def test_an_entry_that_breaks_a_rule_is_told(tables: Path, change: dict[str, Any], expected: str) -> None:
    Spoiler(tables / CLEAN).entry(3, lambda value: {**value, **change})
    assert expected in told(tables, CLEAN)


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        ({TOPIC: {"id": "another", "start": {"0": 20, "1": 10}, "end": {"0": 30, "1": 15}}}, "with id another"),
        ({TOPIC: {"id": TOPIC_ID, "start": {"0": 20, "1": 10}, "end": {"0": 30, "1": 9}}}, "ends at 9 of flights-1"),
        ({}, "reads nothing of topic flights, which the batch before read"),
    ],
)
def test_a_range_that_cannot_follow_is_told(tables: Path, read: dict[str, Any], expected: str) -> None:
    Spoiler(tables / TOTALS).entry(3, lambda value: {**value, "offsets": read})
    assert expected in told(tables, TOTALS)


def test_a_hole_in_the_log_is_told(tables: Path) -> None:
    DeltaTable(tables / TOTALS, version=3).create_checkpoint()
    commit_file(tables / TOTALS, 2).unlink()
    assert "the log has no version 2 to 2" in told(tables, TOTALS)


def test_a_commit_without_its_transaction_is_told(tables: Path) -> None:
    Spoiler(tables / TOTALS).actions(2, lambda action: None if "txn" in action else action)
    assert "carries the transaction None" in told(tables, TOTALS)


def test_a_topic_made_anew_is_told(tables: Path) -> None:
    anew = {TOPIC: replace(topic()[TOPIC], topic_id="another")}
    assert "was made from topic flights with id" in told(tables, TOTALS, topics=anew)


def test_a_topic_that_ends_before_the_entries_is_told(tables: Path) -> None:
    faults = told(tables, TOTALS, topics=topic(BATCHES - 1))
    assert "its entries cover flights-0 30..39, which the topic does not hold" in faults


def test_a_total_that_does_not_add_up_is_told(tables: Path) -> None:
    Spoiler(tables / TOTALS).rows(lambda rows: [{**rows[0], "flights": rows[0]["flights"] + 1}, *rows[1:]])
    assert f"the sum of flights is {OFFSETS + 1}, the entries cover {OFFSETS} records" in told(tables, TOTALS)


def test_a_key_with_two_rows_is_told_although_the_sum_is_right(tables: Path) -> None:
    Spoiler(tables / TOTALS).rows(lambda rows: [{**rows[0], "flights": 30}, {**rows[0], "flights": 10}, *rows[1:]])
    assert told(tables, TOTALS) == "1 key is in more than one row, first C0"


def test_windows_that_are_gone_or_count_too_much_are_told(tables: Path) -> None:
    Spoiler(tables / HOURS).rows(lambda rows: [{**rows[0], "flights": 1000}])
    faults = told(tables, HOURS)
    assert "5 rows are there, the entries wrote 6" in faults and "more than the 60 records covered" in faults


def test_what_is_not_read_yet_is_lost_only_where_the_streams_have_finished(tables: Path) -> None:
    longer = topic(BATCHES + 1)
    verdict = judged(tables, CLEAN, topics=longer)
    assert verdict.whole and verdict.unread == 15
    verdict = judged(tables, CLEAN, topics=longer, finished=True)
    assert verdict.lost == (Span(TOPIC, 0, 40, 50), Span(TOPIC, 1, 20, 25)) and verdict.unread == 0


def test_an_offset_that_holds_no_record_needs_no_row(tables: Path) -> None:
    whole = topic()[TOPIC]
    first = whole.partitions[0]
    marked = replace(first, offsets=first.offsets[first.offsets != 30], keys=first.keys[:30] + first.keys[31:])
    Spoiler(tables / CLEAN).rows(lambda rows: rows[1:])
    verdict = judged(tables, CLEAN, topics={TOPIC: replace(whole, partitions={**whole.partitions, 0: marked})})
    assert verdict.whole and verdict.verified == OFFSETS


def test_a_stream_that_writes_on_meanwhile_is_judged_by_the_versions_of_before(tables: Path) -> None:
    at = newest_versions(FLIGHTS, tables) | {CLEAN: 3, HOURS: 3, TOTALS: 3}
    verdict = verify(FLIGHTS, tables, topic(BATCHES - 1), at=at)
    assert verdict.whole and verdict.verified == 3 * (OFFSETS - 15)
    assert [stream.version for stream in verdict.streams] == [3, 3, 3]


def test_records_that_the_topic_no_longer_holds_are_not_missed(tables: Path) -> None:
    verdict = judged(tables, CLEAN, topics=topic(low={0: 12}))
    assert verdict.whole and verdict.verified == OFFSETS - 12


def test_a_log_whose_beginning_is_gone_is_said_to_be_unproved(tables: Path) -> None:
    for table in (CLEAN, TOTALS, HOURS):
        DeltaTable(tables / table, version=3).create_checkpoint()
        for version in range(3):
            commit_file(tables / table, version).unlink()
    verdict = verify(FLIGHTS, tables, topic())
    assert verdict.ok and not verdict.whole
    for stream in verdict.streams:
        assert (stream.log_from, stream.unproved, stream.verified) == (3, 30, OFFSETS - 30)


def test_dead_letters_are_records_that_came_too(tables: Path) -> None:
    Spoiler(tables / CLEAN).rows(lambda rows: rows[1:])
    letter = pa.table({"partition": pa.array([0], pa.int32()), "offset": pa.array([30], pa.int64())})
    write_deltalake(tables / f"{CLEAN}_dead_letters", letter)
    assert judged(tables, CLEAN).whole


def test_a_table_that_is_not_there_is_told(tmp_path: Path) -> None:
    verdict = judged(tmp_path, CLEAN, finished=True)
    assert "there is no such table" in verdict.faults[0].text
    assert sum(span.offsets for span in verdict.lost) == OFFSETS


def test_a_partition_that_came_later_starts_at_its_first_offset(tables: Path) -> None:
    def without(value: dict[str, Any]) -> dict[str, Any]:
        for side in ("start", "end"):
            value["offsets"][TOPIC][side].pop("1")
        return value

    for version in (1, 2):
        Spoiler(tables / TOTALS).entry(version, without)
    assert "starts at 10 of flights-1, the batch before ended at 0" in told(tables, TOTALS)
    Spoiler(tables / TOTALS).entry(4, without)
    assert "reads nothing of partitions [1]" in told(tables, TOTALS)


Rows = list[dict[str, Any]] | None


def longer(more: int) -> dict[str, TopicContent]:
    """The topic with so many records more in each partition."""
    verdicts = {}
    for number, content in topic(BATCHES)[TOPIC].partitions.items():
        high = content.high + more
        keys = (*content.keys, *(b"more" for _ in range(more)))
        verdicts[number] = PartitionContent(content.low, high, np.arange(content.low, high), keys)
    return {TOPIC: TopicContent(TOPIC, TOPIC_ID, verdicts)}


def published(tables: Path, generation: int, *, skip: int = 0, base: int | None = None, rows: Rows = None) -> None:
    """The publish of a recovery at the last batch: of other rows, or forward over `skip` records."""
    batch = BATCHES - 1
    value = {**entry(CLEAN, batch, 0), "kind": "publish", "generation": generation}
    ends = {p: (batch + 1) * size for p, size in SIZES.items()}
    start = {} if base is None else {p: end + base for p, end in ends.items()}
    read = {"id": TOPIC_ID, "start": start, "end": {p: end + skip for p, end in ends.items()}}
    value["offsets"] = {TOPIC: read}
    table = DeltaTable(tables / CLEAN)
    if rows is None:
        table.create_write_transaction(
            [], mode="append", schema=table.schema(), partition_by=[], commit_properties=properties(value)
        )
    else:
        data = pa.Table.from_pylist(rows, SCHEMAS[CLEAN])
        write_deltalake(table, data, mode="overwrite", commit_properties=properties(value))


def test_what_a_recovery_has_rebuilt_is_believed_and_what_comes_after_it_proved(tables: Path) -> None:
    rows = [row for batch in range(BATCHES) for row in clean_rows(batch)]
    published(tables, 2, rows=rows)
    verdict = judged(tables, CLEAN)
    assert not verdict.faults and not verdict.lost and not verdict.doubled
    assert (verdict.verified, verdict.unproved) == (0, BATCHES * 15)
    published(tables, 3, rows=rows[1:])
    assert total(judged(tables, CLEAN).lost) == 1, "its rows are compared all the same"


def test_what_was_rebuilt_is_not_lost_when_the_log_begins_at_its_publish(tables: Path) -> None:
    rows = [row for batch in range(BATCHES) for row in clean_rows(batch)]
    published(tables, 2, base=-3, rows=rows)
    published(tables, 3, base=-1, rows=rows)
    DeltaTable(tables / CLEAN).create_checkpoint()
    for version in range(BATCHES + 2):
        commit_file(tables / CLEAN, version).unlink()
    verdict = judged(tables, CLEAN)
    assert not verdict.faults and not verdict.lost and not verdict.doubled
    assert (verdict.verified, verdict.unproved) == (0, BATCHES * 15)


def test_what_was_skipped_is_not_lost(tables: Path) -> None:
    published(tables, 2, skip=2)
    verdict = judged(tables, CLEAN, longer(2), finished=True)
    assert not verdict.faults and not verdict.lost and verdict.verified == BATCHES * 15


def test_a_rebuilt_table_keeps_what_was_skipped_before_its_base(tables: Path) -> None:
    """Skip two offsets of each partition, then rewind to behind them: they are in no row, and not lost."""
    published(tables, 2, skip=2)
    rows = [row for batch in range(BATCHES) for row in clean_rows(batch)]
    published(tables, 3, skip=2, base=2, rows=rows)
    whole = longer(2)
    verdict = judged(tables, CLEAN, whole, finished=True)
    assert not verdict.faults and not verdict.lost
    published(tables, 4, skip=2, rows=rows)
    assert total(judged(tables, CLEAN, whole, finished=True).lost) == 4, "a rewind to before them has to read them"


def split(folder: Path, **options: Any) -> StreamVerdict:
    return verify((SPLIT,), folder, topic(), **options).streams[0]


def test_a_record_in_either_of_two_tables_is_there_once(tmp_path: Path) -> None:
    verdict = split(make_split(tmp_path), finished=True)
    assert verdict.whole and verdict.verified == OFFSETS and verdict.rows == OFFSETS - 2 * BATCHES


def test_a_row_of_the_second_table_that_is_gone_or_doubled_is_told(tmp_path: Path) -> None:
    long = Spoiler(make_split(tmp_path) / "flights_long")
    long.rows(lambda rows: rows[1:])
    assert split(tmp_path).lost == (Span(TOPIC, 0, 32, 33),)
    long.rows(lambda rows: [rows[0], rows[0]])
    verdict = split(tmp_path)
    assert verdict.doubled == (Span(TOPIC, 1, 17, 18),)
    assert any("in more than one row of table flights_long" in fault.text for fault in verdict.faults)


def test_a_record_in_both_tables_is_told(tmp_path: Path) -> None:
    tables = make_split(tmp_path)
    Spoiler(tables / SPLIT.table).rows(lambda rows: [*rows, {**rows[0], "source_offset": 32, "flight": 32}])
    assert any("flights-0 32..32" in fault.text for fault in split(tables).faults)


def test_a_second_table_may_be_a_batch_ahead_only_while_the_stream_runs(tmp_path: Path) -> None:
    tables = make_split(tmp_path)
    write_split(tables, BATCHES, "flights_long")
    longer = topic(BATCHES + 1)
    running = verify((SPLIT,), tables, longer).streams[0]
    assert running.whole and running.unread == 15
    ended = verify((SPLIT,), tables, longer, finished=True).streams[0]
    assert any("covered by no entry and in table flights_long" in fault.text for fault in ended.faults)


def covered(*ranges: tuple[int, int]) -> list[Span]:
    return [Span("t", 0, start, end) for start, end in ranges]


@pytest.mark.parametrize(
    ("ranges", "missing", "doubled", "beyond"),
    [
        (((0, 5), (5, 10)), [], [], []),
        (((0, 4), (6, 10)), [(4, 6)], [], []),
        (((0, 7), (5, 10)), [], [(5, 7)], []),
        (((0, 10), (0, 10), (2, 3)), [], [(0, 10)], []),
        (((0, 12),), [], [], [(10, 12)]),
        ((), [(0, 10)], [], []),
        (((3, 3), (0, 10)), [], [], []),
    ],
)
def test_a_sweep_sorts_every_offset(
    ranges: tuple[tuple[int, int], ...],
    missing: list[tuple[int, int]],
    doubled: list[tuple[int, int]],
    beyond: list[tuple[int, int]],
) -> None:
    outcome = sweep(covered(*ranges), Span("t", 0, 0, 10))
    assert (outcome.missing, outcome.doubled, outcome.beyond) == (
        covered(*missing),
        covered(*doubled),
        covered(*beyond),
    )


def test_the_verifier_knows_nothing_of_the_code_it_judges() -> None:
    program = """
import sys
import streaming_jobs.verification.verifier, streaming_jobs.verification.version_reader
judged = ("ledger.entry", "preflight", "runtime", "session", "sinks", "state")
print([name for name in sys.modules if name.startswith(tuple(f"streaming_jobs.{part}" for part in judged))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def judged_with_rules(folder: Path, subject: Subject, rows: slice, aside: slice, dropped: int = 0) -> StreamVerdict:
    """The verdict after one batch whose 15 rows are in the table and in the quarantine as the slices say."""
    batch = clean_rows(0)
    write_judged(folder, subject, 0, batch[rows], batch[aside], dropped)
    return verify((subject,), folder, topic(1), finished=True).streams[0]


@pytest.mark.parametrize(("subject", "dropped"), [(JUDGED, 2), (NEWEST, 0)])
def test_rows_that_rules_took_out_are_neither_lost_nor_doubled(tmp_path: Path, subject: Subject, dropped: int) -> None:
    verdict = judged_with_rules(tmp_path, subject, slice(3 + dropped, None), slice(3), dropped)
    assert verdict.whole and verdict.verified == 15, verdict.faults


@pytest.mark.parametrize(
    ("rows", "aside", "dropped", "says"),
    [
        (slice(4, None), slice(3), 0, "1 offset is covered by an entry and in no row: flights-0 3..3"),
        (slice(4, None), slice(1), 2, "3 offsets are covered by an entry and in no row: flights-0 1..3; the entries"),
        (slice(2, None), slice(3), 0, "1 offset is in a row and covered by no entry: flights-0 2..2"),
    ],
)
def test_rows_that_the_rules_do_not_account_for_are_told(
    tmp_path: Path, rows: slice, aside: slice, dropped: int, says: str
) -> None:
    verdict = judged_with_rules(tmp_path, JUDGED, rows, aside, dropped)
    assert not verdict.ok and any(fault.text.startswith(says) for fault in verdict.faults)


@pytest.mark.parametrize(("rows", "key"), [(slice(4, None), "C03"), (slice(2, None), "C02")])
def test_a_key_of_an_upsert_without_its_newest_good_record_is_told(tmp_path: Path, rows: slice, key: str) -> None:
    verdict = judged_with_rules(tmp_path, NEWEST, rows, slice(3))
    says = f"1 key has another row than that of the newest record, or none, first {key}"
    assert says in [fault.text for fault in verdict.faults]


def test_a_quarantine_that_a_repeated_batch_wrote_twice_is_told(tmp_path: Path) -> None:
    batch = clean_rows(0)
    write_judged(tmp_path, JUDGED, 0, batch[3:], [*batch[:3], *batch[:3]])
    verdict = verify((JUDGED,), tmp_path, topic(1), finished=True).streams[0]
    assert verdict.doubled == (Span(TOPIC, 0, 0, 3),)
    assert "3 offsets are in more than one row of table flights_judged_quarantine" in verdict.faults[0].text
