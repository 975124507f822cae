"""What a report shows, as data: from the plan and the journal alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from reprocessing.report.facts import BatchColumn, BatchRows, BatchSeries, LeftOut, PartitionRanges, facts_of
from tests.support.reports import TOPIC, batches_of, difference, journal_of, plan_of


def only(ranges: tuple[PartitionRanges, ...]) -> PartitionRanges:
    assert len(ranges) == 1
    return ranges[0]


def test_the_ranges_of_a_published_recovery_end_where_its_replay_did(tmp_path: Path) -> None:
    facts = facts_of(plan_of(1), journal_of(tmp_path, plan_of(1)))
    assert facts.outcome == "published" and facts.streams[0].published and facts.streams[0].done
    assert only(facts.streams[0].partitions) == PartitionRanges(
        TOPIC, 0, before=(0, 29_500), replayed=(15_000, 30_100), skipped=(15_000, 15_000), now=(0, 30_100)
    )


def test_without_a_savepoint_rows_from_before_the_replay_are_no_longer_held(tmp_path: Path) -> None:
    plan = plan_of(1, savepoint=None)
    ranges = only(facts_of(plan, journal_of(tmp_path, plan)).streams[0].partitions)
    assert (ranges.before, ranges.now) == ((0, 29_500), (15_000, 30_100))


@pytest.mark.parametrize("until", ["take_savepoint", "prepare", "replay", "audit"])
def test_before_the_publish_the_tables_hold_what_they_held(tmp_path: Path, until: str) -> None:
    facts = facts_of(plan_of(1), journal_of(tmp_path, plan_of(1), until=until))
    ranges = only(facts.streams[0].partitions)
    assert ranges.now == ranges.before == (0, 29_500)
    replayed = until in ("replay", "audit")
    assert facts.streams[0].done == replayed and ranges.replayed == (15_000, 30_100 if replayed else 30_000)


def test_an_abort_holds_what_was_held_before(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, plan_of(1), differences=[difference()], until="publish")
    journal.write("abort", "done")
    facts = facts_of(plan_of(1), journal)
    assert facts.outcome == "aborted" and only(facts.streams[0].partitions).now == (0, 29_500)
    assert [each.table for each in facts.differences] == ["inventory"]


def test_a_skip_leaves_the_rows_and_shows_what_is_never_read(tmp_path: Path) -> None:
    plan = plan_of(1, skips=True)
    facts = facts_of(plan, journal_of(tmp_path, plan))
    assert only(facts.streams[0].partitions) == PartitionRanges(
        TOPIC, 0, before=(0, 15_000), replayed=(15_000, 15_000), skipped=(15_000, 29_000), now=(0, 15_000)
    )


def test_nothing_is_said_of_a_stream_that_was_not_stopped_yet(tmp_path: Path) -> None:
    plan = plan_of(2, streams=2)
    journal = journal_of(tmp_path / "none", plan, until="")
    (tmp_path / "none" / "journal.jsonl").unlink()
    assert [each.partitions for each in facts_of(plan, journal).streams] == [(), ()]


def test_the_partitions_with_most_records_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    plan = plan_of(30)
    facts = facts_of(plan, journal_of(tmp_path, plan)).streams[0]
    assert [each.partition for each in facts.partitions] == list(range(6, 30))
    assert facts.left_out == LeftOut(6, sum(15_100 + 174 * p for p in range(6)))


def test_the_differences_of_a_refused_audit_are_in_the_journal(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, plan_of(1), until="replay")
    journal.write(
        "audit", "failed", {"error": "no", "differences": [{**vars(difference()), "timeline": {}, "by_key": {}}]}
    )
    assert facts_of(plan_of(1), journal).differences[0].changed == difference().changed
    assert facts_of(plan_of(1), journal, [difference(table="newer")]).differences[0].table == "newer"


def test_batches_are_joined_to_columns_of_equal_numbers() -> None:
    each = [BatchRows(float(n), n, 10 * n, 20 * n) for n in range(250)]
    series = BatchSeries.of(each)
    assert len(series.columns) == 84 and (series.batches, series.rows, series.records) == (250, 311_250, 622_500)
    assert series.columns[0] == BatchColumn(0.0, 2.0, 0, 2, 3, 30, 60, 20)
    assert series.columns[-1] == BatchColumn(249.0, 249.0, 249, 249, 1, 2_490, 4_980, 2_490)
    assert series.columns[0].mean == 10.0 and series.seconds == 249.0


@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 10_000, 100_000])
def test_columns_are_at_most_a_hundred(count: int) -> None:
    series = BatchSeries.of(batches_of(count) if count < 20_000 else batches_of(10_000) * 10)
    assert len(series.columns) <= 100 and series.batches == count
    assert series.columns or not count


def test_few_batches_have_a_column_each() -> None:
    assert [each.batches for each in BatchSeries.of(batches_of(100)).columns] == [1] * 100
