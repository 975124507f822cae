"""The streams that read what a recovery changes: which they are, and where each goes back to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.types import LongType, StructField, StructType

from reprocessing.explainer import explain
from reprocessing.plan import planner
from reprocessing.plan.affected_streams import (
    Along,
    downstream,
    further_back,
    left_out,
    refuse_in_first_batch,
    refuse_others,
    refuse_undeclared,
    still_void,
    through_tables,
)
from reprocessing.plan.journal import journal_of
from reprocessing.plan.plan import RecoveryPlan, StreamRecoveryPlan
from reprocessing.plan.plan_file import load
from reprocessing.plan.planner import RecoveryRequest, make_plan
from reprocessing.plan.snapshot import PlanningSnapshot, planning_snapshot
from reprocessing.plan.targets import Resolved, Target, resolve
from reprocessing.plan.void_records import NOTHING_WRITTEN, WrittenAtPlanning
from reprocessing.stages.beside import reason_to_stop_first
from reprocessing.stages.stages import stages_of
from streaming_jobs.catalog.archive import archive
from streaming_jobs.declare.lookup import Lookup
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.errors import UsageError
from streaming_jobs.examples.shop.streams import LEVELS, availability, stock, stock_changes
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.preflight.snapshot import take_snapshot
from streaming_jobs.settings import Settings
from streaming_jobs.sources.void_ranges import VoidRanges
from streaming_jobs.state import stream_record, topic_records
from streaming_jobs.state.lease import take
from streaming_jobs.state.savepoint_retention import take_named
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import BoundTopic, Generation
from streaming_jobs.state.topic_records import VoidRange
from streaming_jobs.stream import DeltaTable, Stream
from tests.support.life import OTHERS, STREAM, TOPIC, TOPIC_ID, Life, Topics, plan_one
from tests.support.stream_on_disk import lay_offsets

Planned = Callable[..., RecoveryPlan]


@pytest.fixture
def reader(tmp_path: Path) -> Life:
    """`things` reads what `others` is taken to write: both have six batches of the topic."""
    Life.of_batches(tmp_path, 6)
    others = Life.begin(tmp_path, OTHERS)
    others.run(*range(6))
    return Life(others.settings)


@pytest.fixture
def planned(reader: Life, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Plan `others` back to batch 4; from offset 30 on, what it has written becomes void."""

    def written(snapshot: PlanningSnapshot, *_: Any, **__: Any) -> WrittenAtPlanning:
        is_writer = snapshot.stream.name == OTHERS.name
        return WrittenAtPlanning({TOPIC: {0: 30}}, {TOPIC: {0: 60}}) if is_writer else NOTHING_WRITTEN

    monkeypatch.setattr(planner, "written_topics", written)
    monkeypatch.setattr(planner, "all_streams", lambda *_: {each.name: each for each in (OTHERS, STREAM)})
    monkeypatch.setattr(planner, "downstream", lambda *_: [OTHERS.name, STREAM.name])

    def plan(topics: Topics, **choice: set[str]) -> RecoveryPlan:
        snapshot = planning_snapshot(reader.settings, OTHERS, topics)
        along = Along(**{name: frozenset(streams) for name, streams in choice.items()})
        made = make_plan(reader.settings, [RecoveryRequest(snapshot, Target("batch", "4"))], along=along)
        assert load(reader.settings, made.id) == made
        return made

    return plan


def test_without_a_choice_it_goes_back_to_before_the_first_wrong_record(planned: Planned) -> None:
    plan = planned(Topics(end=60))
    assert plan.names == ("others", "things") and plan.of("things").base.batch == 2 and plan.left == ()


def test_the_writer_of_a_topic_is_followed_and_its_reader_replayed_after_it(planned: Planned) -> None:
    made = planned(Topics(end=60))
    writer = made.of("others")
    orders = tuple(replace(topic, name="orders") for topic in writer.saw.topics)
    reader = replace(made.of("things"), rate=11.0)
    plan = replace(made, streams=(replace(writer, saw=replace(writer.saw, topics=orders)), reader))
    assert [each.stream for each in plan.followed] == ["others"] and reason_to_stop_first(plan) is None
    order = [(stage.name, stage.stream) for stage in stages_of(plan, beside=True)]
    assert ("follow", "things") not in order and ("append_records", "things") not in order
    names = ["follow", "compare", "take_savepoint", "fence", "void_records", "append_records", "replay"]
    assert [*dict.fromkeys(name for name, _ in order if name in names)] == names
    assert order.index(("replay", "others")) < order.index(("replay", "things"))
    assert "append_records" not in {stage.name for stage in stages_of(plan)}
    resumed = [stage.name for stage in stages_of(plan, staged=True)]  # it has followed, and its stream has ended since
    assert resumed.index("prepare") < resumed.index("append_records") < resumed.index("replay")
    text = explain(plan, stages_of(plan, beside=True))
    still = (
        "for seconds at the end, plus about 1 s to append to things, for 30 offsets "
        "at an assumed 20,000 a second, plus about 3 s to replay 30 "
        "records of things"
    )
    assert f"the stream runs meanwhile, and stands still {still}, its tables stay readable" in text, text
    assert "the stream runs until the other streams' replays have caught up, and stands still for seconds" in text
    assert "to append" not in explain(plan) and "and stands still" not in explain(plan)
    alone = replace(plan, streams=(plan.of("things"),))
    assert [each.stream for each in alone.followed] == ["things"], "nothing is appended to its topic"


