"""Going forward over records that are not wanted, and going back without state: on a stream's life on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from reprocessing import executor
from reprocessing.explainer import explain
from reprocessing.plan.plan import Checks, StreamRecoveryPlan
from reprocessing.plan.plan_file import load, staging_folder
from reprocessing.plan.replay_range import until_target
from reprocessing.plan.targets import Target
from reprocessing.replay import staging
from reprocessing.stages.publish import PublishPosition, fence, publish
from reprocessing.stages.recovery import RecoveryContext, RecoveryEvents
from reprocessing.stages.reopen import abort, skip
from reprocessing.stages.stages import AuditRefused, Confirm, Fence, Publish, SwitchGeneration, TakeSavepoint, stages_of
from streaming_jobs.errors import ForeignWrite, PermanentError, PreflightRefused, UsageError
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import ledger_file, take_snapshot
from streaming_jobs.sinks.delta.content import content_of
from streaming_jobs.sinks.delta.sink import open_sink
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.checkpoint import copy
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import ADOPTED, CodeSince
from tests.support.life import STREAM, TOPIC, TOPIC_ID, Life, Topics, recovery, run_stage

pytestmark = pytest.mark.slow

TO_COME = Topics(end=120)


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Nine batches; the topic has thirty records more."""
    life = Life.of_batches(tmp_path, 9)
    life.topics = TO_COME
    return life


def working(life: Life, plan: StreamRecoveryPlan) -> RecoveryContext:
    return recovery(life, plan.id).of(STREAM.name)


def stopped(life: Life, target: Target, topics: Topics = TO_COME) -> RecoveryContext:
    """A plan, up to its savepoint."""
    context = replace(working(life, life.plan_to(target, topics=topics)), topics=topics)
    context.journal.write("take_savepoint", "done", run_stage(context, TakeSavepoint))
    return context


def begun(life: Life, target: Target, topics: Topics = TO_COME) -> RecoveryContext:
    """A plan, up to its fence."""
    context = stopped(life, target, topics)
    context.journal.write("fence", "begun")
    fence(life.settings, STREAM, context.plan.id, context.plan.generation)
    return context


def test_records_that_are_not_wanted_are_skipped(life: Life) -> None:
    rows = life.rows()
    context = begun(life, Target("offsets", "0:110"))
    plan = context.plan
    assert load(life.settings, plan.id).streams == (plan,) and plan.skips and not plan.records
    assert list(plan.skipped()) == [(TOPIC, 0, 90, 110)]
    assert [stage.name for stage in stages_of(load(life.settings, plan.id))] == [
        "take_savepoint",
        "fence",
        "confirm",
        "skip",
        "clean_up",
    ]
    text = explain(load(life.settings, plan.id))
    for words in ("skip ahead to offsets 0:110", "20 records are never read", "keeps its rows", "undo reads them"):
        assert words in text
    assert any("fenced" in each.found for each in life.refused())
    skip(context)
    skip(context)
    assert life.rows() == rows and life.at() == Txn(2, 8) and life.refused() == []
    checkpoint = StreamFolder.of(life.settings, STREAM.name).checkpoint(2)
    assert checkpoint.end(8) == {TOPIC: {0: 110}} and checkpoint.last_committed == 8
    record = life.record
    assert (record.generation, record.generations[-1].from_generation, record.generations[-1].from_batch) == (2, 1, 8)
    assert [(v["from"], v["to"], v["plan"]) for v in record.void_ranges] == [(90, 110, plan.id)]


def test_what_the_topic_has_lost_unread_is_skipped_with_the_command_that_the_refusal_names(life: Life) -> None:
    topics = Topics(first=95, end=120)
    around = take_snapshot(life.settings, STREAM, topics)
    lost = next(f for f in check_start(around) if f.severity == "lost")
    assert lost.next_step.endswith("recourse recover plan things --to-offsets 0:95")
    context = begun(life, Target("offsets", "0:95"), topics)
    assert list(context.plan.skipped()) == [(TOPIC, 0, 90, 95)]
    skip(context)
    around = take_snapshot(life.settings, STREAM, topics)
    assert [f for f in check_start(around) if f.severity != "warn"] == []


