"""From a refused start, by the command that the refusal names, to a stream that can start."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from reprocessing.executor import resume
from reprocessing.plan.snapshot import look_for_plan
from reprocessing.plan.targets import Target
from reprocessing.replay import staging
from reprocessing.stages.stages import TakeSavepoint
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.preflight.findings import StartFinding
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import take_snapshot
from streaming_jobs.sources.topics import TopicInfo
from tests.support.life import STREAM, TOPIC, Life, Topics, plan_one, recovery


class Grown(Topics):
    """A second partition was added, and its first five records are gone."""

    def describe(self, name: str) -> TopicInfo:
        return TopicInfo(name, self.topic_id, 2, -1, "delete")

    def offsets(self, _: str) -> OffsetBounds:
        return OffsetBounds({0: self.first, 1: 5}, {0: self.end, 1: 9})


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life.begin(tmp_path / "home")


def refusals(life: Life, topics: Topics) -> list[StartFinding]:
    findings = check_start(take_snapshot(life.settings, STREAM, topics))
    return [each for each in findings if each.severity != "warn"]


@pytest.mark.parametrize("planned", [False, True])
def test_an_added_partition_whose_first_records_are_gone(life: Life, planned: bool) -> None:
    life.run(*range(3))
    if planned:
        life.plan(3)
    topics = Grown(end=60)
    (found,) = refusals(life, topics)
    assert "offsets 0 to 4 of topic things, partition 1, are gone" in found.found
    assert found.next_step.endswith("recourse recover plan things --to-offsets 0:30,1:5")
    plan = plan_one(look_for_plan(life.settings, STREAM, lambda: topics), Target("offsets", "0:30,1:5"))
    assert plan.skips
    resume(recovery(life, plan.id, topics))
    assert life.record.generation == 2 and life.checkpoint(2).end(2) == {TOPIC: {0: 30, 1: 5}}
    assert refusals(life, topics) == []


def test_offsets_name_partitions_that_exist(life: Life) -> None:
    life.batch(0)
    with pytest.raises(UsageError, match="has no partition 2"):
        plan_one(look_for_plan(life.settings, STREAM, lambda: Grown(end=30)), Target("offsets", "0:20,1:5,2:0"))


def test_a_first_batch_whose_records_are_gone(life: Life) -> None:
    life.plan(0)
    topics = Topics(first=5)
    (found,) = refusals(life, topics)
    assert "no batch was finished yet" in found.next_step
    with pytest.raises(UsageError, match="has not run a batch yet") as refused:
        plan_one(look_for_plan(life.settings, STREAM, lambda: topics), Target("offsets", "0:5"))
    assert "start the stream over: move" in refused.value.next_step
    folders = shlex.split(found.next_step.split("move ")[1].split(" away")[0])
    assert {Path(each).name for each in folders} == {"things", "things_dead_letters"}
    for number, each in enumerate(folders):
        if Path(each).exists():
            shutil.move(each, life.settings.home / f"away-{number}")
    assert refusals(life, topics) == []


@pytest.mark.parametrize("first", [35, 45])
def test_a_batch_that_is_read_again_for_its_state_alone(life: Life, first: int) -> None:
    """It is in the table and not in Spark's log, and its records are gone meanwhile, perhaps all of them."""
    life.run(*range(3))
    life.batch(3, commit=False)
    topics = Topics(first=first, end=60)
    without_state = [each.found for each in refusals(life, topics)]
    assert not [each for each in without_state if "offsets 30" in each], "it reads the batch no more"
    life.change(state_fingerprint={"0": "Aggregate"})
    (found,) = refusals(life, topics)
    assert f"offsets 30 to {first - 1}" in found.found and "empty tables" in found.next_step
    assert found.next_step.endswith("recourse recover plan things --to-batch -1 --discard-state")
    snapshot = look_for_plan(life.settings, STREAM, lambda: topics)
    plan = plan_one(snapshot, Target("batch", "-1"), discard_state=True)
    whole = recovery(life, plan.id, topics)
    TakeSavepoint(plan).run(whole)
    staging.prepare(life.settings, STREAM, plan, life.record, None)
    staged = take_snapshot(staging.settings_of(life.settings, plan), STREAM, topics)
    assert [each for each in check_start(staged) if each.severity != "warn"] == []
    assert staged.record is not None and staged.record.starts == {TOPIC: {0: first}}
