"""Bounded recoveries without Kafka and Spark: the replay is written by hand, as in `test_any_store.py`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql.types import LongType, StructField

from reprocessing import executor
from reprocessing.explainer import explain
from reprocessing.plan import registry
from reprocessing.plan.first_bad_row import before_first_bad
from reprocessing.plan.history import corrections, has_present_rows
from reprocessing.plan.plan import NO_CHECKS, Checks, RecoveryPlan, StreamRecoveryPlan
from reprocessing.plan.plan_file import load
from reprocessing.plan.planner import RecoveryRequest, make_plan
from reprocessing.plan.snapshot import planning_snapshot
from reprocessing.plan.targets import Target
from reprocessing.replay.session import ReplayFailure, ReplayResult, ReplaySession, last_entry
from reprocessing.stages import replay as replay_stage
from reprocessing.stages.recovery import Recovery, RecoveryContext, RecoveryEvents
from reprocessing.stages.stages import AuditRefused
from streaming_jobs.declare.rules import NotNull
from streaming_jobs.errors import PermanentError, PreflightRefused, UsageError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.log import noted as noted_in
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.tables import begin_late, open_tables
from streaming_jobs.state import savepoints
from streaming_jobs.state.slice_requests import SliceCommitRequest, SliceRequests
from streaming_jobs.state.stream_record import CodeSince, CorrectedBatches, Generation
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import Stream
from tests.support.life import PER_BATCH, Life, Topics, in_memory, run_stages, undo_one
from tests.support.life import recovery as recovery_of
from tests.support.life_flows import OTHERS, STREAM, TOPIC, TOPIC_ID

pytestmark = pytest.mark.slow

BATCHES, WRONG = 9, range(3, 6)
"""Batches 3 to 5 are wrong; those after them are right."""
END = 120
TOPICS = Topics(end=END)
BEFORE = sorted(-n if n // PER_BATCH in WRONG else n for n in range(BATCHES * PER_BATCH))
RIGHT = list(range(BATCHES * PER_BATCH))
UNTIL = Target("batch", "5")


def in_delta() -> Stream:
    tables = {name: Declared(name, partition_by=["place"]) for name in ("things", "copies")}
    return replace(STREAM, sinks=tables)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a stream of Delta tables, which each test gets a copy of."""
    return Life.begin(tmp_path_factory.mktemp("made"), in_delta(), TOPICS).run_three_codes().settings.home


IN_BOTH_STORES = pytest.mark.parametrize("life", [in_delta, in_memory], indirect=True)
"""For what is done with files; a table in memory shows the rest, and in a quarter of the time."""


