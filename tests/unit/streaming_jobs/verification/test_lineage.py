"""What covers an offset: batches, corrections that stand in their place, void ranges; and the lines of the ledger."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.runtime import output_plans
from streaming_jobs.state import topic_records
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.topic_records import VoidRange
from streaming_jobs.verification import state_evidence
from streaming_jobs.verification.delta_log import Entry, Range
from streaming_jobs.verification.lineage import Coverage, VoidOffsets, coverage, recorded
from streaming_jobs.verification.offset_ranges import Span, merged
from streaming_jobs.verification.state_evidence import CorrectedBatches, StateEvidence, _ledger_lines
from streaming_jobs.verification.topic import CommittedPartition, CommittedTopic
from streaming_jobs.verification.verification import subject_of
from streaming_jobs.verification.verifier import StreamVerdict, verify
from tests.support.life import PLACES, STREAM, TOPIC, TOPIC_ID, Life
from tests.support.stream_on_disk import append

PER_BATCH = 10


def entry(first: int, last: int, generation: int = 1, rows: int = 10, code: str = "a") -> Entry:
    """The entry of a batch, or of several as one."""
    read = Range("t", "id", {0: first * PER_BATCH}, {0: (last + 1) * PER_BATCH})
    return Entry("batch", "s", "s", generation, last, (read,), {"written": rows}, code)


def corrected(after: int, up_to: int, generation: int) -> CorrectedBatches:
    return CorrectedBatches((1, after), (1, up_to), entry(after + 1, up_to, generation, rows=7, code="fixed"))


def covered(*corrections: tuple[int, int], gone: tuple[int, ...] = ()) -> Coverage:
    """Nine batches of generation 1, then one of each recovery, which continues after the last batch."""
    lives = [state_evidence.Life(1, "first start", None, -1, False)]
    lines = {(1, batch): entry(batch, batch) for batch in range(9) if batch not in gone}
    for number, (after, up_to) in enumerate(corrections, 2):
        last = 8 if number == 2 else 7 + number - 1
        lives.append(
            state_evidence.Life(number, "recovery s-0001", number - 1, last, False, corrected(after, up_to, number))
        )
        lines[number, last + 1] = entry(last + 1, last + 1, number)
    beside = StateEvidence(tuple(lives), {"t": ("id", {0: 0})}, lines=lines)
    return coverage(beside, {}, max(lines))


def test_one_entry_stands_for_the_corrected_batches_whose_own_are_not_missed() -> None:
    result = covered((2, 5))
    places = [(e.generation, e.batch) for e in result.entries]
    assert places == [(1, 0), (1, 1), (1, 2), (2, 5), (1, 6), (1, 7), (1, 8), (2, 9)]
    assert not result.missing and not result.unproved and not result.faults
    assert [(s.start, s.end) for s in merged(result.proved)] == [(0, 100)]
    assert sum(s.end - s.start for s in result.proved) == 100, "no offset twice"
    assert result.written == {"written": 7 * 10 + 7}
    result = covered((2, 5), gone=(4, 5))
    assert not result.missing and not result.unproved and len(result.entries) == 8
    assert covered((2, 5), gone=(6,)).missing == 1


def test_two_corrections_beside_each_other_and_a_newer_one_over_an_older() -> None:
    beside = covered((1, 3), (5, 6))
    assert [(e.generation, e.batch) for e in beside.entries if e.code == "fixed"] == [(2, 3), (3, 6)]
    assert not beside.missing and sum(s.end - s.start for s in beside.proved) == 110
    over = covered((2, 4), (1, 6))
    assert [(e.generation, e.batch) for e in over.entries if e.code == "fixed"] == [(3, 6)] and not over.missing
    partly = covered((1, 4), (3, 6))
    assert partly.missing == 2 and [(s.start, s.end) for s in merged(partly.unproved)] == [(20, 40)]
    assert not partly.faults and sum(s.end - s.start for s in (*partly.proved, *partly.unproved)) == 110


@pytest.mark.parametrize("one_more", [False, True])
@pytest.mark.parametrize(("up_to", "skipped"), [((2, 4), []), ((2, 5), []), ((1, 3), [(40, 60)])])
def test_skipped_offsets_that_a_correction_has_read_are_not_skipped(
    one_more: bool, up_to: tuple[int, int], skipped: list[tuple[int, int]]
) -> None:
    """Batches 0 to 3, a jump over 20 offsets, and two batches more; then a recovery from batch 2 on.

    With `one_more` the tables had a batch of 5 offsets that the checkpoint did not know, and the rest was skipped.
    """
    begin = 45 if one_more else 40
    end = {(1, 3): 40, (2, 4): 70, (2, 5): 80}[up_to]
    by = Entry("batch", "s", "s", 3, up_to[1], (Range("t", "id", {0: 20}, {0: end}),), {"written": 7}, "fixed")
    lives = (
        state_evidence.Life(1, "first start", None, -1, False),
        state_evidence.Life(2, "skip of s-0001", 1, 3, False),
        state_evidence.Life(3, "recovery s-0002", 2, 5, False, CorrectedBatches((1, 1), up_to, by)),
    )
    lines = {(1, batch): entry(batch, batch) for batch in range(4)}
    lines |= {(2, batch): entry(batch + 2, batch + 2, 2) for batch in (4, 5)} | {(3, 6): entry(8, 8, 3)}
    more = Entry("batch", "s", "s", 1, 4, (Range("t", "id", {0: 40}, {0: 45}),), {"written": 5}, "a")
    void = Span("t", 0, begin, 60)
    beside = StateEvidence(lives, {"t": ("id", {0: 0})}, skipped=((2, void),), lines=lines)
    result = coverage(beside, {(1, 4): more} if one_more else {}, (3, 6))
    assert [(s.start, s.end) for s in result.skipped] == [(begin, stop) for _, stop in skipped]
    assert sum(s.offsets for s in (*result.proved, *result.skipped)) == 90, "no offset twice"
    assert not result.missing and not result.faults and not result.unproved


END = 50
VOID = (24, 34)


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Two batches of ten records, and one that read over ten void ones, 24 to 33, up to 40; ten are not read yet."""
    made = Life.of_batches(tmp_path, 2)
    plans = {code: {"things": {"nodes": ["Project"], "position": None}} for code in "ab"}
    output_plans.write(StreamFolder.of(made.settings, STREAM.name).output_plans, plans)
    over(made, [*range(20, VOID[0]), *range(VOID[1], 40)])
    return made


