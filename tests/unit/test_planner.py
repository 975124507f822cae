"""Which savepoint a replay starts from, what is refused, and what first-bad finds: on a stream's life on disk."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from reprocessing import executor
from reprocessing.explainer import explain
from reprocessing.firstbad import before_first_bad
from reprocessing.journal import Journal
from reprocessing.plan import Checks, folder, names
from reprocessing.planner import make_plan
from reprocessing.situation import Situation, look
from reprocessing.targets import Target
from streaming_jobs import generation as generations
from streaming_jobs import savepoints
from streaming_jobs.checkpoint_cut import copy
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.generation import CodeSince, Generation
from streaming_jobs.ledger import LedgerEntry, Txn
from streaming_jobs.world import ledger_file
from tests.unit.life import STREAM, Life, Topics

NONE = Checks()


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    """Nine batches; from the fifth on the code was wrong."""
    monkeypatch.setattr("streaming_jobs.code_version.package_version", lambda: "1")
    life = Life(tmp_path)
    for number in range(9):
        life.batch(number, wrong=number > 4, code="bug" if number > 3 else "a")
    life.save(replace(life.record, code=(*life.record.code, CodeSince("bug", "1", 1, 4, time.time()))))
    return life


def found(life: Life, topics: Topics | None = None) -> Situation:
    return look(life.settings, STREAM, topics or Topics())  # type: ignore[arg-type]


def forget(life: Life, last: int) -> None:
    """Spark's log no longer reaches back to this batch."""
    folder = generations.checkpoint(life.settings, STREAM.name, 1).folder
    for log in ("offsets", "commits"):
        for number in range(last + 1):
            (folder / log / str(number)).unlink(missing_ok=True)


def test_the_targets_own_batch_is_taken_while_the_logs_show_it(life: Life) -> None:
    plan = make_plan(found(life), Target("batch", "3"), NONE)
    assert (plan.base.savepoint, plan.base.batch, plan.records) == ("g0001-b000000003", 3, 50)
    assert savepoints.find(life.settings, STREAM.name, "g0001-b000000003") is not None
    text = explain(plan)
    for words in (
        "rewind to batch 3",
        "starts from  savepoint g0001-b000000003",
        "50 records, about 5.0 KB to replay",
        "8. finish",
        "downstream",
        "Lost for good",
    ):
        assert words in text


def test_else_the_nearest_savepoint_before_it(life: Life) -> None:
    savepoints.take(life.settings, life.record, 1, "time")
    savepoints.take(life.settings, life.record, 2, "time")
    forget(life, 5)
    plan = make_plan(found(life), Target("batch", "4"), NONE)
    assert plan.base.savepoint == "g0001-b000000002"
    assert any("nearest savepoint before g0001 batch 4 is g0001-b000000002" in note for note in plan.notes)


def test_else_the_very_start_if_every_record_is_still_there(life: Life) -> None:
    forget(life, 5)
    plan = make_plan(found(life), Target("batch", "4"), NONE)
    assert plan.base.savepoint is None and plan.records == 90
    assert any("everything is replayed" in note for note in plan.notes)


def test_else_it_is_refused_with_the_oldest_way_back(life: Life) -> None:
    savepoints.take(life.settings, life.record, 7, "time")
    forget(life, 5)
    with pytest.raises(UsageError, match="offsets 0 to 4 of topic things, partition 0, are gone") as refused:
        make_plan(found(life, Topics(first=5)), Target("batch", "4"), NONE)
    assert "--savepoint g0001-b000000007" in refused.value.next_step
    assert names(life.settings) == []


def test_a_savepoint_whose_records_are_gone_is_no_way_back(life: Life) -> None:
    savepoints.take(life.settings, life.record, 1, "time")
    with pytest.raises(UsageError, match="cannot be replayed from"):
        make_plan(found(life, Topics(first=30)), Target("savepoint", "g0001-b000000001"), NONE)


