"""A stream that read past void offsets: none of them is lost, doubled or verified, and no row is due for them."""

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
from streaming_jobs.state.topic_records import VoidRange
from streaming_jobs.verification.lineage import Coverage, VoidOffsets, recorded
from streaming_jobs.verification.offset_ranges import Span
from streaming_jobs.verification.topic import CommittedPartition, CommittedTopic
from streaming_jobs.verification.verification import subject_of
from streaming_jobs.verification.verifier import StreamVerdict, verify
from tests.support.life import PLACES, STREAM, TOPIC, TOPIC_ID, Life
from tests.support.stream_on_disk import append

END = 50
VOID = (24, 34)


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Two batches of ten records, and one that read over ten void ones, 24 to 33, up to 40; ten are not read yet."""
    made = Life.of_batches(tmp_path, 2)
    plans = {code: {"things": {"nodes": ["Project"], "position": None}} for code in "ab"}
    output_plans.write(made.settings.state / STREAM.name / "outputs.json", plans)
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


def test_void_offsets_are_neither_verified_nor_lost(life: Life) -> None:
    declare(life, VOID)
    verdict = judged(life)
    assert verdict.ok, (verdict.lost, verdict.doubled, verdict.faults, verdict.comparisons)
    assert (verdict.verified, verdict.unread, verdict.skipped) == (30, 10, 10)
    assert "wrong" not in outcomes(verdict).values() and outcomes(verdict)["things: equation"] == "ok"


def test_without_the_void_ranges_the_same_tables_are_wrong(life: Life) -> None:
    assert outcomes(judged(life))["things: equation"] == "wrong"


def test_a_row_that_is_missing_beside_the_void_ones_is_still_found(life: Life) -> None:
    declare(life, (VOID[0], VOID[1] - 1))
    assert outcomes(judged(life))["things: equation"] == "wrong"


def test_void_offsets_that_are_not_read_yet_are_not_unread(life: Life) -> None:
    declare(life, VOID, (42, 50))
    verdict = judged(life)
    assert verdict.ok and (verdict.unread, verdict.skipped) == (2, 18)


def test_void_offsets_at_the_end_are_not_lost_for_a_stream_that_has_finished(life: Life) -> None:
    declare(life, VOID, (40, 50))
    assert judged(life, finished=True).ok
    declare(life, VOID, (41, 50))
    assert judged(life, finished=True).lost == (Span(TOPIC, 0, 40, 41),)


@pytest.mark.parametrize("case", ["off the path", "of an earlier topic", "archive"])
def test_ranges_that_do_not_hold_for_the_stream_are_not_left_out(life: Life, case: str) -> None:
    declare(life, VOID, generation=3 if case == "off the path" else 2)
    verdict = judged(life, topic_id="another" if case == "of an earlier topic" else TOPIC_ID, archive=case == "archive")
    assert verdict.skipped == 0 and verdict.verified == 40


def test_while_a_plan_appends_nothing_is_judged(life: Life) -> None:
    declare(life, VOID, under_way="others-0001")
    (one,) = judged(life).comparisons
    assert one.verdict == "unproved" and "others-0001" in one.text


def test_a_recovery_that_came_while_the_topics_were_read_leaves_nothing_proved(life: Life) -> None:
    before = recorded(life.settings.state, [TOPIC])
    declare(life, VOID)
    (one,) = judged(life, before=before).comparisons
    assert one.verdict == "unproved" and "came while the topics were read" in one.text
    assert judged(life, before=recorded(life.settings.state, [TOPIC])).ok
    assert judged(life, before=before, archive=True).verified == 40, "an archive has void records too"


def test_ranges_that_code_has_read_are_cut_too(life: Life) -> None:
    read = OffsetRange(TOPIC, TOPIC_ID, {0: 20}, {0: 40})
    covered = Coverage(proved=[Span(TOPIC, 0, 20, 40)], entries=[])
    cut = VoidOffsets((Span(TOPIC, 0, *VOID),)).taken_out(covered)
    assert cut.spans == [Span(TOPIC, 0, 20, 24), Span(TOPIC, 0, 34, 40)] and read.records == 20
    verdict = judged(life)
    assert verdict.coverage.read_by({"a"})[-1] == Span(TOPIC, 0, 20, 40)
    declare(life, VOID)
    assert judged(life).coverage.read_by({"a"})[-2:] == cut.spans
