"""`recourse recover` as it is typed, on a stream's life on disk: without Kafka or Spark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from reprocessing import executor
from reprocessing.plan import registry
from reprocessing.plan.plan import Checks, StreamRecoveryPlan
from reprocessing.plan.plan_file import folder, load
from reprocessing.plan.snapshot import planning_snapshot
from reprocessing.plan.targets import Target
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.state import savepoints
from streaming_jobs.state.checkpoint import copy
from streaming_jobs.state.lease import take
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import CodeSince, Generation
from tests.support.life import STREAM, Life, Topics, plan_one, undo_one
from tests.unit.orchestration.cli.conftest import Declare, Run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declare: Declare) -> Life:
    """Nine batches in a home of its own; the stream is declared, and the broker is the one of `Topics`."""
    monkeypatch.setattr("streaming_jobs.runtime.code_version.package_version", lambda: "1")
    declare(STREAM)
    life = Life.begin(tmp_path)
    for number in range(9):
        life.batch(number, wrong=number > 4, code="bug" if number > 3 else "a")
    return life


@pytest.fixture
def plan(life: Life) -> StreamRecoveryPlan:
    return plan_one(planning_snapshot(life.settings, STREAM, Topics()), Target("batch", "3"), Checks())


def test_without_anybody_to_ask_nothing_is_replayed(life: Life, plan: StreamRecoveryPlan, run: Run) -> None:
    code, _, said = run("recover", "apply", plan.id)
    assert code == 2 and "nobody to ask" in said and f"recourse recover apply {plan.id} --yes" in said
    assert executor.journal_of(life.settings, plan.id).outcome == "planned"
    assert not (life.settings.state / STREAM.name / "stop").exists()


def test_without_anybody_to_ask_nothing_is_undone(life: Life, plan: StreamRecoveryPlan, run: Run) -> None:
    executor.journal_of(life.settings, plan.id).write("clean_up", "done")
    code, _, said = run("recover", "undo", plan.id)
    assert code == 2 and "nobody to ask" in said and f"recourse recover undo {plan.id} --yes" in said
    assert not folder(life.settings, "things-0002").exists()


@pytest.mark.parametrize("stage", ["audit", "confirm"])
def test_a_plan_that_waits_for_confirmation_says_so_and_is_applied_with_yes(
    life: Life, plan: StreamRecoveryPlan, stage: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = executor.journal_of(life.settings, plan.id)
    journal.write("take_savepoint", "begun")
    journal.write(stage, "failed", {"error": "REC-030 not confirmed\n  next: ..."})
    code, listed, _ = run("recover", "list", "-o", "json")
    assert code == 0 and json.loads(listed)[0]["outcome"] == "waits for confirmation"
    assert registry.under_way(life.settings, STREAM.name) == load(life.settings, plan.id)
    carried = []
    monkeypatch.setattr("reprocessing.executor._run_all", lambda whole, _: carried.append(whole.plan.id))
    code, _, said = run("recover", "apply", plan.id, "--yes")
    assert code == 0 and carried == [plan.id], said


def test_a_plan_whose_rows_were_refused_is_not_applied_again(life: Life, plan: StreamRecoveryPlan, run: Run) -> None:
    journal = executor.journal_of(life.settings, plan.id)
    journal.write("audit", "failed", {"error": "REC-030 3 rows break the rule id >= 0"})
    code, _, said = run("recover", "apply", plan.id, "--yes")
    assert code == 2 and "refused" in said
    assert f"recourse recover resume {plan.id}" in said and f"recourse recover abort {plan.id}" in said


def test_what_was_undone_is_listed_so_and_not_undone_again(life: Life, plan: StreamRecoveryPlan, run: Run) -> None:
    kept = savepoints.take(life.settings, STREAM, life.record, 8, "recovery")
    journal = executor.journal_of(life.settings, plan.id)
    journal.write("take_savepoint", "done", {"savepoint": kept.id})
    journal.write("clean_up", "done")
    lives = (*life.record.generations, Generation(2, 1.0, f"recovery {plan.id}", 1, 3))
    copy(
        savepoints.checkpoint_of(life.settings, kept), StreamFolder.of(life.settings, STREAM.name).checkpoint(2).folder
    )
    life.save(replace(life.record, generations=lives))
    ledger_file(life.settings, STREAM.name).append(life.entry(8, generation=2), {})
    undo = undo_one(life, plan.id)
    outcomes = {line["plan"]: line["outcome"] for line in run.json("recover", "list")}
    assert outcomes == {plan.id: "published", undo.id: "planned"}
    executor.journal_of(life.settings, undo.id).write("clean_up", "done")
    outcomes = {line["plan"]: line["outcome"] for line in run.json("recover", "list")}
    assert outcomes == {plan.id: f"undone by {undo.id}", undo.id: "published"}
    assert f"It is undone by {undo.id}" in run("recover", "show", plan.id)[1]
    code, _, said = run("recover", "undo", plan.id, "--yes")
    assert code == 2 and f"plan {plan.id} was undone by {undo.id}" in said, said
    assert f"recourse recover undo {undo.id}" in said


def test_show_has_the_stages_in_the_order_in_which_they_would_run_now(
    life: Life, plan: StreamRecoveryPlan, run: Run
) -> None:
    assert "1. take_savepoint" in run("recover", "show", plan.id)[1]
    with take(life.settings, STREAM.name, purpose="session", wait=0):
        assert "2. follow" in run("recover", "show", plan.id)[1]
    executor.journal_of(life.settings, plan.id).write("follow", "begun")
    assert "2. follow" in run("recover", "show", plan.id)[1], "as they have run"


def test_readers_outside_are_told_where_a_published_plan_has_changed_rows(
    life: Life, plan: StreamRecoveryPlan, run: Run
) -> None:
    code, _, said = run("recover", "corrections", plan.id)
    assert code == 0 and f"plan {plan.id} is planned, and has published nothing" in said
    journal = executor.journal_of(life.settings, plan.id)
    touched = {"columns": ["id"], "keys": [[5], [7]], "ranges": {"id": [5, 7]}}
    difference = {"table": "things", "old_rows": 9, "new_rows": 9, "only_old": 0, "only_new": 0, "changed": 2}
    found = {**difference, "totals": {}, "sample": [], "keyed": True, "touched": touched}
    journal.write("audit", "done", {"differences": [found]})
    journal.write("publish", "done", {"tables": [{"table": "things", "version": 12}]}, stream=STREAM.name)
    journal.write("clean_up", "done")
    _, shown, _ = run("recover", "corrections", plan.id)
    row = next(line for line in shown.splitlines() if line.startswith("things"))
    assert row.split() == ["things", "11", "12", "2", "corrected", "2", "keys;", "id", "from", "5", "to", "7"]
    (table,) = run.json("recover", "corrections", plan.id)["streams"][0]["tables"]
    assert table["location"] == str(life.settings.tables / "things")
    assert (table["key_columns"], table["keys"], table["ranges"]) == (["id"], [[5], [7]], {"id": [5, 7]})


def test_a_plan_for_a_bad_row_requires_that_no_rebuilt_row_is_bad(life: Life, run: Run) -> None:
    made = run.json("recover", "plan", STREAM.name, "--before-first-bad", "id < 0")
    assert made["checks"]["rules"] == ["(id < 0) IS NOT TRUE"]
    arguments = ("plan", STREAM.name, "--before-first-bad", "id < 0", "--allow-bad", "-o", "json")
    assert json.loads(run("recover", *arguments)[1])["checks"]["rules"] == []


def test_a_rewind_names_the_batch_and_the_code(life: Life, run: Run) -> None:
    life.save(replace(life.record, code=(*life.record.code, CodeSince("bug", "1", 1, 4, 1.0))))
    text = run("recover", "plan", STREAM.name, "--before-code", "bug")[1]
    assert "rewind to batch 3, before code bug, stream things" in text


def test_planning_without_a_broker_says_what_is_not_known(
    life: Life, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No embedded broker runs, and none is named."""
    monkeypatch.delenv("RECOURSE_KAFKA__BOOTSTRAP_SERVERS")
    code, text, said = run("recover", "plan", STREAM.name, "--to-batch", "3")
    assert code == 0 and "no broker" in text, said
    code, _, said = run("recover", "plan", STREAM.name, "--to-earliest")
    assert code == 1 and "only the broker knows" in said and "recourse up" in said


@pytest.mark.parametrize("command", ["apply", "resume", "undo", "abort"])
def test_a_plan_that_does_not_exist_is_said_first(run: Run, command: str) -> None:
    code, _, said = run("recover", command, "nonsense-0001")
    assert code == 2 and "there is no plan nonsense-0001" in said and "recover list" in said


def test_abort_takes_yes_like_the_others(life: Life, plan: StreamRecoveryPlan, run: Run) -> None:
    assert f"plan {plan.id} is aborted" in run.said("recover", "abort", plan.id, "--yes", code=0)
