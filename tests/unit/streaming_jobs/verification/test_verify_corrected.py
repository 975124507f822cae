"""Batches that a bounded recovery has corrected: one entry for all of them is on the path, in their place."""

from __future__ import annotations

import pytest

from streaming_jobs.verification.delta_log import Entry, Range
from streaming_jobs.verification.lineage import Coverage, coverage
from streaming_jobs.verification.offset_ranges import Span, merged
from streaming_jobs.verification.state_evidence import CorrectedBatches, Life, StateEvidence

PER_BATCH = 10


def entry(first: int, last: int, generation: int = 1, rows: int = 10, code: str = "a") -> Entry:
    """The entry of a batch, or of several as one."""
    read = Range("t", "id", {0: first * PER_BATCH}, {0: (last + 1) * PER_BATCH})
    return Entry("batch", "s", "s", generation, last, (read,), {"written": rows}, code)


def corrected(after: int, up_to: int, generation: int) -> CorrectedBatches:
    return CorrectedBatches((1, after), (1, up_to), entry(after + 1, up_to, generation, rows=7, code="fixed"))


def covered(*corrections: tuple[int, int], gone: tuple[int, ...] = ()) -> Coverage:
    """Nine batches of generation 1, then one of each recovery, which continues after the last batch."""
    lives = [Life(1, "first start", None, -1, False)]
    lines = {(1, batch): entry(batch, batch) for batch in range(9) if batch not in gone}
    for number, (after, up_to) in enumerate(corrections, 2):
        last = 8 if number == 2 else 7 + number - 1
        lives.append(Life(number, "recovery s-0001", number - 1, last, False, corrected(after, up_to, number)))
        lines[number, last + 1] = entry(last + 1, last + 1, number)
    beside = StateEvidence(tuple(lives), {"t": ("id", {0: 0})}, lines=lines)
    return coverage(beside, {}, max(lines))


def test_one_entry_stands_for_the_corrected_batches() -> None:
    result = covered((2, 5))
    places = [(e.generation, e.batch) for e in result.entries]
    assert places == [(1, 0), (1, 1), (1, 2), (2, 5), (1, 6), (1, 7), (1, 8), (2, 9)]
    assert not result.missing and not result.unproved and not result.faults
    assert [(s.start, s.end) for s in merged(result.proved)] == [(0, 100)]
    assert sum(s.end - s.start for s in result.proved) == 100, "no offset twice"
    assert result.written == {"written": 7 * 10 + 7}


def test_entries_of_corrected_batches_are_not_missed() -> None:
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
        Life(1, "first start", None, -1, False),
        Life(2, "skip of s-0001", 1, 3, False),
        Life(3, "recovery s-0002", 2, 5, False, CorrectedBatches((1, 1), up_to, by)),
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
