"""Bounded recoveries without Kafka and Spark: the replay is written by hand, as in `test_any_store.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from reprocessing import executor
from reprocessing.explainer import explain
from reprocessing.planning.history import has_present_rows
from reprocessing.planning.planner import Request, make_plan
from reprocessing.planning.snapshot import planning_snapshot
from reprocessing.planning.targets import Target
from reprocessing.plans.plan import NO_CHECKS, Checks, RecoveryPlan
from reprocessing.plans.plan_file import load
from reprocessing.rebuild.context import Recovery, RecoveryContext, RecoveryEvents
from reprocessing.rebuild.replay import last_entry
from reprocessing.stages import stages_of
from streaming_jobs.ledger import Txn
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.take_snapshot import take_snapshot
from streaming_jobs.state.stream_record import CodeSince, Corrected
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import Stream
from streaming_jobs.testing import MemoryDeclaration, MemoryStore
from tests.support.life import PER_BATCH, STREAM, TOPIC, Life, Topics

BATCHES, WRONG = 9, range(3, 6)
"""Batches 3 to 5 are wrong; those after them are right."""
END = 120
BEFORE = sorted(-n if n // PER_BATCH in WRONG else n for n in range(BATCHES * PER_BATCH))
RIGHT = list(range(BATCHES * PER_BATCH))
UNTIL = Target("batch", "5")


def in_delta() -> Stream:
    tables = {name: Declared(name, partition_by=["place"]) for name in ("things", "copies")}
    return replace(STREAM, sinks=tables)


def in_memory() -> Stream:
    store = MemoryStore()
    return replace(STREAM, sinks={name: MemoryDeclaration(name, store) for name in ("things", "copies")})


@pytest.fixture(params=[in_delta, in_memory])
def life(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    monkeypatch.setattr("streaming_jobs.runtime.code_version.package_version", lambda: "1")
    return lived(Life.begin(tmp_path, request.param()))


@pytest.fixture
def delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    monkeypatch.setattr("streaming_jobs.runtime.code_version.package_version", lambda: "1")
    return lived(Life.begin(tmp_path, in_delta()))


def lived(life: Life, *, then: Callable[[int], None] = lambda _: None) -> Life:
    for number in range(BATCHES):
        life.batch(number, wrong=number in WRONG, code="bug" if number in WRONG else "b" if number > 5 else "a")
        then(number)
    codes = (CodeSince("bug", "1", 1, 3, 1.0), CodeSince("b", "1", 1, 6, 2.0))
    life.save(replace(life.record, code=(*life.record.code, *codes)))
    return life


def planned(life: Life, target: Target = Target("batch", "2"), checks: Checks = NO_CHECKS) -> RecoveryPlan:  # noqa: B008
    snapshot = planning_snapshot(life.settings, life.stream, Topics(end=END))
    return make_plan(life.settings, [Request(snapshot, target, checks, until=UNTIL)])


def recovery(life: Life, plan: RecoveryPlan, replaying: Callable[[RecoveryContext], Any] | None = None) -> Recovery:
    topics, events = Topics(end=END), RecoveryEvents()
    return executor.recovery_of(life.settings, [life.stream], topics, plan, events, replay=replaying or replay)


def replay(context: RecoveryContext, *, wrong: bool = False) -> Mapping[str, Any]:
    """As the session does it, to the end of batch 5."""
    staged, first = Life(context.own, context.stream), context.plan.base.batch + 1
    for number in range(first, 6 if context.plan.until else END // PER_BATCH):
        staged.plan(number, generation=context.plan.generation)
        staged.batch(number, generation=context.plan.generation, code="fixed", wrong=wrong)
    last = last_entry(context.own, context.stream)
    ends = {TOPIC: dict(last.offsets[0].end)}
    return {"batch": last.batch, "seconds": 0.1, "records": 30, "since": 0, "ends": ends}


def run(whole: Recovery, until: str = "") -> RecoveryContext:
    for stage in stages_of(whole.plan):
        if stage.name == until:
            break
        if whole.journal.done(stage.name, stage.stream) is None:
            whole.journal.write(stage.name, "begun", stream=stage.stream)
            whole.journal.write(stage.name, "done", stage.run(whole), stream=stage.stream)
    return whole.of(STREAM.name)


def refusals(life: Life) -> list[str]:
    findings = check_start(take_snapshot(life.settings, life.stream, Topics(end=END)))
    return [finding.found for finding in findings if finding.severity == "refuse"]


def files(life: Life, name: str = "things") -> set[str]:
    return set(DeltaTable(life.settings.tables / name).file_uris())


def test_only_the_range_is_corrected_and_the_stream_continues_after_its_last_batch(life: Life) -> None:
    plan = planned(life)
    assert plan.records == 30 and load(life.settings, plan.id) == plan
    text = explain(plan)
    for words in (
        "rewind to batch 2, until batch 5",
        "30 records",
        "add the rows that came after batch 5",
        "9. finish",
    ):
        assert words in text
    whole = recovery(life, plan)
    context = run(whole, until="publish")
    assert life.ids() == life.ids("copies") == BEFORE
    compared = {d.table: (d.corrected, d.new, d.gone, d.old_rows, d.new_rows) for d in whole.differences}
    assert compared["things"] == compared["copies"] == (30, 0, 0, 60, 60), "later rows are not part of it"
    run(whole)
    assert life.ids() == life.ids("copies") == RIGHT and life.at() == Txn(2, BATCHES - 1)
    assert context.found("combine")["later_files"]["things"]["split"] == 0
    generation = life.record.generations[-1]
    assert (generation.number, generation.from_generation, generation.from_batch) == (2, 1, BATCHES - 1)
    assert generation.corrected == Corrected(Txn(1, 2), Txn(1, 5)) and refusals(life) == []
    assert whole.journal.outcome == "published" and not (life.settings.tables / "_staging").exists()
    life.batch(BATCHES, generation=2, code="b")
    assert life.ids() == list(range((BATCHES + 1) * PER_BATCH)) and refusals(life) == []
    assert not has_present_rows(life.record.generations, Txn(1, 4)), "its savepoints have wrong rows"
    assert has_present_rows(life.record.generations, Txn(1, 2)) and has_present_rows(life.record.generations, Txn(2, 9))