def test_a_plan_says_how_long_an_append_takes_by_the_rate_of_the_newest_one_that_tells(
    reader: Life, planned: Planned
) -> None:
    def appended(records: int, seconds: float) -> RecoveryPlan:
        plan = planned(Topics(end=60))
        found = {"records": 9_000, "appended": records, "seconds": seconds}
        for stream in plan.names:
            journal_of(reader.settings, plan.id).write("append_records", "done", found, stream=stream)
        journal_of(reader.settings, plan.id).write("abort", "done")
        return plan

    assert appended(9_000, 1.0).of("others").append_rate is None
    assert appended(2_000, 4.0).of("others").append_rate == 9_000.0
    assert appended(999, 0.5).of("others").append_rate == 500.0, "the rate of the plan before"
    assert appended(5_000, 0.0).of("others").append_rate == 500.0
    plan = planned(Topics(end=60))
    assert (plan.of("others").append_rate, plan.of("things").append_rate) == (500.0, None)
    orders = tuple(replace(topic, name="orders") for topic in plan.of("others").saw.topics)
    writer = replace(plan.of("others"), saw=replace(plan.of("others").saw, topics=orders))
    text = explain(one := replace(plan, streams=(writer, plan.of("things"))), stages_of(one, beside=True))
    assert "for 30 offsets at 500 a second, as in the recovery before" in text


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

    reader.change(state_fingerprint={"0": "Aggregate"})
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


SCHEMA = StructType([StructField("pieces", LongType())])


def same(rows: DataFrame) -> DataFrame:
    return rows


REPORT = Stream("report", same, {"rows": DeltaSource("availability", schema=SCHEMA)}, {"r": DeltaTable("report")})
COPY = Stream("copy", same, {"rows": LEVELS}, {"c": DeltaTable("copy")})
STREAMS = {each.name: each for each in (REPORT, archive(LEVELS), COPY, availability, stock, stock_changes)}


def test_the_readers_of_topics_and_tables_are_taken_along_in_the_order_of_records() -> None:
    assert downstream(STREAMS, ["stock_changes"]) == ["stock_changes", "stock", "copy", "availability", "report"]
    assert downstream(STREAMS, ["availability"]) == ["availability", "report"]
    looks_up = replace(COPY, function=lambda rows, levels: rows, lookups={"levels": Lookup("availability")})
    assert downstream({**STREAMS, "copy": looks_up}, ["availability"]) == ["availability", "report"]


@pytest.fixture
def read(tmp_path: Path) -> Settings:
    """Settings with a state folder of their own."""
    return Settings.load({"home": tmp_path})


def refuse(settings: Settings) -> None:
    refuse_others(settings, {"copy": COPY}, [LEVELS.name], [])


def test_a_reader_that_did_not_begin_is_left_out(read: Settings) -> None:
    refuse(read)
    refuse_in_first_batch(read, COPY)


def test_a_reader_that_runs_is_not_left_out_also_before_its_first_batch(read: Settings) -> None:
    with take(read, "copy", purpose="session"):
        with pytest.raises(UsageError, match="has routed records"):
            refuse(read)
        with pytest.raises(UsageError, match="runs, and has finished no batch"):
            refuse_in_first_batch(read, COPY)
    refuse(read)


def test_a_reader_that_was_ended_in_its_first_batch_repeats_it_past_the_void_ranges(
    read: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = stream_record.first("copy")
    stream_record.save(read, record)
    offsets = StreamFolder.of(read, "copy").checkpoint(record.generation).folder / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "0").write_text("v1\n{}\n{}\n")
    refuse(read)
    refuse_in_first_batch(read, COPY)
    for position in (Txn(1, -1), Txn(1, 0)):
        tables = {"letters": SimpleNamespace(position=position)}
        monkeypatch.setattr("reprocessing.plan.affected_streams.open_tables", lambda *_, tables=tables: tables)
        if position.batch < 0:
            refuse_in_first_batch(read, COPY)
            continue
        with pytest.raises(UsageError, match="ended in its first batch, which some of its tables"):
            refuse_in_first_batch(read, COPY)
        with pytest.raises(UsageError, match="has routed records"):
            refuse(read)


def test_a_topic_may_have_the_first_batch_of_a_reader_that_was_ended(read: Settings) -> None:
    record = stream_record.first(stock.name)
    stream_record.save(read, record)
    offsets = StreamFolder.of(read, stock.name).checkpoint(record.generation).folder / "offsets"
    offsets.mkdir(parents=True)
    refuse_in_first_batch(read, stock)
    (offsets / "0").write_text("v1\n{}\n{}\n")
    with pytest.raises(UsageError, match="start the stream over: move"):
        refuse_in_first_batch(read, stock)


