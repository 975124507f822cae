"""Missing rows that are no loss: refused, changed and accepted, expired, or in a version that is gone."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from streaming_jobs.verification import recompute
from streaming_jobs.verification.chaos.flight_subject import SPLIT
from streaming_jobs.verification.offset_ranges import Span, cut, merged, of_spans, packed, total, within
from streaming_jobs.verification.subject import StreamTable, Subject
from streaming_jobs.verification.topic import CommittedPartition
from streaming_jobs.verification.verifier import StreamVerdict, verify
from tests.support import proofs
from tests.support.delta_table import shorten_log
from tests.support.life import PER_BATCH, STREAM, TOPIC, Life
from tests.support.placed import by_place, named, note_state, refuse, refusing_batch
from tests.support.proofs import CLEAN, Spoiler, make_split
from tests.unit.streaming_jobs.verification.test_verify_declared import (
    judged,
    noted,
    outcomes,
    recovered,
    right,
)

pytestmark = pytest.mark.slow

BATCHES = 5


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Four batches of ten records; each row is one record, and does not say which."""
    made = Life.of_batches(tmp_path, BATCHES - 1)
    noted(made)
    return made


def told(verdict: StreamVerdict, what: str = "records") -> tuple[str, str]:
    return next((one.verdict, one.text) for one in verdict.comparisons if one.what == what)


LAST = BATCHES - 1
NAMED = named(LAST * PER_BATCH)


@pytest.mark.parametrize("place", [NAMED, {}], ids=["named", "unnamed"])
def test_a_refused_row_of_an_appended_table_is_no_loss(life: Life, place: dict[str, pa.Array]) -> None:
    refusing_batch(life, LAST, place)
    verdict = judged(life)
    assert right(verdict, BATCHES * PER_BATCH)
    assert told(verdict) == (
        "ok",
        "50 records make one row each (1 of which the table cannot hold), and as many rows are there",
    )


@pytest.mark.parametrize("place", [NAMED, {}], ids=["named", "unnamed"])
def test_a_refused_row_excuses_no_other(life: Life, place: dict[str, pa.Array]) -> None:
    refusing_batch(life, LAST, place, short=2)
    assert told(judged(life))[0] == "wrong"


def without_rows(tables: Path, *offsets: int) -> None:
    """Rows of the newest batch taken away; those of partition 0 are 30 to 39."""
    spoiler = Spoiler(tables / CLEAN)
    spoiler.rows(lambda rows: [r for r in rows if r["source_partition"] or r["source_offset"] not in offsets])
    spoiler.entry(4, lambda entry: {**entry, "rows": {"written": 15 - len(offsets), "dead_letters": 1}})


@pytest.mark.parametrize("noted_by", ["letter", "row"])
def test_a_refused_row_with_its_place_is_not_lost(placed: Path, noted_by: str) -> None:
    without_rows(placed, 30)
    place: dict[str, Any] = {"__topic": [proofs.TOPIC], "__partition": [0], "__offset": [30]}
    if noted_by == "row":
        place = {"source_partition": [0], "source_offset": [30]}
    refuse(placed, CLEAN, 3, pa.table({"carrier": ["?"], **place}))
    verdict = by_place(placed)
    assert verdict.whole and "59 records are each in exactly one row" in told(verdict)[1], verdict


def test_an_accepted_change_excuses_the_rows_that_it_took(placed: Path) -> None:
    DeltaTable(placed / CLEAN).delete("source_offset = 3")
    assert [str(span) for span in by_place(placed).lost] == ["flights-0 3..3", "flights-1 3..3"]
    note_state(placed.parent, CLEAN, [{"table": CLEAN, "version": 5}])
    verdict = by_place(placed)
    assert verdict.ok and not verdict.lost
    assert told(verdict) == ("not compared", "a change of somebody else was accepted")


def test_a_record_in_two_rows_is_told_also_after_an_accepted_change(placed: Path) -> None:
    Spoiler(placed / CLEAN).rows(lambda rows: [rows[0], *rows[:-1]])
    note_state(placed.parent, CLEAN, [{"table": CLEAN, "version": 2}])
    verdict = by_place(placed)
    assert [str(span) for span in verdict.doubled] == ["flights-0 30..30"] and not verdict.lost and not verdict.ok


def test_dead_letters_that_somebody_was_allowed_to_delete_are_not_lost_records(placed: Path) -> None:
    without_rows(placed, 30)
    refuse(placed, CLEAN, 3, pa.table({"carrier": ["?"], "source_partition": [0], "source_offset": [30]}))
    letters = f"{CLEAN}_dead_letters"
    DeltaTable(placed / letters).delete()
    note_state(placed.parent, CLEAN, [{"table": letters, "version": 1}])
    verdict = by_place(placed)
    assert verdict.ok and not verdict.lost and told(verdict)[0] == "unproved"


def test_nothing_is_recomputed_after_an_accepted_change(life: Life) -> None:
    from streaming_jobs.state import stream_record

    DeltaTable(life.table).delete("id = 3")
    stream_record.accept(life.settings, STREAM, "things", BATCHES, "asked for")
    frame, written = cast("Any", SimpleNamespace()), recompute._Written([])
    comparison = recompute._table(life.settings, STREAM, "things", frame, judged(life), written)
    assert comparison[2:] == ("not compared", "a change of somebody else was accepted")