def over(life: Life, ids: list[int]) -> None:
    """Batch 2 reads offsets 20 to 39, and writes these rows."""
    read = OffsetRange(TOPIC, TOPIC_ID, {0: 20}, {0: 40})
    entry = LedgerEntry("batch", STREAM.name, "things", 1, 2, (read,), {"written": 10}, code=CodeVersion("a", "1"))
    table = life.stored()
    append(table, pa.table({"id": ids, "place": [PLACES[i % len(PLACES)] for i in ids]}), entry)
    life.ledger_file.append(entry, {table.name: table.version})


def declare(life: Life, *spans: tuple[int, int], generation: int = 2, under_way: str | None = None) -> None:
    ranges = [VoidRange(0, begin, end, "others-0001", generation, 0.0) for begin, end in spans]
    topic_records.declare_void(
        life.settings, TOPIC, TOPIC_ID, writer="others", path=(1, 2), ranges=ranges, under_way=under_way
    )


def judged(
    life: Life,
    *,
    topic_id: str = TOPIC_ID,
    finished: bool = False,
    archive: bool = False,
    before: dict[str, str | None] | None = None,
) -> StreamVerdict:
    topic = CommittedTopic(TOPIC, topic_id, {0: CommittedPartition(0, END, np.arange(END))})
    subject = replace(subject_of(STREAM), reads_void=archive)
    settings, topics = life.settings, {TOPIC: topic}
    verdict = verify([subject], settings.tables, topics, state=settings.state, finished=finished, void_before=before)
    return verdict.streams[0]


def outcomes(verdict: StreamVerdict) -> dict[str, str]:
    return {f"{one.table}: {one.what}": one.verdict for one in verdict.comparisons}


