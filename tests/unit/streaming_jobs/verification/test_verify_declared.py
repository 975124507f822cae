"""Streams that are not shipped, verified from their declaration: after recoveries, upkeep and a shortened log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from streaming_jobs.declare.error_policy import ErrorPolicy
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.registry.schemas import StoredSchemas
from streaming_jobs.runtime import output_plans
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import Generation
from streaming_jobs.verification.offset_ranges import place_of
from streaming_jobs.verification.topic import CommittedPartition, CommittedTopic
from streaming_jobs.verification.verification import refusals_of, subject_of
from streaming_jobs.verification.verifier import StreamVerdict, verify
from tests.support import proofs
from tests.support.delta_table import shorten_log
from tests.support.life import PER_BATCH, PLACES, STREAM, TOPIC, TOPIC_ID, Life
from tests.support.placed import by_place, note_places
from tests.support.proofs import CLEAN, Spoiler

pytestmark = pytest.mark.slow

BATCHES = 5


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Five batches of ten records; each row is one record, and does not say which."""
    made = Life.of_batches(tmp_path, BATCHES)
    noted(made)
    return made


def noted(life: Life, nodes: Iterable[str] = ("Project",), position: list[str] | None = None) -> None:
    """The plans of the stream's code, as a session notes them."""
    output_plans.write(
        StreamFolder.of(life.settings, STREAM.name).output_plans,
        {code: {"things": {"nodes": list(nodes), "position": position}} for code in "ab"},
    )


def topic(records: int = BATCHES * PER_BATCH, low: int = 0) -> dict[str, CommittedTopic]:
    return {TOPIC: CommittedTopic(TOPIC, TOPIC_ID, {0: CommittedPartition(low, records, np.arange(low, records))})}


def judged(life: Life, **options: Any) -> StreamVerdict:
    topics = options.pop("topics", topic())
    subjects = [subject_of(STREAM)]
    verdict = verify(subjects, life.settings.tables, topics, state=life.settings.state, **options)
    return verdict.streams[0]


def outcomes(verdict: StreamVerdict) -> dict[str, str]:
    return {f"{one.table}: {one.what}": one.verdict for one in verdict.comparisons}


def right(verdict: StreamVerdict, verified: int, unproved: int = 0) -> bool:
    assert verdict.ok, (verdict.lost, verdict.doubled, [str(f) for f in verdict.faults], verdict.comparisons)
    assert (verdict.verified, verdict.unproved) == (verified, unproved)
    return True


def recovered(
    life: Life, *, base: int, generation: int = 2, last: int = BATCHES - 1, short: int = 0, switched: bool = True
) -> None:
    """A recovery that goes back to after a batch, replays what came since as one batch, and publishes it."""
    record = life.record
    replayed = range((base + 1) * PER_BATCH, (last + 1) * PER_BATCH)
    offsets = OffsetRange(TOPIC, TOPIC_ID, {0: (base + 1) * PER_BATCH}, {0: (last + 1) * PER_BATCH})
    written, code = {"written": len(replayed)}, CodeVersion("b", "1")
    entry = LedgerEntry("batch", STREAM.name, "things", generation, base + 1, (offsets,), written, code=code)
    ledger_file(life.settings, STREAM.name).append(entry, {})
    ids = [*range((base + 1) * PER_BATCH), *replayed][short:]
    rows = pa.table({"id": ids, "place": [PLACES[abs(i) % len(PLACES)] for i in ids]})
    overwrite(life, replace(entry, kind="publish", rows={}, plan="things-0001"), rows)
    opened = Generation(generation, 0.0, "recovery things-0001", record.generation, base)
    if switched:
        life.save(replace(record, generations=(*record.generations, opened)))


def overwrite(life: Life, entry: LedgerEntry, rows: pa.Table) -> None:
    """The table's rows, and no others, in a commit of the stream's."""
    life.sink().commit(entry, lambda table, how: write_deltalake(table, rows, mode="overwrite", commit_properties=how))


def test_a_declared_stream_is_proved_and_what_was_compared_told_also_where_the_log_has_less_than_the_ledger_beside_it(
    life: Life,
) -> None:
    verdict = judged(life, finished=True)
    assert right(verdict, BATCHES * PER_BATCH) and verdict.whole and verdict.batches == BATCHES
    assert outcomes(verdict) == {
        "things: row counts": "ok",
        "things: records": "ok",
        "things: equation": "ok",
        "things_dead_letters: row counts": "ok",
        "things_dead_letters: dead letters": "not compared",
    }
    life.sink().handle.optimize.compact()
    shorten_log(life.table, 1)
    verdict = judged(life, finished=True)
    assert right(verdict, BATCHES * PER_BATCH) and verdict.whole and verdict.log_from > BATCHES


