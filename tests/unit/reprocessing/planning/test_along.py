"""What a person chooses for streams that a plan takes along: everything anew, empty state, or left as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reprocessing.explainer import explain
from reprocessing.planning import planner
from reprocessing.planning.downstream import Along
from reprocessing.planning.planner import Request, make_plan
from reprocessing.planning.snapshot import PlanningSnapshot, planning_snapshot
from reprocessing.planning.targets import Target
from reprocessing.planning.topics_at_planning import NOTHING_WRITTEN, WrittenAtPlanning
from reprocessing.plans.plan import RecoveryPlan
from reprocessing.plans.plan_file import load
from streaming_jobs.errors import UsageError
from streaming_jobs.preflight.snapshot import take_snapshot
from streaming_jobs.state import topic_records
from streaming_jobs.state.topic_records import VoidRange
from tests.support.life import Life, Topics
from tests.support.life_flows import OTHERS, STREAM, TOPIC, TOPIC_ID

Planned = Callable[..., RecoveryPlan]


@pytest.fixture
def reader(tmp_path: Path) -> Life:
    """`things` reads what `others` is taken to write: both have six batches of the topic."""
    Life.of_batches(tmp_path, 6)
    return Life(Life.of_batches(tmp_path, 6, OTHERS.name).settings)


@pytest.fixture
def planned(reader: Life, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Plan `others` back to batch 4; from offset 30 on, what it has written becomes void."""

    def written(snapshot: PlanningSnapshot, *_: Any, **__: Any) -> WrittenAtPlanning:
        is_writer = snapshot.stream.name == OTHERS.name
        return WrittenAtPlanning({TOPIC: {0: 30}}, {TOPIC: {0: 60}}) if is_writer else NOTHING_WRITTEN

    monkeypatch.setattr(planner, "written_topics", written)
    monkeypatch.setattr(planner, "all_streams", lambda *_: {each.name: each for each in (OTHERS, STREAM)})
    monkeypatch.setattr(planner, "through_topics", lambda *_: [OTHERS.name, STREAM.name])

    def plan(topics: Topics, **choice: set[str]) -> RecoveryPlan:
        snapshot = planning_snapshot(reader.settings, OTHERS, topics)
        along = Along(**{name: frozenset(streams) for name, streams in choice.items()})
        made = make_plan(reader.settings, [Request(snapshot, Target("batch", "4"))], along=along)
        assert load(reader.settings, made.id) == made
        return made

    return plan


def test_without_a_choice_it_goes_back_to_before_the_first_wrong_record(planned: Planned) -> None:
    plan = planned(Topics(end=60))
    assert plan.names == ("others", "things") and plan.of("things").base.batch == 2 and plan.left == ()


def test_a_stream_that_cannot_go_along_has_three_ways(reader: Life, planned: Planned) -> None:
    gone = Topics(first=35, end=60)
    with pytest.raises(
        UsageError, match="takes stream things along, and cannot: .* cannot go back that far"
    ) as refused:
        planned(gone)
    for option in ("--rebuild things", "--discard-state-of things", "--leave things"):
        assert option in refused.value.next_step

    left = planned(gone, leave={"things"})
    assert left.names == ("others",) and left.left == ("things",)
    assert "stream things is left as it is: it keeps what it made of the wrong records" in explain(left)

    assert planned(Topics(end=60), rebuild={"things"}).of("things").base.savepoint is None

    reader.save(replace(reader.record, state_fingerprint={"0": "Aggregate"}))
    empty = planned(gone, discard_state={"things"}).of("things")
    assert empty.discards_state and empty.base.ends == {TOPIC: {0: 35}}


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"rebuild": {"others"}}, "stream others is not taken along"),
        ({"leave": {"things"}, "rebuild": {"things"}}, "stream things is named by two options"),
    ],
)
def test_a_choice_is_for_one_stream_that_goes_along(planned: Planned, choice: dict[str, set[str]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        planned(Topics(end=60), **choice)


def test_a_stream_that_was_left_may_start(reader: Life) -> None:
    def void_since(*left: str) -> int:
        void = VoidRange(0, 30, 60, "others-0001", 2, 1e12, left)
        topic_records.declare_void(reader.settings, TOPIC, TOPIC_ID, writer="others", path=(1, 2), ranges=[void])
        (topic,) = take_snapshot(reader.settings, STREAM, Topics(end=60)).topics
        return len(topic.void_since)

    assert (void_since(), void_since("things")) == (1, 0)
