"""Plans that are over are removed when their savepoints and their age allow it, and as a whole, also after a kill."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from reprocessing.executor import apply, give_up
from reprocessing.plan.journal import PlanOutcome, journal_of
from reprocessing.plan.plan import RecoveryPlan
from reprocessing.plan.plan_file import folder, load, names, next_id, only_operator, save, sealed
from reprocessing.plan.registry import prune_plans, under_way, undone_by
from reprocessing.plan.snapshot import planning_snapshot
from reprocessing.plan.targets import Target
from streaming_jobs.errors import UsageError
from streaming_jobs.settings import SavepointSettings, Settings
from streaming_jobs.state import savepoints
from tests.support.life import STREAM, Killed, Life, Topics, plan_one, recovery, replayed
from tests.unit.reprocessing.plan.test_plan_file import stream_plan

STAGES: dict[PlanOutcome, tuple[tuple[str, str, str], ...]] = {
    "planned": (),
    "applying": (("take_savepoint", "done", ""),),
    "waits for confirmation": (("audit", "failed", "not confirmed"),),
    "refused": (("audit", "failed", "a rule"),),
    "published": (("clean_up", "done", ""),),
    "aborting": (("abort", "begun", ""),),
    "aborted": (("abort", "done", ""),),
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return at_once(Settings.load({"home": tmp_path}))


def at_once(settings: Settings, keep: timedelta = timedelta(microseconds=1)) -> Settings:
    return settings.model_copy(update={"savepoint": SavepointSettings(keep_plans=keep)})


def made(settings: Settings, outcome: PlanOutcome = "planned", **more: str) -> str:
    """A plan whose savepoint is gone."""
    name = next_id(settings, "things")
    save(settings, sealed(replace(RecoveryPlan(name, 1.0, (stream_plan(name),)), **more)))
    for stage, state, error in STAGES[outcome]:
        journal_of(settings, name).write(stage, state, {"error": error, "savepoint": "g0002-b000000005"})
    assert journal_of(settings, name).outcome == outcome
    return name


def test_a_plan_stays_until_its_savepoints_are_gone(life: Life) -> None:
    settings = at_once(life.settings)
    life.settings = settings
    plans = []
    for outcome in ("published", "aborted"):
        snapshot = planning_snapshot(settings, STREAM, Topics(end=60))
        plan = plan_one(snapshot, Target("batch", "2")).id
        whole = replace(recovery(life, plan, Topics(end=60)), replay=replayed)
        (apply if outcome == "published" else give_up)(whole)
        plans.append(plan)
    newest = plan_one(planning_snapshot(settings, STREAM, Topics(end=60)), Target("batch", "-1")).id
    assert names(settings) == [*plans, newest]
    for savepoint in savepoints.savepoints(settings, STREAM.name):
        savepoints.drop(settings, STREAM, savepoint.id)
    newer = plan_one(planning_snapshot(settings, STREAM, Topics(end=60)), Target("batch", "-1")).id
    assert names(settings) == [newer] and newer == "things-0004"
    assert [each.name for each in (settings.state / "recoveries").iterdir()] == [newer]


@pytest.mark.parametrize("outcome", STAGES)
def test_a_plan_that_is_not_over_stays(settings: Settings, outcome: PlanOutcome) -> None:
    plan, newest = made(settings, outcome), made(settings)
    over = outcome in ("planned", "published", "aborted")
    assert prune_plans(settings) == ([plan] if over else []) and newest in names(settings)


@pytest.mark.parametrize("keep", [timedelta(0), timedelta(days=30)])
def test_a_plan_stays_for_its_age(settings: Settings, keep: timedelta) -> None:
    made(settings, "published"), made(settings)
    assert prune_plans(at_once(settings, keep)) == []


def test_an_undo_stays_as_long_as_what_it_took_back(settings: Settings) -> None:
    """Or the plan would look as if nobody had taken it back."""
    plan = made(settings, "published")
    undo = made(settings, "published", undoes=plan)
    made(settings)
    with only_operator(settings, plan):
        assert prune_plans(settings) == [], "another process is at work on it"
    assert undone_by(settings, load(settings, plan)) == undo
    assert prune_plans(settings) == [plan, undo]


def test_a_removal_that_was_killed_leaves_nothing_that_looks_like_a_plan(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, newest = made(settings, "published"), made(settings)

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(Killed):
            prune_plans(settings)
    assert names(settings) == [newest] and under_way(settings, "things") is None
    assert journal_of(settings, plan).outcome == "published", "it never looks as if it was not applied"
    with pytest.raises(UsageError, match="there is no plan"):
        load(settings, plan)
    being_made = next_id(settings, "things")
    os.utime(folder(settings, plan) / "about.json", (0, 0))
    prune_plans(settings)
    assert {each.name for each in (settings.state / "recoveries").iterdir()} == {newest, being_made}