def test_a_named_savepoint_that_a_recovery_left_behind_is_gone_to_itself(life: Life) -> None:
    """Its generation was undone; the largest position before it on the path would lie after it in the topic."""
    taken = savepoints.take(life.settings, life.record, 3, "recovery")
    g2 = generations.checkpoint(life.settings, STREAM.name, 2).folder
    copy(savepoints.checkpoint_of(life.settings, taken), g2)
    lives = (*life.record.generations, Generation(2, 1.0, "recovery things-0001", 1, 3))
    life.save(replace(life.record, generations=lives))
    life.sink().commit(LedgerEntry("fence", STREAM.name, "things", 2, -1), lambda *_: None)
    life.batch(4, generation=2)
    left = savepoints.take(life.settings, life.record, 4, "time")
    undone = (*lives, Generation(3, 2.0, "recovery things-0002", 1, 8))
    life.save(replace(life.record, generations=undone))
    copy(
        savepoints.folder(life.settings, STREAM.name) / left.id / "checkpoint",
        generations.checkpoint(life.settings, STREAM.name, 3).folder,
    )
    plan = make_plan(found(life), Target("savepoint", left.id), NONE)
    assert (plan.base.savepoint, plan.base.generation, plan.base.batch) == (left.id, 2, 4)


@pytest.mark.parametrize(
    ("topics", "words"), [(Topics(topic_id="other"), "deleted and made anew"), (Topics(), "cannot be asked")]
)
def test_what_cannot_be_replayed_or_checked_makes_no_plan(life: Life, topics: Topics, words: str) -> None:
    with pytest.raises((PreflightRefused, UsageError), match=words):
        make_plan(found(life, topics), Target("batch", "3"), Checks(("nope > 1",)))
    assert names(life.settings) == []


def test_a_table_behind_a_fence_makes_no_plan(life: Life) -> None:
    life.sink().commit(LedgerEntry("fence", STREAM.name, "things", 2, -1, plan="things-0009"), lambda *_: None)
    with pytest.raises(PreflightRefused, match="plan things-0009 of table things is under way"):
        make_plan(found(life), Target("batch", "3"), NONE)


def test_before_the_first_bad_row_is_before_the_code_that_wrote_its_batch(life: Life) -> None:
    """The wrong code ran from batch 4 on, the first wrong row came with batch 5."""
    target, resolved = before_first_bad(found(life), "id < 0", exact=False)
    assert resolved.batch == Txn(1, 3) and "first bad row: id < 0" in str(target)
    assert "the first came with g0001 batch 5, written by code bug, which ran since g0001 batch 4" in resolved.notes[0]
    _, resolved = before_first_bad(found(life), "id < 0", exact=True)
    assert resolved.batch == Txn(1, 4) and "--exact" in resolved.notes[1]


def test_the_first_bad_row_is_found_between_savepoints_too(life: Life) -> None:
    for batch in (2, 4, 6):
        savepoints.take(life.settings, life.record, batch, "time")
    life.sink().handle.create_checkpoint()
    for version in range(9):
        (life.table / "_delta_log" / f"{version:020d}.json").unlink()
    _, resolved = before_first_bad(found(life), "id < 0", exact=True)
    assert resolved.batch == Txn(1, 4)
    assert not (life.settings.tables / "_staging").exists() or not list((life.settings.tables / "_staging").iterdir())


def test_no_bad_row_is_nothing_to_put_right(life: Life) -> None:
    with pytest.raises(UsageError, match="no row of table things is bad"):
        before_first_bad(found(life), "id > 1000", exact=False)


def test_after_an_aborted_plan_the_published_one_before_it_can_still_be_undone(life: Life) -> None:
    situation = found(life)
    plan = make_plan(situation, Target("batch", "3"), NONE)
    kept = savepoints.take(life.settings, life.record, 8, "recovery")
    journal = Journal(folder(life.settings, plan.id) / "journal.jsonl")
    journal.write("keep", "done", {"savepoint": kept.id})
    journal.write("finish", "done")
    lives = (
        *life.record.generations,
        Generation(2, 1.0, f"recovery {plan.id}", 1, 3),
        Generation(4, 2.0, "abort of things-0002", 2, 8),
    )
    copy(savepoints.checkpoint_of(life.settings, kept), generations.checkpoint(life.settings, STREAM.name, 4).folder)
    life.save(replace(life.record, generations=lives))
    ledger_file(life.settings, STREAM.name).append(life.entry(8, generation=2), {})
    undo = executor.plan_undo(life.settings, STREAM, Topics(), plan)  # type: ignore[arg-type]
    assert (undo.base.savepoint, undo.undoes, undo.generation) == (kept.id, plan.id, 5)
    life.save(replace(life.record, generations=(*lives, Generation(5, 3.0, "recovery things-0003", 4, 8))))
    with pytest.raises(UsageError, match="undo the later recovery first"):
        executor.plan_undo(life.settings, STREAM, Topics(), plan)  # type: ignore[arg-type]
