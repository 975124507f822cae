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

from streaming_jobs.verification.delta_log import commit_file
from streaming_jobs.verification.offset_ranges import Span, sweep
from streaming_jobs.verification.topic import CommittedPartition, CommittedTopic
from streaming_jobs.verification.verifier import newest_versions, verify
from tests.support.delta_table import shorten_log
from tests.support.proofs import (
    BATCHES,
    CLEAN,
    HOURS,
    SCHEMAS,
    SIZES,
    SUBJECTS,
    TOPIC,
    TOPIC_ID,
    TOTALS,
    Spoiler,
    clean_rows,
    entry,
    judged,
    make_tables,
    properties,
    topic,
)

pytestmark = pytest.mark.slow

OFFSETS = BATCHES * sum(SIZES.values())


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    return make_tables(tmp_path)


def told(tables: Path, table: str, **options: Any) -> str:
    verdict = judged(tables, table, **options)
    assert not verdict.ok
    return "\n".join(fault.text for fault in verdict.faults)


def test_what_is_right_is_proved(tables: Path) -> None:
    verdict = verify(SUBJECTS, tables, topic(), finished=True)
    assert verdict.whole, [str(fault) for stream in verdict.streams for fault in stream.faults]
    assert (verdict.verified, verdict.lost, verdict.doubled, verdict.unread) == (3 * OFFSETS, 0, 0, 0)
    assert [stream.batches for stream in verdict.streams] == [BATCHES] * 3
    assert verdict.records == OFFSETS


def test_a_commit_without_its_entry_is_lost_offsets_and_foreign_rows(tables: Path) -> None:
    Spoiler(tables / CLEAN).entry(2, lambda _: None)
    verdict = judged(tables, CLEAN)
    assert verdict.lost == (Span(TOPIC, 0, 10, 20), Span(TOPIC, 1, 5, 10))
    faults = told(tables, CLEAN)
    assert "carries no ledger entry" in faults
    assert "starts at 20 of flights-0, the batch before ended at 10" in faults


def test_a_gap_between_two_ranges_is_lost(tables: Path) -> None:
    Spoiler(tables / TOTALS).read(3, 1, start=2)
    assert judged(tables, TOTALS).lost == (Span(TOPIC, 1, 10, 12),)


def test_a_range_read_twice_is_doubled(tables: Path) -> None:
    Spoiler(tables / TOTALS).read(4, 0, start=-3)
    verdict = judged(tables, TOTALS)
    assert verdict.doubled == (Span(TOPIC, 0, 27, 30),) and not verdict.lost
    assert "starts at 27 of flights-0, the batch before ended at 30" in told(tables, TOTALS)


def test_an_append_and_a_delete_of_somebody_else_are_told(tables: Path) -> None:
    DeltaTable(tables / CLEAN).delete("source_offset = 3")
    faults = told(tables, CLEAN)
    assert "changed rows (DELETE) and carries no ledger entry" in faults
    write_deltalake(tables / HOURS, DeltaTable(tables / HOURS).to_pyarrow_table().slice(0, 1), mode="append")
    assert "changed rows (WRITE) and carries no ledger entry" in told(tables, HOURS)


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


def test_a_hole_in_the_log_and_a_commit_without_its_transaction_are_told(tables: Path) -> None:
    Spoiler(tables / TOTALS).actions(2, lambda action: None if "txn" in action else action)
    assert "carries the transaction None" in told(tables, TOTALS)
    DeltaTable(tables / TOTALS, version=3).create_checkpoint()
    commit_file(tables / TOTALS, 2).unlink()
    assert "the log has no version 2 to 2" in told(tables, TOTALS)


def test_a_topic_made_anew_or_one_that_ends_before_the_entries_is_told(tables: Path) -> None:
    anew = {TOPIC: replace(topic()[TOPIC], topic_id="another")}
    assert "was made from topic flights with id" in told(tables, TOTALS, topics=anew)
    faults = told(tables, TOTALS, topics=topic(BATCHES - 1))
    assert "its entries cover flights-0 30..39, which the topic does not hold" in faults


def test_a_stream_that_writes_on_meanwhile_is_judged_by_the_versions_of_before(tables: Path) -> None:
    at = newest_versions(SUBJECTS, tables) | {CLEAN: 3, HOURS: 3, TOTALS: 3}
    verdict = verify(SUBJECTS, tables, topic(BATCHES - 1), at=at)
    assert verdict.whole and verdict.verified == 3 * (OFFSETS - 15)
    assert [stream.version for stream in verdict.streams] == [3, 3, 3]


def test_what_the_topic_no_longer_holds_is_not_missed_and_what_is_unread_lost_only_where_the_streams_have_finished(
    tables: Path,
) -> None:
    verdict = judged(tables, CLEAN, topics=topic(low={0: 12}))
    assert verdict.whole and verdict.verified == OFFSETS - 12
    longer = topic(BATCHES + 1)
    verdict = judged(tables, CLEAN, topics=longer)
    assert verdict.whole and verdict.unread == 15
    verdict = judged(tables, CLEAN, topics=longer, finished=True)
    assert verdict.lost == (Span(TOPIC, 0, 40, 50), Span(TOPIC, 1, 20, 25)) and verdict.unread == 0


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


def longer(more: int) -> dict[str, CommittedTopic]:
    """The topic with so many records more in each partition."""
    verdicts = {}
    for number, content in topic(BATCHES)[TOPIC].partitions.items():
        high = content.high + more
        verdicts[number] = CommittedPartition(content.low, high, np.arange(content.low, high))
    return {TOPIC: CommittedTopic(TOPIC, TOPIC_ID, verdicts)}


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


def test_what_was_rebuilt_is_not_lost_when_the_log_begins_at_its_publish(tables: Path) -> None:
    rows = [row for batch in range(BATCHES) for row in clean_rows(batch)]
    published(tables, 2, base=-3, rows=rows)
    published(tables, 3, base=-1, rows=rows)
    shorten_log(tables / CLEAN)
    verdict = judged(tables, CLEAN)
    assert not verdict.faults and not verdict.lost and not verdict.doubled
    assert (verdict.verified, verdict.unproved) == (0, BATCHES * 15)


def test_what_was_skipped_is_not_lost_and_a_rebuilt_table_keeps_it_before_its_base(tables: Path) -> None:
    published(tables, 2, skip=2)
    verdict = judged(tables, CLEAN, longer(2), finished=True)
    assert not verdict.faults and not verdict.lost and verdict.verified == BATCHES * 15
    # Skip two offsets of each partition, then rewind to behind them: they are in no row, and not lost.
    rows = [row for batch in range(BATCHES) for row in clean_rows(batch)]
    published(tables, 3, skip=2, base=2, rows=rows)
    whole = longer(2)
    verdict = judged(tables, CLEAN, whole, finished=True)
    assert not verdict.faults and not verdict.lost and verdict.skipped == 4
    published(tables, 4, skip=2, rows=rows)
    assert judged(tables, CLEAN, whole, finished=True).skipped == 0, "a rewind to before them has to read them"


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
import streaming_jobs.verification.verifier, streaming_jobs.verification.chaos.version_reader
judged = ("ledger.entry", "preflight", "runtime", "session", "sinks", "state")
print([name for name in sys.modules if name.startswith(tuple(f"streaming_jobs.{part}" for part in judged))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