def test_what_the_topic_no_longer_holds_may_have_been_a_marker(placed: Path) -> None:
    without_rows(placed, 30)
    verdict = by_place(placed, topics=proofs.topic(low={0: 35}))
    assert verdict.ok and not verdict.lost, verdict.comparisons
    assert told(verdict)[1] == (
        "by source_partition and source_offset: 25 records are each in exactly one row; "
        "which records are there that the topic no longer holds is not compared"
    )
    without_rows(placed, 30, 36)
    assert [str(s) for s in by_place(placed, topics=proofs.topic(low={0: 35})).lost] == ["flights-0 36..36"]


def test_a_refused_row_without_a_place_leaves_as_many_missing_ones_unproved(placed: Path) -> None:
    without_rows(placed, 30)
    refuse(placed, CLEAN, 3, pa.table({"carrier": ["?"]}))
    verdict = by_place(placed)
    assert verdict.ok and not verdict.whole and not verdict.lost
    assert (
        told(verdict)[0] == "unproved"
        and "1 record has no row: flights-0 30..30; 1 row was refused" in told(verdict)[1]
    )
    without_rows(placed, 30, 31)
    verdict = by_place(placed)
    assert [str(span) for span in verdict.lost] == ["flights-0 30..31"]


def test_ranges_are_not_written_out_offset_by_offset() -> None:
    spans = [Span("t", 1, 10, 20), Span("t", 0, 0, 5), Span("t", 1, 15, 30), Span("t", 0, 7, 7)]
    places = packed(np.repeat([0, 1, 2], 40), np.tile(np.arange(40), 3))
    assert places[within(places, spans)].tolist() == np.unique(of_spans(spans)).tolist()
    assert not within(places, []).any() and len(within(packed([], []), spans)) == 0
    assert within(packed([0], [7]), [Span("t", 0, 0, 1 << 47)]).all()


def test_a_recovery_that_is_not_finished_has_not_lost_what_came_before_the_stream(tmp_path: Path) -> None:
    life = Life.begin(tmp_path)
    for number in (3, 4):
        life.batch(number)
    record = life.record
    began = replace(record.topics[0], start={"0": 3 * PER_BATCH})
    life.save(replace(record, topics=(began,), generations=(replace(record.generations[0], from_batch=2),)))
    recovered(life, base=3, switched=False)
    verdict = judged(life)
    assert verdict.why == "a recovery has opened generation 2 and is not finished"
    assert right(verdict, 0, unproved=2 * PER_BATCH), verdict


def test_a_second_table_whose_version_is_cleaned_up_is_unproved(tmp_path: Path) -> None:
    """The primary is judged at its second batch; meanwhile the second table's log was cut after its third."""
    tables, second = make_split(tmp_path / "tables"), SPLIT.secondary[0].table
    note_state(tmp_path, SPLIT.stream)
    for version in range(1, 5):
        Spoiler(tables / SPLIT.table).entry(version, lambda e: {**e, "rows": {**e["rows"], second: 2}})
    shorten_log(tables / second, 2)
    subject = Subject(
        SPLIT.stream,
        SPLIT.table,
        proofs.TOPIC,
        tables=(StreamTable(SPLIT.table, "written"), StreamTable(second, second)),
    )
    verdict = verify((subject,), tables, proofs.topic(), at={SPLIT.table: 2}, state=tmp_path / "state").streams[0]
    assert verdict.ok and not verdict.whole, verdict.comparisons
    outcome = next(one for one in verdict.comparisons if one.table == second)
    assert outcome.verdict == "unproved" and "verify again" in outcome.text
    shorten_log(tables / SPLIT.table, 1)
    verdict = verify((subject,), tables, proofs.topic(), at={SPLIT.table: 2}, state=tmp_path / "state").streams[0]
    assert verdict.ok and not verdict.whole and "verify again" in verdict.comparisons[0].text


def test_the_position_is_known_where_the_log_has_only_upkeep(life: Life) -> None:
    life.batch(4)
    life.sink().handle.optimize.compact()
    shorten_log(life.table, 1)
    verdict = judged(life)
    assert verdict.whole and verdict.position == (1, 4) and outcomes(verdict)["things: records"] == "ok"


def test_a_topic_that_is_gone_is_told_and_breaks_nothing(life: Life) -> None:
    life.batch(4)
    verdict = judged(life, topics={})
    assert not verdict.ok and told(verdict) == ("not compared", "the topic does not exist")
    assert [fault.text for fault in verdict.faults] == [f"topic {TOPIC} does not exist"]


def test_a_stream_without_a_batch_proves_nothing(tmp_path: Path) -> None:
    made = Life.begin(tmp_path)
    verdict = judged(made, topics={TOPIC: replace(proofs.topic()[proofs.TOPIC], partitions={0: empty()})})
    assert verdict.ok and not verdict.whole


def empty() -> CommittedPartition:
    return CommittedPartition(0, 0, np.arange(0))


def test_ranges_are_cut_at_others_of_their_topic_and_partition() -> None:
    chance = random.Random(1)

    def drawn(most: int) -> list[Span]:
        starts = [
            (chance.choice("tu"), chance.randrange(2), chance.randrange(30)) for _ in range(chance.randrange(most))
        ]
        return [Span(topic, p, start, start + chance.randrange(1, 6)) for topic, p, start in starts]

    def offsets(spans: Iterable[Span]) -> set[tuple[str, int, int]]:
        return {(s.topic, s.partition, offset) for s in spans for offset in range(s.start, s.end)}

    for _ in range(300):
        spans, others = list(merged(drawn(8))), drawn(12)
        both, left = cut(spans, others)
        assert offsets(both) == offsets(spans) & offsets(others)
        assert offsets(left) == offsets(spans) - offsets(others)
        assert total(both) + total(left) == total(spans), "no part is there twice"
