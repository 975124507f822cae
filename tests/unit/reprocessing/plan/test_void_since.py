"""A savepoint that has read records which are void after a plan is not gone back to; one from before them is."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from reprocessing.plan.affected_streams import further_back, still_void
from reprocessing.plan.plan import StreamRecoveryPlan
from reprocessing.plan.snapshot import planning_snapshot
from reprocessing.plan.targets import Resolved, Target, resolve
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.sources.void_ranges import VoidRanges
from streaming_jobs.state import savepoints, topic_records
from streaming_jobs.state.savepoint_retention import take_named
from streaming_jobs.state.stream_record import Generation
from streaming_jobs.state.topic_records import VoidRange
from tests.support.life import Life, Topics, plan_one
from tests.support.life_flows import OTHERS, STREAM, TOPIC, TOPIC_ID

NAME = "before-release"


@pytest.fixture
def reader(tmp_path: Path) -> Life:
    """Six batches of ten records from the topic, which stream `others` is said to write."""
    writer = Life.begin(tmp_path, OTHERS)
    for number in range(6):
        writer.batch(number)
    return Life.of_batches(tmp_path, 6)


def recovered(life: Life, begin: int, end: int, *, number: int = 2, origin: int = 1, path: tuple[int, ...]) -> None:
    """A recovery of the writer declares offsets void, and opens a generation."""
    writer, now = Life(life.settings, OTHERS), time.time()
    opened = Generation(number, now, f"recovery others-000{number}", origin, 2)
    writer.save(replace(writer.record, generations=(*writer.record.generations, opened)))
    ranges = [VoidRange(0, begin, end, f"others-000{number}", number, now)]
    topic_records.declare_void(life.settings, TOPIC, TOPIC_ID, writer="others", path=path, ranges=ranges)


def moved(life: Life, target: Target, before: StreamRecoveryPlan | None = None) -> Txn | str | None:
    """The batch to which the target is moved back; 'stays' if it is not."""
    snapshot = planning_snapshot(life.settings, STREAM, Topics())
    resolved: Resolved = resolve(target, snapshot.view())
    result = further_back(snapshot, target, resolved, {} if before is None else {before.stream: before})
    return "stays" if result is None else result[1].batch


def test_a_savepoint_that_has_read_records_which_are_void_since(reader: Life) -> None:
    taken = savepoints.take(reader.settings, STREAM, reader.record, 3, "time")
    recovered(reader, 25, 60, path=(1, 2))
    assert moved(reader, Target("savepoint", taken.id)) == Txn(1, 1)
    assert moved(reader, Target("batch", "3")) == "stays", "what is on the path has read past it"


def test_the_plan_says_why_it_goes_back_further(reader: Life) -> None:
    taken = savepoints.take(reader.settings, STREAM, reader.record, 3, "time")
    recovered(reader, 25, 60, path=(1, 2))
    plan = plan_one(planning_snapshot(reader.settings, STREAM, Topics()), Target("savepoint", taken.id))
    assert plan.base.batch == 1 and any("are void after this plan" in note for note in plan.notes)


def test_a_savepoint_from_before_the_first_void_record_is_gone_back_to(reader: Life) -> None:
    taken = savepoints.take(reader.settings, STREAM, reader.record, 1, "time")
    recovered(reader, 25, 60, path=(1, 2))
    assert moved(reader, Target("savepoint", taken.id)) == "stays"


def test_a_savepoint_that_was_taken_past_the_void_range_is_gone_back_to(reader: Life) -> None:
    recovered(reader, 25, 35, path=(1, 2))
    taken = savepoints.take(reader.settings, STREAM, reader.record, 3, "time")
    assert moved(reader, Target("savepoint", taken.id)) == "stays"


def test_a_savepoint_that_lacks_records_which_count_again(reader: Life) -> None:
    recovered(reader, 25, 35, path=(1, 2))
    taken = savepoints.take(reader.settings, STREAM, reader.record, 3, "time")
    recovered(reader, 60, 90, number=3, origin=1, path=(1, 3))
    assert moved(reader, Target("savepoint", taken.id)) == Txn(1, 1)


def test_a_reader_ahead_of_the_writers_savepoint_is_taken_back_to_it(reader: Life) -> None:
    made = take_named(reader.settings, [STREAM, OTHERS], NAME)
    assert made.streams[STREAM.name] == "g0001-b000000005"
    writer = plan_one(planning_snapshot(reader.settings, OTHERS, Topics()), Target("batch", "2"))
    for wrong, expected in ((60, "stays"), (45, Txn(1, 3))):
        writer = replace(writer, wrong_from={TOPIC: {0: wrong}})
        assert moved(reader, Target("savepoint", NAME), writer) == expected


def test_a_batch_after_the_first_wrong_record_is_moved_back_too(reader: Life) -> None:
    writer = plan_one(planning_snapshot(reader.settings, OTHERS, Topics()), Target("batch", "2"))
    writer = replace(writer, wrong_from={TOPIC: {0: 30}})
    assert moved(reader, Target("batch", "3"), writer) == Txn(1, 2)
    assert moved(reader, Target("batch", "2"), writer) == "stays"


def test_void_offsets_that_the_plan_makes_count_again_are_replayed(reader: Life) -> None:
    recovered(reader, 25, 35, path=(1, 2))
    snapshot, today = planning_snapshot(reader.settings, STREAM, Topics()), VoidRanges.of([(0, 25, 35)])
    (topic,) = snapshot.planned_against.topics
    assert still_void(snapshot, topic, today, {}) == today
    writer = plan_one(planning_snapshot(reader.settings, OTHERS, Topics()), Target("batch", "1"))
    undoing = replace(writer, wrong_from={TOPIC: {0: 50}})  # it leaves generation 2, which declared them void
    assert still_void(snapshot, topic, today, {"others": undoing}) == VoidRanges()
    assert still_void(snapshot, replace(topic, topic_id="another"), today, {"others": undoing}) == today


def test_the_first_difference_of_two_sets_of_ranges() -> None:
    mine = VoidRanges.of([(0, 5, 9), (0, 20, 30), (1, 3, 4)])
    assert mine.first_difference(mine) == {}
    assert mine.first_difference(VoidRanges.of([(0, 5, 9), (0, 20, 40), (1, 3, 4)])) == {0: 30}
    assert mine.first_difference(VoidRanges.of([(0, 20, 30)])) == {0: 5, 1: 3}
    assert VoidRanges().first_difference(mine) == {0: 5, 1: 3}


def test_a_name_is_the_streams_own_savepoint_in_a_plan(reader: Life) -> None:
    take_named(reader.settings, [STREAM], NAME)
    reader.batch(6)
    plan = plan_one(planning_snapshot(reader.settings, STREAM, Topics()), Target("savepoint", NAME))
    assert plan.base.savepoint == "g0001-b000000005" and plan.target == f"savepoint {NAME}"
    assert f"{NAME} is savepoint g0001-b000000005 of stream things" in plan.notes