def test_without_either_the_offsets_are_unproved_and_the_reason_is_told(life: Life) -> None:
    shorten_log(life.table, 2)
    for path in (life.settings.state / STREAM.name / "ledger").iterdir():
        path.write_text("".join(path.read_text().splitlines(keepends=True)[-1:]))
    verdict = judged(life)
    assert right(verdict, 2 * PER_BATCH, unproved=3 * PER_BATCH) and not verdict.whole
    assert "the entries of 3 batches are neither in its log nor in the ledger's file" in verdict.why


def test_a_recovery_and_its_undo_are_proved(life: Life) -> None:
    recovered(life, base=1)
    verdict = judged(life, finished=True)
    assert right(verdict, BATCHES * PER_BATCH) and verdict.whole
    undone(life)
    verdict = judged(life, finished=True)
    assert right(verdict, BATCHES * PER_BATCH) and verdict.whole


def undone(life: Life) -> None:
    """The undo of the recovery: what the first generation had written, in a third one."""
    record = life.record
    offsets = OffsetRange(TOPIC, TOPIC_ID, {}, {0: BATCHES * PER_BATCH})
    entry = LedgerEntry("publish", STREAM.name, "things", 3, BATCHES - 1, (offsets,), plan="things-0002")
    overwrite(life, entry, DeltaTable(life.table, version=BATCHES).to_pyarrow_table())
    opened = Generation(3, 0.0, "recovery things-0002", 1, BATCHES - 1)
    life.save(replace(record, generations=(*record.generations, opened)))


def test_a_recovery_is_proved_when_its_table_has_a_short_log(life: Life) -> None:
    recovered(life, base=1)
    shorten_log(life.table, 1)
    verdict = judged(life, finished=True)
    assert right(verdict, BATCHES * PER_BATCH) and verdict.whole


def test_rows_that_a_recovery_lost_are_told(life: Life) -> None:
    recovered(life, base=1, short=2)
    verdict = judged(life)
    assert not verdict.ok and outcomes(verdict)["things: row counts"] == outcomes(verdict)["things: records"] == "wrong"


def test_a_recovery_that_has_published_and_is_not_finished_is_told_and_is_not_wrong(life: Life) -> None:
    recovered(life, base=1, switched=False)
    verdict = judged(life)
    assert verdict.ok and verdict.unproved == BATCHES * PER_BATCH
    assert verdict.why == "a recovery has opened generation 2 and is not finished"