@pytest.fixture(params=[in_memory, pytest.param(in_delta, marks=pytest.mark.long)])
def life(request: pytest.FixtureRequest, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    monkeypatch.setattr("streaming_jobs.runtime.code_version.package_version", lambda: "1")
    return (
        copied(made, tmp_path)
        if request.param is in_delta
        else Life.begin(tmp_path, in_memory(), TOPICS).run_three_codes()
    )


@pytest.fixture
def delta(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    monkeypatch.setattr("streaming_jobs.runtime.code_version.package_version", lambda: "1")
    return copied(made, tmp_path)


def copied(made: Path, home: Path) -> Life:
    shutil.copytree(made, home, dirs_exist_ok=True)
    return Life(Settings.load({"home": home}), in_delta(), TOPICS)


def in_each_store(short: Mapping[str, Callable[[], Stream]], *names: str) -> Any:
    """Each name with each store; those are short that have the store which `short` gives to the name."""
    stores = [(name, store) for name in names for store in (in_delta, in_memory)]
    marked = {False: pytest.mark.long}
    return [
        pytest.param(store, name, marks=marked.get(short.get(name, in_memory) is store, ())) for name, store in stores
    ]


def planned(
    life: Life,
    target: Target = Target("batch", "2"),  # noqa: B008
    checks: Checks = NO_CHECKS,
    until: Target | None = UNTIL,
) -> RecoveryPlan:
    snapshot = life.snapshot()
    return make_plan(life.settings, [RecoveryRequest(snapshot, target, checks, until=until)])


def recovery(
    life: Life, plan: RecoveryPlan | StreamRecoveryPlan, replaying: Callable[[RecoveryContext], Any] | None = None
) -> Recovery:
    return recovery_of(life, plan.id, replay=replaying or replay)


def replay(context: RecoveryContext, *, wrong: bool = False) -> Mapping[str, Any]:
    """As the session does it, to the end of batch 5."""
    staged, first = Life(context.replay_settings, context.stream), context.plan.base.batch + 1
    for number in range(first, 6 if context.plan.until else END // PER_BATCH):
        staged.plan(number, generation=context.plan.generation)
        staged.batch(number, generation=context.plan.generation, code="fixed", wrong=wrong)
    last = last_entry(context.replay_settings, context.stream)
    ends = {TOPIC: dict(last.offsets[0].end)}
    return {"batch": last.batch, "seconds": 0.1, "records": 30, "since": 0, "ends": ends}


def files(life: Life, name: str = "things") -> set[str]:
    return set(DeltaTable(life.settings.tables / name).file_uris())


@IN_BOTH_STORES
def test_only_the_range_is_corrected_and_the_stream_continues_after_its_last_batch(life: Life) -> None:
    plan = planned(life)
    assert plan.records == 30 and load(life.settings, plan.id) == plan
    text = explain(plan)
    for words in (
        "rewind to batch 2, until batch 5",
        "30 records",
        "add the rows that came after batch 5",
        "9. clean_up",
    ):
        assert words in text
    whole = recovery(life, plan)
    context = run_stages(whole, until="publish")
    assert life.ids() == life.ids("copies") == BEFORE
    compared = {d.table: (*d.counts, d.old_rows, d.new_rows) for d in whole.differences}
    assert compared["things"] == compared["copies"] == (30, 0, 0, 60, 60), "later rows are not part of it"
    run_stages(whole)
    assert life.ids() == life.ids("copies") == RIGHT and life.at() == Txn(2, BATCHES - 1)
    assert context.result("add_later_rows")["later_files"]["things"]["split"] == 0
    generation = life.record.generations[-1]
    assert (generation.number, generation.from_generation, generation.from_batch) == (2, 1, BATCHES - 1)
    read = (OffsetRange(TOPIC, TOPIC_ID, {0: 30}, {0: 60}),)
    assert generation.corrected == CorrectedBatches(Txn(1, 2), Txn(1, 5), read, {"written": 30}, "fixed")
    assert life.refused() == []
    assert whole.journal.outcome == "published" and not (life.settings.tables / "_staging").exists()
    life.batch(BATCHES, generation=2, code="b")
    assert life.ids() == list(range((BATCHES + 1) * PER_BATCH))
    assert not has_present_rows(life.record.generations, Txn(1, 4)), "its savepoints have wrong rows"
    assert has_present_rows(life.record.generations, Txn(1, 2)) and has_present_rows(life.record.generations, Txn(2, 9))


def compact(life: Life, name: str) -> None:
    """One file per partition, as the stream's own upkeep does it."""
    entry = LedgerEntry("upkeep", life.stream.name, name, 1, -1, note="compacted")
    DeltaTable(life.settings.tables / name).optimize.compact(commit_properties=noted_in(entry))


def compacted(life: Life) -> Life:
    """Savepoints of batches 2 and 5; after batch 7 all rows so far are in one file per partition."""

    def then(number: int) -> None:
        if number in (2, 5):
            life.savepoint(number)
        if number == 7:
            compact(life, "things")

    return life.run_three_codes(then)


@pytest.mark.parametrize("with_compaction", [False, True])
def test_later_rows_keep_their_files_and_files_of_both_are_split(tmp_path: Path, with_compaction: bool) -> None:
    life = Life.begin(tmp_path, in_delta(), TOPICS)
    compacted(life) if with_compaction else life.run_three_codes()
    then = files(life)
    whole = recovery(life, planned(life))
    context = run_stages(whole)
    assert life.ids() == life.ids("copies") == RIGHT and life.refused() == []
    pure = {uri for uri in then if min(ids_of(uri)) >= (80 if with_compaction else 60)}
    assert len(pure) == (5 if with_compaction else 15)
    assert pure <= files(life), "the files with later rows alone are the same"
    found = context.result("add_later_rows")["later_files"]["things"]
    assert found == ({"whole": 5, "split": 5} if with_compaction else {"whole": 15, "split": 0})
    published = {each["table"]: each for each in context.result("publish")["tables"]}["things"]
    if with_compaction:  # in: the files of K, those of the replay, the split ones
        assert (published["went"], published["stayed"]) == (5, 5)
    else:
        assert (published["came"], published["went"], published["stayed"]) == (15, 15, 30)


def ids_of(uri: str) -> list[int]:
    return [abs(n) for n in pq.read_table(uri.removeprefix("file://"), columns=["id"])["id"].to_pylist()]


@IN_BOTH_STORES
def test_it_is_taken_back_with_all_rows_of_before(life: Life) -> None:
    plan = planned(life)
    run_stages(recovery(life, plan))
    taken_back = undo_one(life, plan.id)
    assert taken_back.until is None and taken_back.base.batch == BATCHES - 1
    assert any("corrected rows of savepoint g0001-b000000008" in note for note in taken_back.notes)
    run_stages(recovery(life, taken_back))
    assert life.ids() == life.ids("copies") == sorted([*BEFORE, *range(BATCHES * PER_BATCH, END)])
    assert has_present_rows(life.record.generations, Txn(1, 4)), "the corrected generation is not on the path"
    assert life.refused() == []


def test_a_recovery_that_added_a_column_is_taken_back(delta: Life) -> None:
    """The rows of before lack the column; it stays in the table, and is null in all of them."""

    def adding(context: RecoveryContext) -> Mapping[str, Any]:
        for name in ("things", "copies"):
            stored = context.staged()[name]
            assert isinstance(stored, DeltaSink)
            stored.add_columns([StructField("total", LongType())], context.plan.generation)
        return replay(context)

    plan = planned(delta, until=None)
    run_stages(recovery(delta, plan, adding))
    assert "total" in delta.stored().schema.fieldNames()
    run_stages(recovery(delta, undo_one(delta, plan.id)))
    assert delta.ids() == sorted([*BEFORE, *range(BATCHES * PER_BATCH, END)])
    rows = DeltaTable(delta.settings.tables / "things").to_pyarrow_table()
    assert rows["total"].null_count == rows.num_rows


@pytest.mark.parametrize(
    ("life", "reached"),
    in_each_store({"publish": in_delta}, "prepare", "replay", "add_later_rows", "audit", "publish"),
    indirect=["life"],
)
def test_it_can_be_given_up_until_it_has_published(life: Life, reached: str) -> None:
    whole = recovery(life, planned(life))
    run_stages(whole, until=reached)
    executor.give_up(whole)
    assert life.ids() == life.ids("copies") == BEFORE and life.at() == Txn(3, BATCHES - 1) and life.refused() == []
    assert not (life.settings.tables / "_staging").exists() and whole.journal.outcome == "aborted"


@pytest.mark.parametrize(
    ("life", "stage"),
    in_each_store(
        {"add_later_rows": in_delta, "publish": in_delta}, "add_later_rows", "publish", "continue_generation"
    ),
    indirect=["life"],
)
def test_a_stage_that_was_killed_in_its_middle_begins_again(
    life: Life, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = recovery(life, planned(life))

    def killed(_: RecoveryContext, point: str) -> None:
        if point == f"recover_{stage}_between":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RecoveryContext, "crash_point", killed)
        run_stages(whole)
    assert whole.journal.done(stage, STREAM.name) is None
    run_stages(whole)
    assert life.ids() == life.ids("copies") == RIGHT and life.refused() == [] and life.record.generation == 2


def test_a_batch_that_a_kill_has_repeated_counts_once(life: Life) -> None:
    def resumed(context: RecoveryContext) -> Mapping[str, Any]:
        found, staged = replay(context), Life(context.replay_settings, context.stream)
        staged.ledger_file.append(staged.entry(5, context.plan.generation, "fixed"), {})
        return found

    run_stages(recovery(life, planned(life), resumed))
    corrected = life.record.generations[-1].corrected
    assert corrected is not None and corrected.rows == {"written": 30}


def test_rebuilt_rows_without_a_column_of_the_table_are_not_published(delta: Life) -> None:
    """The later rows have the column, and the rebuilt ones would have nulls in it."""
    for name in ("things", "copies"):
        stored = delta.stored(name)
        assert isinstance(stored, DeltaSink)
        stored.add_columns([StructField("more", LongType())], 1)
    delta.batch(BATCHES)
    plan = planned(delta)
    whole = recovery(delta, plan)
    with pytest.raises(AuditRefused, match="column more of table things is long, in the rebuilt one gone"):
        run_stages(whole)
    executor.give_up(whole)
    assert delta.record.generation == 3


def test_later_rows_that_would_change_are_not_published(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit counts all rows, whatever was done with files."""
    adding = type(life.stored()).add_later_rows

    def less(table: Any, now: Any, then: Any) -> Any:
        return adding(table, then, then) if table.name == "copies" else adding(table, now, then)

    monkeypatch.setattr(type(life.stored()), "add_later_rows", less)
    whole = recovery(life, planned(life))
    with pytest.raises(AuditRefused, match="30 rows of table copies after batch 5 would not be the same as before"):
        run_stages(whole)
    executor.give_up(whole)
    assert life.ids() == life.ids("copies") == BEFORE


@pytest.mark.parametrize("bounded", [False, True])
def test_a_replay_that_ends_elsewhere_than_planned_says_what_to_look_at(
    delta: Life, monkeypatch: pytest.MonkeyPatch, *, bounded: bool
) -> None:
    """A bounded one is measured against the end that the plan names, any other against the kept tables."""
    plan = planned(delta, until=UNTIL if bounded else None)
    context = run_stages(recovery(delta, plan), until="replay")
    asked: list[ReplaySession] = []

    def run(session: ReplaySession, _: object) -> ReplayResult:
        asked.append(session)
        failure = ReplayFailure("REC-021", "the replay ended at 40", "see whether the topic still has these records")
        return ReplayResult(LedgerEntry("batch", "things", "things", 2, 5), failure)

    monkeypatch.setattr(ReplaySession, "run", run)
    with pytest.raises(PermanentError, match="the replay ended at 40") as error:
        replay_stage.replay(context)
    assert error.value.next_step.startswith("see whether the topic still has these records; give it up: recourse")
    end = context.plan.until.ends if context.plan.until else context.kept().ends
    assert (asked[0].bounded, asked[0].ends) == (bounded, end)


@pytest.mark.parametrize("bounded", [False, True])
def test_the_audit_reads_only_files_that_differ(delta: Life, monkeypatch: pytest.MonkeyPatch, *, bounded: bool) -> None:
    """Files that the tables share have the same rows on both sides, however many they are."""
    plan = planned(delta, until=UNTIL if bounded else None)
    whole, read = recovery(delta, plan), set[int]()
    run_stages(whole, until="audit")
    register = QueryBuilder.register

    def registered(data: QueryBuilder, name: str, table: DeltaTable) -> QueryBuilder:
        if name != "t":  # a count of rows, which the log answers
            read.update(Path(file).stat().st_ino for file in table.file_uris() if "/_differing/" not in file)
        return register(data, name, table)

    monkeypatch.setattr(QueryBuilder, "register", registered)
    run_stages(whole, until="publish")
    shared = [Path(file).stat().st_ino for file in files(delta) if int(ids_of(file)[0]) in range(30)]
    assert shared and read, "those of the savepoint, and those that were rebuilt"
    assert not read & set(shared)
    by_table = {d.table: d for d in whole.differences}
    assert {by_table[name].read for name in ("things", "copies")} == {(30, 30) if bounded else (60, 90)}
    assert by_table["things"].old_rows == (60 if bounded else 90), "rows are counted all the same"


def test_a_rule_is_about_the_rebuilt_rows_alone(life: Life) -> None:
    """Rows after the end are left alone, whatever they are."""
    checks = Checks(("id < 60",), 1.0)
    run_stages(recovery(life, planned(life, checks=checks)))
    assert life.ids() == RIGHT
    other = recovery(life, planned_again(life, Checks(("id < 50",))))
    with pytest.raises(AuditRefused, match="10 rows break the rule id < 50"):
        run_stages(other)


def planned_again(life: Life, checks: Checks) -> RecoveryPlan:
    life.savepoint(BATCHES - 1)
    life.batch(BATCHES, generation=2)
    return planned(life, checks=checks, until=Target("savepoint", f"g0002-b{BATCHES - 1:09d}"))


def test_suites_judge_the_content_that_is_published(life: Life) -> None:
    judged: list[list[int]] = []

    def run_suite(rebuilt: Any, suite: str) -> list[str]:
        judged.append(Life(rebuilt.replay_settings, rebuilt.stream).ids())
        return []

    plan = planned(life, checks=Checks(suites=("plausible",)))
    run_stages(recovery_of(life, plan.id, replay=replay, run_suite=run_suite))
    assert judged == [RIGHT]


def test_a_change_of_somebody_else_that_is_accepted_meanwhile_ends_it(life: Life) -> None:
    whole = recovery(life, planned(life))
    run_stages(whole, until="publish")
    life.accept(99, "copies", "by hand")
    with pytest.raises(PreflightRefused, match=r"version 99 of table copies was accepted \(by hand\)"):
        run_stages(whole)
    assert life.ids() == BEFORE


@pytest.mark.parametrize("last", [6, 7])
def test_a_last_batch_that_is_not_finished_is_refused_before_the_fence(tmp_path: Path, last: int) -> None:
    """It is in the tables, and Spark has not noted that it is done: its rows would vanish, and then come again."""
    life = Life.begin(tmp_path, in_delta(), TOPICS)
    for number in range(last + 1):
        life.batch(number, wrong=number in WRONG, commit=number < last)
    whole = recovery(life, planned(life))
    with pytest.raises(UsageError, match=f"batch {last} is in the tables, and the checkpoint does not know") as refused:
        run_stages(whole)
    assert "without --until" in refused.value.next_step
    assert life.at() == Txn(1, last) and whole.journal.done("fence", STREAM.name) is None
    life.finish(last)
    run_stages(whole)
    assert life.ids() == list(range((last + 1) * PER_BATCH)) and life.refused() == []


def slice_rebuilt(life: Life, batch: int, *, noted: bool) -> int:
    """A slice of the table is rebuilt, as a driver does it; a kill may leave its outcome out."""
    table, name = life.stored(), f"things-{batch}"
    assert isinstance(table, DeltaSink)
    entry = LedgerEntry("slice", STREAM.name, table.name, 1, batch, plan=name)
    made = DeltaTable(table.path)
    first, *_ = made.get_add_actions().to_struct_array().to_pylist()
    made.delete(f"id = {first['min']['id']}", commit_properties=noted_in(entry))
    if noted:
        requests = SliceRequests.of(life.settings, STREAM.name)
        request = SliceCommitRequest(name, STREAM.name, table.name, entry.encode(), {}, 1.0, {"slice": "a day"})
        requests.ask(request)
        requests.end(request.ended("committed", version=made.version()))
    return made.version()


@pytest.mark.parametrize(
    ("reached", "noted"),
    [
        ("take_savepoint", True),
        ("publish", False),
        *(
            pytest.param(reached, noted, marks=pytest.mark.long)
            for reached, noted in (
                ("take_savepoint", False),
                ("add_later_rows", True),
                ("add_later_rows", False),
                ("publish", True),
            )
        ),
    ],
)
def test_a_slice_that_is_rebuilt_after_the_plan_was_made_ends_it(delta: Life, reached: str, noted: bool) -> None:
    """Rows of its version cannot be told apart by those as of the last batch to correct."""
    whole = recovery(delta, planned(delta))
    run_stages(whole, until=reached)
    version = slice_rebuilt(delta, BATCHES - 1, noted=noted)
    words = "slice a day of table things was rebuilt after g0001 batch 5" if noted else f"in version {version}"
    with pytest.raises(PreflightRefused, match=words) as refused:
        run_stages(whole)
    assert whole.journal.done(reached, STREAM.name) is None and "recover abort" in refused.value.next_step
    assert delta.record.generation == 1


def test_a_slice_that_waits_ends_it_before_the_fence(life: Life) -> None:
    whole, entry = recovery(life, planned(life)), LedgerEntry("slice", STREAM.name, "things", 1, 8).encode()
    request = SliceCommitRequest("things-1", STREAM.name, "things", entry, {}, 1.0, {"slice": "a day"})
    SliceRequests.of(life.settings, STREAM.name).ask(request)
    with pytest.raises(PreflightRefused, match="slice a day of table things waits for its commit"):
        run_stages(whole)
    assert whole.journal.done("take_savepoint", STREAM.name) is None


def test_after_the_last_commit_of_a_publish_an_accepted_change_does_not_end_it(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort is refused from that commit on, the third, so resume must go on."""
    whole, points = recovery(life, planned(life)), list[str]()

    def killed(_: RecoveryContext, point: str) -> None:
        points.append(point)
        if points.count("recover_publish_between") == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RecoveryContext, "crash_point", killed)
        run_stages(whole)
    life.accept(99, why="by hand")
    with pytest.raises(UsageError, match="has published table things"):
        executor.give_up(whole)
    run_stages(whole)
    assert life.ids() == RIGHT and whole.journal.outcome == "published"


def test_without_the_savepoint_of_its_end_it_does_not_begin(life: Life) -> None:
    plan = planned(life)
    assert registry.needed_savepoints(life.settings, STREAM.name) == {}
    whole = recovery(life, plan)
    whole.journal.write("take_savepoint", "begun", stream=STREAM.name)
    needed = registry.needed_savepoints(life.settings, STREAM.name)
    assert needed == {"g0001-b000000002": plan.id, "g0001-b000000005": plan.id}
    savepoints.drop(life.settings, life.stream, "g0001-b000000005")
    with pytest.raises(PreflightRefused, match="savepoint g0001-b000000005 of stream things is gone"):
        run_stages(whole)
    assert whole.journal.done("fence", STREAM.name) is None


def test_a_second_recovery_starts_from_rows_that_no_first_one_has_corrected(life: Life) -> None:
    run_stages(recovery(life, planned(life)))
    life.batch(BATCHES, generation=2)
    again = planned(life, Target("batch", "6"), until=None)
    assert again.streams[0].base.savepoint == "g0001-b000000002", "that of batch 5 has wrong rows"
    assert planned(life, Target("batch", "8"), until=None).streams[0].base.batch in (2, 8)


def test_the_last_batch_before_a_bounded_recovery_is_named_as_it_is_after_it(life: Life) -> None:
    """Its own rows are those from before the correction; the empty batch of the same number has the present ones."""
    run_stages(recovery(life, planned(life)))
    life.batch(BATCHES, generation=2)
    again = planned(life, Target("batch", "2"), until=Target("batch", str(BATCHES - 1))).streams[0]
    assert again.until is not None and again.until.txn == Txn(2, BATCHES - 1)
    assert planned(life, Target("batch", "8"), until=None).streams[0].base.savepoint == "g0002-b000000008"


def test_what_code_has_written_in_a_bounded_replay_is_found_with_its_other_rows(life: Life) -> None:
    """It ran on from batch 9, and the rows of batches 3 to 5 are its own too."""
    run_stages(recovery(life, planned(life), lambda context: replay(context, wrong=True)))
    life.batch(BATCHES, generation=2, code="fixed")
    life.change(code=(*life.record.code, CodeSince("fixed", "1", 2, BATCHES, 3.0)))
    assert planned(life, Target("code", "fixed"), until=None).streams[0].base.savepoint == "g0001-b000000002"
    snapshot = life.snapshot()
    _, resolved = before_first_bad(snapshot, "id < 0", exact=False)
    assert resolved.batch == Txn(1, 2) and "written by code fixed, which ran since g0001 batch 3" in resolved.notes[0]


def test_of_two_bounded_recoveries_the_one_whose_rows_are_gone_does_not_count() -> None:
    first = Generation(2, 1.0, "", 1, 8, corrected=CorrectedBatches(Txn(1, 2), Txn(1, 5), code="c"))
    partly = Generation(3, 1.0, "", 2, 9, corrected=CorrectedBatches(Txn(1, 3), Txn(1, 5), code="d"))
    whole = Generation(4, 1.0, "", 3, 9, corrected=CorrectedBatches(Txn(1, 1), Txn(1, 5), code="e"))
    begin = Generation(1, 1.0, "")
    assert [each.code for each in corrections((begin, first, partly))] == ["d", "c"]
    assert [each.code for each in corrections((begin, first, partly, whole))] == ["e"]


def test_a_quarantine_that_is_younger_than_its_savepoints_begins_empty(life: Life) -> None:
    judged = Life(life.settings, replace(life.stream, rules={"things": [NotNull("id", on_fail="quarantine")]}))

    def as_a_start_does(context: RecoveryContext) -> Mapping[str, Any]:
        begin_late(context.replay_settings, context.stream, generation=context.plan.generation)
        return replay(context)

    run_stages(recovery(judged, planned(judged), as_a_start_does))
    assert judged.ids() == judged.ids("copies") == RIGHT and judged.refused(TOPICS) == []
    assert open_tables(life.settings, judged.stream)["things_quarantine"].position == Txn(2, BATCHES - 1)


def test_two_streams_are_corrected_by_one_plan(tmp_path: Path) -> None:
    """The second one as a whole: its replay goes to the topic's end."""
    lives = [
        Life.begin(tmp_path, in_delta(), TOPICS).run_three_codes(),
        Life.begin(tmp_path, OTHERS, TOPICS).run_three_codes(),
    ]
    snapshots = [planning_snapshot(each.settings, each.stream, TOPICS) for each in lives]
    ends = (UNTIL, None)
    requests = [
        RecoveryRequest(each, Target("offsets", "0:30"), until=until)
        for each, until in zip(snapshots, ends, strict=True)
    ]
    plan = make_plan(lives[0].settings, requests)
    whole = executor.recovery_of(
        lives[0].settings, [each.stream for each in lives], TOPICS, plan, RecoveryEvents(), replay=replay
    )
    run_stages(whole)
    assert lives[0].ids() == RIGHT and lives[1].ids() == list(range(END))
    assert [each.record.generations[-1].from_batch for each in lives] == [BATCHES - 1, 2]