def test_void_offsets_are_neither_verified_nor_lost_and_a_row_missing_beside_them_is_found(life: Life) -> None:
    assert outcomes(judged(life))["things: equation"] == "wrong"
    declare(life, (VOID[0], VOID[1] - 1))
    assert outcomes(judged(life))["things: equation"] == "wrong"
    declare(life, VOID)
    verdict = judged(life)
    assert verdict.ok, (verdict.lost, verdict.doubled, verdict.faults, verdict.comparisons)
    assert (verdict.verified, verdict.unread, verdict.skipped) == (30, 10, 10)
    assert "wrong" not in outcomes(verdict).values() and outcomes(verdict)["things: equation"] == "ok"


def test_void_offsets_at_the_end_are_neither_unread_nor_lost(life: Life) -> None:
    declare(life, VOID, (42, 50))
    verdict = judged(life)
    assert verdict.ok and (verdict.unread, verdict.skipped) == (2, 18)
    declare(life, VOID, (40, 50))
    assert judged(life, finished=True).ok
    declare(life, VOID, (41, 50))
    assert judged(life, finished=True).lost == (Span(TOPIC, 0, 40, 41),)


@pytest.mark.parametrize("case", ["off the path", "of an earlier topic", "archive"])
def test_ranges_that_do_not_hold_for_the_stream_are_not_left_out(life: Life, case: str) -> None:
    declare(life, VOID, generation=3 if case == "off the path" else 2)
    verdict = judged(life, topic_id="another" if case == "of an earlier topic" else TOPIC_ID, archive=case == "archive")
    assert verdict.skipped == 0 and verdict.verified == 40


def test_nothing_is_judged_while_a_plan_appends_or_when_a_recovery_came_while_the_topics_were_read(life: Life) -> None:
    before = recorded(life.settings.state, [TOPIC])
    declare(life, VOID)
    (one,) = judged(life, before=before).comparisons
    assert one.verdict == "unproved" and "came while the topics were read" in one.text
    assert judged(life, before=recorded(life.settings.state, [TOPIC])).ok
    assert judged(life, before=before, archive=True).verified == 40, "an archive has void records too"
    declare(life, VOID, under_way="others-0001")
    (one,) = judged(life).comparisons
    assert one.verdict == "unproved" and "others-0001" in one.text


def test_ranges_that_code_has_read_are_cut_too(life: Life) -> None:
    read = OffsetRange(TOPIC, TOPIC_ID, {0: 20}, {0: 40})
    covered = Coverage(proved=[Span(TOPIC, 0, 20, 40)], entries=[])
    cut = VoidOffsets((Span(TOPIC, 0, *VOID),)).taken_out(covered)
    assert cut.spans == [Span(TOPIC, 0, 20, 24), Span(TOPIC, 0, 34, 40)] and read.records == 20
    verdict = judged(life)
    assert verdict.coverage.read_by({"a"})[-1] == Span(TOPIC, 0, 20, 40)
    declare(life, VOID)
    assert judged(life).coverage.read_by({"a"})[-2:] == cut.spans


def ends_after(batch: int) -> dict[int, int]:
    """Of eight partitions one moves with each batch; a ninth comes later."""
    moved = {p: sum(each % 8 == p for each in range(batch + 1)) for p in range(8)}
    return moved | ({8: batch} if batch > 20 else {})


def test_lines_with_the_partitions_that_moved_have_all_of_them_for_the_verifier(tmp_path: Path) -> None:
    written = LedgerFile(tmp_path)
    expected = {}
    for batch in range(60):
        read = OffsetRange("t", "id", ends_after(batch - 1), ends_after(batch))
        written.append(
            LedgerEntry("batch", "s", "s", 1, batch, (read,), {"written": 1}, code=CodeVersion("a", "1")), {}
        )
        expected[1, batch] = (dict(read.start), dict(read.end))
    text = next(tmp_path.glob("*.jsonl")).read_text()
    assert text.count('"on":') > 40, "most lines are short"
    seen = {at: (dict(entry.ranges[0].start), dict(entry.ranges[0].end)) for at, entry in _ledger_lines(tmp_path, "s")}
    assert seen == expected