def test_a_log_that_is_shortened_while_it_is_read_is_no_fault(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    from streaming_jobs.verification import verifier

    read = verifier.read_commit

    def read_late(path: Path, version: int) -> Any:
        if version == 0:
            shorten_log(life.table, 2)
        return read(path, version)

    monkeypatch.setattr(verifier, "read_commit", read_late)
    assert right(judged(life, finished=True), BATCHES * PER_BATCH)


def test_what_was_skipped_is_neither_lost_nor_read_also_with_a_short_log(life: Life) -> None:
    record = life.record
    at, to = BATCHES * PER_BATCH, BATCHES * PER_BATCH + 7
    entry = LedgerEntry(
        "publish", STREAM.name, "things", 2, BATCHES - 1, (OffsetRange(TOPIC, TOPIC_ID, {}, {0: to}),), plan="p"
    )
    life.sink().commit(entry, lambda *_: None)
    hole = {"topic": TOPIC, "partition": 0, "from": at, "to": to, "plan": "p", "generation": 2, "at": 0.0}
    opened = Generation(2, 0.0, "skip of p", 1, BATCHES - 1)
    life.save(replace(record, generations=(*record.generations, opened), void_ranges=(hole,)))
    verdict = judged(life, topics=topic(to), finished=True)
    assert right(verdict, at) and verdict.skipped == 7 and verdict.whole
    shorten_log(life.table, 1)
    assert right(judged(life, topics=topic(to), finished=True), at)
    assert not judged(life, topics=topic(to + 1), finished=True).ok


def test_a_gap_between_two_batches_is_lost_wherever_it_is_read(life: Life) -> None:
    folder = life.settings.state / STREAM.name / "ledger"
    shorten_log(life.table, 2)
    path = next(folder.iterdir())
    path.write_text(path.read_text().replace('"start":{"0":20}', '"start":{"0":23}'))
    verdict = judged(life)
    assert [str(span) for span in verdict.lost] == ["things-0 20..22"]


def test_a_stream_that_began_later_has_not_lost_what_came_before(tmp_path: Path) -> None:
    life = Life.begin(tmp_path)
    life.batch(4)
    record = life.record
    began = replace(record.topics[0], start={"0": 4 * PER_BATCH})
    life.save(replace(record, topics=(began,), generations=(replace(record.generations[0], from_batch=3),)))
    assert right(judged(life, finished=True), PER_BATCH) and judged(life).whole


def test_places_are_compared_one_by_one(placed: Path) -> None:
    verdict = by_place(placed)
    assert verdict.whole and "60 records are each in exactly one row" in verdict.comparisons[-2].text
    Spoiler(placed / CLEAN).rows(lambda rows: [rows[0], *rows[:-1]])
    verdict = by_place(placed)
    assert [str(span) for span in verdict.doubled] == ["flights-0 30..30"] and len(verdict.lost) == 1
    assert verdict.comparisons[0].verdict == "ok", "the number of rows alone would not show it"


def test_a_row_of_no_record_is_told(placed: Path) -> None:
    Spoiler(placed / CLEAN).rows(lambda rows: [*rows, {**rows[0], "source_offset": 99}])
    verdict = by_place(placed)
    assert not verdict.ok and "1 offset is in a row and covered by no entry: flights-0 99..99" in [
        part for one in verdict.comparisons if one.what == "records" for part in one.text.split("; ")
    ]


def test_an_offset_without_a_record_needs_no_row_and_which_rows_a_filter_leaves_out_is_said_not_to_be_compared(
    placed: Path,
) -> None:
    Spoiler(placed / CLEAN).rows(lambda rows: rows[1:])
    Spoiler(placed / CLEAN).entry(4, lambda entry: {**entry, "rows": {"written": 14}})
    whole = proofs.topic()[proofs.TOPIC]
    first = whole.partitions[0]
    marked = replace(first, offsets=first.offsets[first.offsets != 30])
    verdict = by_place(placed, topics={proofs.TOPIC: replace(whole, partitions={**whole.partitions, 0: marked})})
    assert verdict.whole and verdict.verified == 60, verdict.comparisons
    note_places(placed.parent, ["Filter", "Project"])
    verdict = by_place(placed)
    assert not verdict.lost and "the plan leaves some out (Filter): which ones are there is not compared" in (
        verdict.comparisons[-1].text
    )


@pytest.mark.parametrize(("nodes", "expected"), [(["Generate"], "Generate"), (["Aggregate"], "Aggregate")])
def test_other_plans_are_not_compared_record_by_record(placed: Path, nodes: list[str], expected: str) -> None:
    note_places(placed.parent, nodes)
    verdict = by_place(placed)
    assert verdict.ok and verdict.comparisons[-1].verdict == "not compared" and expected in verdict.comparisons[-1].text


def test_a_key_that_is_null_or_twice_is_told(placed: Path) -> None:
    assert by_place(placed, ("carrier", "flight")).comparisons[0].verdict == "ok"
    Spoiler(placed / CLEAN).rows(lambda rows: [{**rows[0], "flight": None}, rows[1], *rows[1:]])
    comparison = by_place(placed, ("carrier", "flight")).comparisons[0]
    assert comparison.verdict == "wrong"
    assert (
        "1 row has a null in key column flight" in comparison.text
        and "1 key is in more than one row" in comparison.text
    )


@pytest.mark.parametrize(("action", "outcome"), [("dead_letter", "wrong"), ("drop", "not compared")])
def test_a_refused_record_without_a_dead_letter_is_missing_unless_the_stream_drops_it(
    life: Life, action: Any, outcome: str
) -> None:
    declared = replace(STREAM, errors=ErrorPolicy(decode=action))
    refusals = refusals_of(declared, StoredSchemas.of_settings(life.settings))
    refusals.found[TOPIC] = {place_of(0, 7): "not_json"}
    verdict = judged(life, refusals={STREAM.name: refusals})
    assert outcomes(verdict)["things_dead_letters: dead letters"] == outcome
    assert bool(verdict.lost) == (action == "dead_letter")


def test_the_rows_of_an_accepted_change_are_not_counted(life: Life) -> None:
    from streaming_jobs.state import stream_record

    DeltaTable(life.table).delete("id = 3")
    assert not judged(life).ok
    stream_record.accept(life.settings, STREAM, "things", BATCHES + 1, "asked for")
    verdict = judged(life)
    assert outcomes(verdict)["things: row counts"] == outcomes(verdict)["things: records"] == "not compared"
    assert verdict.ok, verdict.comparisons