def test_a_skip_that_was_killed_between_two_tables_goes_on(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    context = begun(life, Target("latest"))

    def killed(point: str, *_: object) -> None:
        raise KeyboardInterrupt(point)

    with monkeypatch.context() as patched:
        patched.setattr("reprocessing.stages.recovery.crash_point", killed)
        with pytest.raises(KeyboardInterrupt, match="recover_skip_between"):
            skip(context)
    assert life.record.generation == 1 and life.refused()
    skip(context)
    assert life.at() == Txn(2, 8) and life.refused() == [] and len(life.record.void_ranges) == 1


def test_a_skip_can_be_given_up_before_it_has_begun(life: Life) -> None:
    context = begun(life, Target("latest"))
    abort(context)
    assert life.at() == Txn(3, 8) and life.record.void_ranges == () and life.refused() == []
    assert StreamFolder.of(life.settings, STREAM.name).checkpoint(3).end(8) == {TOPIC: {0: 90}}


@pytest.mark.parametrize("unfinished", [False, True])
def test_an_abort_keeps_a_change_that_was_accepted_since_and_refuses_another(life: Life, unfinished: bool) -> None:
    if unfinished:
        life.batch(9, commit=False)
    context = begun(life, Target("batch", "3"))
    rows = len(life.rows())
    version = life.meddle()
    with pytest.raises(ForeignWrite):
        abort(context)
    life.accept(version)
    if unfinished:
        with pytest.raises(PreflightRefused, match="came after a batch that was not finished"):
            abort(context)
    else:
        abort(context)
        assert len(DeltaTable(life.table).to_pyarrow_table()) == rows + 1 and life.at() == Txn(3, 8)


@pytest.mark.parametrize(("until", "said"), [("batch 5", None), ("batch 9", "90 to 99 are read")])
def test_a_bounded_plan_says_what_it_reads_that_was_skipped(life: Life, until: str, said: str | None) -> None:
    life.savepoint(5)
    skip(begun(life, Target("offsets", "0:100")))
    life.run(9, 10, generation=2)
    plan = life.plan_to(Target("batch", "3"), until=until_target(until))
    assert [note for note in plan.notes if "skipped them" in note] == (
        [f"things partition 0: {said}; things-0001 skipped them"] if said else []
    )


def test_a_plan_that_goes_back_says_what_it_reads_that_was_skipped(life: Life) -> None:
    life.savepoint(3)
    skip(begun(life, Target("latest")))
    plan = life.plan_to(Target("savepoint", "g0001-b000000003"))
    assert any("90 to 119 are read; things-0001 skipped them" in note for note in plan.notes)
    with pytest.raises(UsageError, match="is at things 0:120 already"):
        life.plan_to(Target("latest"))


@pytest.mark.parametrize(
    ("target", "done", "keeps_state", "words"),
    [
        (Target("offsets", "0:100"), True, False, "has read past the plan's offsets"),
        (Target("offsets", "0:95"), False, False, "has read past the plan's offsets"),
        (Target("latest"), False, True, "the state does not know it yet"),
    ],
)
def test_a_skip_is_refused_once_the_stream_is_past_it_or_has_a_batch_that_its_state_lacks(
    life: Life, target: Target, done: bool, keeps_state: bool, words: str
) -> None:
    """Killed between the table's commit and Spark's: with the checkpoint at 8, batch 9 is in the table."""
    if keeps_state:
        stateful(life)
    plan = life.plan_to(target)
    life.batch(9, commit=done)
    with pytest.raises(UsageError, match=words):
        run_stage(working(life, plan), TakeSavepoint)


def test_a_batch_that_is_in_the_table_alone_stays_where_nothing_but_the_tables_has_to_know_it(life: Life) -> None:
    life.batch(9, commit=False)
    skip(begun(life, Target("offsets", "0:110")))
    assert life.rows() == list(range(100)) and life.at() == Txn(2, 8) and life.refused() == []
    assert StreamFolder.of(life.settings, STREAM.name).checkpoint(2).end(8) == {TOPIC: {0: 110}}
    assert [(v["from"], v["to"]) for v in life.record.void_ranges] == [(100, 110)]


def test_a_stream_that_ran_on_before_the_fence_is_kept_again(life: Life) -> None:
    """Killed or refused between keep and fence, nothing forbids a start: what it read must not be lost."""
    context = stopped(life, Target("offsets", "0:110"))
    life.batch(9)
    context.journal.write("fence", "done", run_stage(context, Fence))
    skip(context)
    assert life.rows() == list(range(100)) and life.record.generations[-1].from_batch == 9
    assert [(v["from"], v["to"]) for v in life.record.void_ranges] == [(100, 110)]


def test_what_somebody_else_wrote_before_the_fence_is_seen(life: Life) -> None:
    context = stopped(life, Target("latest"))
    life.meddle()
    with pytest.raises(ForeignWrite):
        run_stage(context, Fence)


def test_an_abort_before_the_first_fence_touches_nothing(life: Life) -> None:
    context = stopped(life, Target("latest"))
    context.journal.write("fence", "begun")
    life.batch(9)
    abort(context)
    assert life.rows() == list(range(100)) and life.record.generation == 1 and life.refused() == []


def test_a_number_names_the_batch_and_not_the_border_behind_a_skip(life: Life) -> None:
    skip(begun(life, Target("offsets", "0:110")))
    batch = life.snapshot().history.numbered(8)
    assert batch is not None and batch.txn == Txn(1, 8)
    assert life.snapshot().history.position == {TOPIC: {0: 110}}


def test_rows_of_a_batch_that_only_a_further_table_has_do_not_come_twice(life: Life) -> None:
    """Killed between the two tables' commits, then somebody's accepted change on the one that is ahead."""
    sink = open_sink(life.settings, all_tables(STREAM)[1][0], STREAM.name)
    assert sink is not None
    entry = LedgerEntry("batch", STREAM.name, sink.name, 1, 9)
    sink.commit(entry, lambda *_: None)
    context = begun(life, Target("batch", "3"))
    schema = pa.schema(DeltaTable(sink.path).schema().to_arrow())
    values = {pa.string(): "x", pa.int32(): 0, pa.int64(): 0, pa.binary(): b"x"}
    row = {f.name: values.get(f.type, datetime.now(UTC) if pa.types.is_timestamp(f.type) else None) for f in schema}
    write_deltalake(sink.path, pa.Table.from_pylist([row], schema=schema), mode="append")
    version = DeltaTable(sink.path).version()
    life.accept(version, sink.name)
    with pytest.raises(PreflightRefused, match="came after a batch that was not finished"):
        abort(context)


def test_a_copy_is_on_disk_before_it_counts(life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(
        "os.fsync", lambda descriptor: synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    taken = life.savepoint(5, "purpose")
    copy(savepoints.checkpoint_of(life.settings, taken), tmp_path / "state" / "copy")
    for name in ("checkpoint.partial/offsets/5", "copy.partial/offsets/5", "copy.partial/commits/5"):
        assert any(path.endswith(name) for path in synced), name


def test_behind_a_skip_there_is_a_border_to_go_back_to(life: Life) -> None:
    skip(begun(life, Target("offsets", "0:110")))
    life.change(code=(*life.record.code, CodeSince("z", "1", 2, 9, 1.0)))
    life.batch(9, generation=2, code="z")
    line = replace(life.entry(9, 2, "z"), offsets=(OffsetRange(TOPIC, TOPIC_ID, {0: 110}, {0: 120}),))
    ledger_file(life.settings, STREAM.name).append(line, {"things": life.sink().handle.version()})
    for target in (Target("code", "z"), Target("offsets", "0:112")):
        plan = life.plan_to(target)
        assert (plan.base.generation, plan.base.batch, plan.base.ends) == (2, 8, {TOPIC: {0: 110}})
        assert not any("skipped" in note for note in plan.notes)


def test_what_a_recovery_replayed_has_no_version_of_its_own_to_be_kept(life: Life) -> None:
    """The checkpoint can be cut after a replayed batch; the table shows it only together with those after it."""
    plan = life.plan_to(Target("batch", "3"))
    base = savepoints.find(life.settings, STREAM.name, plan.base.savepoint or "")
    fence(life.settings, STREAM, plan.id, 2)
    staging.prepare(life.settings, STREAM, plan, life.record, base)
    Life(staging.settings_of(life.settings, plan)).run(*range(4, 9), generation=2, code="z")
    context = working(life, plan)
    run_stage(context, Publish)
    run_stage(context, SwitchGeneration)
    assert life.rows() == list(range(90)) and life.record.generation == 2
    with pytest.raises(PreflightRefused, match="was replayed by plan"):
        life.savepoint(5, "purpose")
    again = life.plan_to(Target("batch", "5"))
    assert base is not None and again.base.savepoint == base.id
    taken = life.savepoint(8, "purpose")
    assert (
        sum(len(life.rows(t)) for t in [life.table]) == 90 and taken.tables[0].version == life.sink().handle.version()
    )


def test_nothing_is_skipped_unless_somebody_agrees(life: Life) -> None:
    plan = life.plan_to(Target("latest"))
    whole = recovery(life, plan.id, events=RecoveryEvents(confirm=lambda _: False))
    whole.of(STREAM.name).journal.write("take_savepoint", "done", TakeSavepoint(plan).run(whole))
    with pytest.raises(AuditRefused, match="not confirmed"):
        Confirm((plan,)).run(whole)
    whole.journal.write("confirm", "failed")
    assert whole.journal.outcome == "refused"


def test_what_is_not_replayed_is_not_checked(life: Life) -> None:
    with pytest.raises(UsageError, match="nothing to check"):
        life.plan_to(Target("latest"), Checks(("id > 0",)))


def stateful(life: Life) -> None:
    life.change(state_fingerprint={"0": "Aggregate"})


def test_without_its_state_a_stream_begins_again_on_the_savepoints_rows(life: Life) -> None:
    stateful(life)
    plan = life.plan_to(Target("batch", "3"), discard_state=True)
    assert plan.discards_state and load(life.settings, plan.id).streams == (plan,)
    text = explain(load(life.settings, plan.id))
    assert "discarded. What will be wrong" in text and "state starts empty" in text
    base = savepoints.find(life.settings, STREAM.name, plan.base.savepoint or "")
    staging.prepare(life.settings, STREAM, plan, life.record, base)
    replay_settings = staging.settings_of(life.settings, plan)
    record = stream_record.load(replay_settings, STREAM.name)
    assert record is not None and record.state_fingerprint == {} and record.topics[0].start == {0: 40}
    assert record.generations[-1].restarts and record.generations[-1].from_batch == 3
    assert not StreamFolder.of(replay_settings, STREAM.name).checkpoint(2).folder.exists()
    assert life.rows(replay_settings.tables / "things") == list(range(40))
    around = take_snapshot(replay_settings, STREAM, TO_COME)
    assert [f for f in check_start(around) if f.severity == "refuse"] == []
    assert around.tables[0].txn == Txn(2, -1)


def test_where_the_records_are_gone_too_the_tables_begin_empty(life: Life) -> None:
    stateful(life)
    life.topics = Topics(first=35, end=120)
    with pytest.raises(UsageError, match="cannot go back that far") as refused:
        life.plan_to(Target("earliest"))
    assert "--discard-state" in refused.value.next_step
    plan = life.plan_to(Target("earliest"), discard_state=True)
    assert plan.base.savepoint is None and plan.base.ends == {TOPIC: {0: 35}} and plan.records == 85
    assert any("the tables begin empty at the target" in note for note in plan.notes)
    staging.prepare(life.settings, STREAM, plan, life.record, None)
    staging.sync_all(life.settings, plan)
    record = stream_record.load(staging.settings_of(life.settings, plan), STREAM.name)
    assert record is not None and record.topics[0].start == {0: 35}


def test_a_stream_that_has_adopted_a_job_does_not_go_back_to_before_that(life: Life) -> None:
    first = replace(life.record.generations[0], reason=f"{ADOPTED} 7c1e after batch 3")
    life.change(generations=(first, *life.record.generations[1:]))
    assert life.plan_to(Target("batch", "3")).base.savepoint is not None
    with pytest.raises(UsageError, match="without the rows of the job that it has adopted"):
        life.plan_to(Target("batch", "-1"))


def test_where_the_targets_own_records_are_gone_it_begins_with_the_first_that_is_left(life: Life) -> None:
    stateful(life)
    life.forget(5)
    life.topics = Topics(first=65, end=120)
    for target in (Target("batch", "3"), Target("batch", "-1")):
        plan = life.plan_to(target, discard_state=True)
        assert plan.discards_state and plan.base.ends == {TOPIC: {0: 65}} and plan.records == 55
        assert any("the first that the topic still has" in note for note in plan.notes)


def test_nothing_is_discarded_where_nothing_is_replayed(life: Life) -> None:
    stateful(life)
    life.savepoint(8, "purpose")
    with pytest.raises(UsageError, match="nothing to replay"):
        life.plan_to(Target("savepoint", "g0001-b000000008"), topics=Topics(), discard_state=True)


def test_savepoints_reach_back_further_than_the_ledger(life: Life) -> None:
    life.savepoint(2, "purpose")
    life.forget(5)
    ledger = ledger_file(life.settings, STREAM.name)
    day = next(ledger.folder.glob("*.jsonl"))
    day.write_text("\n".join(day.read_text().splitlines()[5:]) + "\n")
    plan = life.plan_to(Target("offsets", "0:45"))
    assert plan.base.savepoint == "g0001-b000000002"
    life.change(code=(CodeSince("z", "1", 1, 4, 1.0),))
    assert life.plan_to(Target("code", "z")).base.savepoint == "g0001-b000000002"
    savepoints.drop(life.settings, STREAM, "g0001-b000000002")
    with pytest.raises(UsageError, match="no longer in the ledger"):
        life.plan_to(Target("code", "z"))


def test_state_is_discarded_where_there_is_any_and_it_matters(life: Life) -> None:
    with pytest.raises(UsageError, match="keeps no state"):
        life.plan_to(Target("batch", "3"), discard_state=True)
    stateful(life)
    assert not life.plan_to(Target("batch", "-1"), discard_state=True).discards_state


def publishing(life: Life) -> RecoveryContext:
    """A plan that goes back, whose publish is begun; staging holds what the savepoint held."""
    context = begun(life, Target("batch", "3"))
    context.journal.write("fence", "done")
    staging.prepare(life.settings, STREAM, context.plan, context.record, context.base())
    for stage in ("prepare", "replay", "audit"):
        context.journal.write(stage, "done")
    context.journal.write("publish", "begun")
    return context


def skipping(life: Life) -> RecoveryContext:
    """A plan that skips ahead, whose skip is begun."""
    context = begun(life, Target("offsets", "0:110"))
    context.journal.write("fence", "done")
    context.journal.write("skip", "begun")
    return context


@pytest.mark.parametrize("reached", [publishing, skipping])
def test_what_has_begun_and_committed_nothing_can_be_given_up(
    life: Life, reached: Callable[[Life], RecoveryContext]
) -> None:
    rows, context = life.rows(), reached(life)
    executor.give_up(recovery(life, context.plan.id, context.topics))
    assert context.journal.outcome == "aborted" and context.record.generation == 3
    assert life.rows() == rows and not life.refused() and not context.record.void_ranges


def test_a_publish_that_can_never_be_committed_can_be_given_up(life: Life) -> None:
    """Somebody has made the table append-only since the plan was made."""
    rows = life.rows()
    context = publishing(life)
    life.sink().handle.alter.set_table_properties({"delta.appendOnly": "true"})
    staged = {t.name: content_of(staging_folder(life.settings, context.plan) / t.name) for t in context.record.tables}
    done: list[str] = []
    with pytest.raises(PermanentError, match="append-only"):
        publish(
            life.settings,
            STREAM,
            staged,
            record=context.record,
            plan=context.plan.id,
            position=PublishPosition(Txn(2, 3), life.entry(3).offsets, CodeVersion("fixed", "1")),
            between=done.append,
        )
    assert done == ["things_dead_letters"]
    executor.give_up(recovery(life, context.plan.id, context.topics))
    assert context.journal.outcome == "aborted" and context.record.generation == 3
    assert life.rows() == rows and not life.refused(), "also the table that was published goes on as it was"


def test_a_publish_that_the_primary_table_has_is_finished_and_not_given_up(life: Life) -> None:
    context = publishing(life)
    life.sink().commit(LedgerEntry("publish", STREAM.name, "things", 2, 8, plan=context.plan.id), lambda *_: None)
    with pytest.raises(UsageError, match="has published table things,") as refused:
        executor.give_up(recovery(life, context.plan.id, context.topics))
    assert f"recover resume {context.plan.id}" in refused.value.next_step
    assert f"recover undo {context.plan.id}" in refused.value.next_step