def test_the_readers_of_tables_are_another_matter() -> None:
    assert through_tables(STREAMS, ["stock_changes"]) == ["report"]
    assert through_tables(STREAMS, ["copy"]) == []


def begun(read: Settings, name: str, topic_id: str = TOPIC_ID) -> None:
    """A stream of this home has planned a batch of the topic, whether or not it is declared now."""
    topic = BoundTopic(LEVELS.name, topic_id, {0: 0})
    stream_record.save(read, replace(stream_record.first(name), topics=(topic,)))
    lay_offsets(
        StreamFolder.of(read, name).checkpoint(1).folder, 0, {LEVELS.name: {0: 9}}, starts={LEVELS.name: {0: 0}}
    )


def test_a_reader_that_is_not_declared_now_is_found_by_its_record(read: Settings) -> None:
    begun(read, "copy")
    refuse_undeclared(read, ["copy"], [LEVELS.name], Topics())
    refuse_undeclared(read, [], ["another"], Topics())
    with pytest.raises(UsageError, match=f"stream copy has read topic {LEVELS.name}, .* not declared now") as refused:
        refuse_undeclared(read, ["stock"], [LEVELS.name], Topics())
    assert "declare it again" in refused.value.next_step and "its tables stay" in refused.value.next_step


def test_a_record_of_an_earlier_topic_of_the_name_or_without_a_batch_is_no_reader(read: Settings) -> None:
    begun(read, "copy", topic_id="the one before")
    topic = BoundTopic(LEVELS.name, TOPIC_ID, {0: 0})
    stream_record.save(read, replace(stream_record.first("fresh"), topics=(topic,)))
    refuse_undeclared(read, [], [LEVELS.name], Topics())


def test_an_undeclared_reader_that_has_begun_since_the_plan_ends_it(
    read: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reprocessing.plan.affected_streams.all_streams", lambda *_: {})
    writer = cast("StreamRecoveryPlan", SimpleNamespace(wrong_from={LEVELS.name: {0: 3}}, skips=True))
    plan = cast("RecoveryPlan", SimpleNamespace(streams=(writer,), names=("stock",), left=()))
    assert left_out(read, plan, [], Topics()) == []
    begun(read, "copy")
    assert left_out(read, plan, [], Topics()) == ["copy"]


NAME = "before-release"


def recovered(life: Life, begin: int, end: int, *, number: int = 2, origin: int = 1, path: tuple[int, ...]) -> None:
    """A recovery of the writer declares offsets void, and opens a generation."""
    writer, now = Life(life.settings, OTHERS), time.time()
    opened = Generation(number, now, f"recovery others-000{number}", origin, 2)
    writer.change(generations=(*writer.record.generations, opened))
    ranges = [VoidRange(0, begin, end, f"others-000{number}", number, now)]
    topic_records.declare_void(life.settings, TOPIC, TOPIC_ID, writer="others", path=path, ranges=ranges)


def moved(life: Life, target: Target, before: StreamRecoveryPlan | None = None) -> Txn | str | None:
    """The batch to which the target is moved back; 'stays' if it is not."""
    snapshot = life.snapshot()
    resolved: Resolved = resolve(target, snapshot.view())
    result = further_back(snapshot, target, resolved, {} if before is None else {before.stream: before})
    return "stays" if result is None else result[1].batch


FIRST, SECOND = {"begin": 25, "end": 35, "path": (1, 2)}, {"begin": 60, "end": 90, "number": 3, "path": (1, 3)}


@pytest.mark.parametrize(
    ("earlier", "batch", "later", "back_to"),
    [
        ((), 3, [{**FIRST, "end": 60}], Txn(1, 1)),  # it has read records that are void since
        ((), 1, [{**FIRST, "end": 60}], "stays"),  # it is from before the first of them
        ([FIRST], 3, (), "stays"),  # it was taken past the void range
        ([FIRST], 3, [SECOND], Txn(1, 1)),  # it lacks records that count again
    ],
)
def test_a_savepoint_is_gone_back_to_if_it_has_read_what_counts_and_nothing_else(
    reader: Life, earlier: Any, batch: int, later: Any, back_to: Txn | str
) -> None:
    for each in earlier:
        recovered(reader, **each)
    taken = reader.savepoint(batch)
    for each in later:
        recovered(reader, **each)
    assert moved(reader, Target("savepoint", taken.id)) == back_to
    assert moved(reader, Target("batch", str(batch))) == "stays", "what is on the path has read past it"


def test_the_plan_says_why_it_goes_back_further(reader: Life) -> None:
    taken = reader.savepoint(3)
    recovered(reader, 25, 60, path=(1, 2))
    plan = reader.plan_to(Target("savepoint", taken.id))
    assert plan.base.batch == 1 and any("are void after this plan" in note for note in plan.notes)


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
    snapshot, today = reader.snapshot(), VoidRanges.of([(0, 25, 35)])
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
    plan = reader.plan_to(Target("savepoint", NAME))
    assert plan.base.savepoint == "g0001-b000000005" and plan.target == f"savepoint {NAME}"
    assert f"{NAME} is savepoint g0001-b000000005 of stream things" in plan.notes
