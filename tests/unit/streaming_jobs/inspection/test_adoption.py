"""A stream goes on where another job has stopped: two writes, each of which may be killed, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable as Table

from streaming_jobs.errors import CommitRefused, UsageError
from streaming_jobs.formats import Json
from streaming_jobs.inspection import adoption, inspection
from streaming_jobs.inspection.adoption import (
    AdoptionPlan,
    CarriedState,
    TryState,
    adopt,
    plan_adoption,
    plan_undo,
    undo,
)
from streaming_jobs.inspection.checkpoint_history import CheckpointHistory
from streaming_jobs.ledger.entry import LedgerEntry, Txn, app_id
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import take_snapshot
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.log import STREAM_PROPERTY, moving
from streaming_jobs.sinks.delta.sink import open_sink
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import BoundTable
from streaming_jobs.stream import DeltaTable, KafkaTopic, Stream, stream
from tests.support.plain_histories import TOPIC, JobKind, PlainJob
from tests.unit.streaming_jobs.inspection.test_inspection import note_entry, read, state_of

COLUMNS = {"id": "string", "partition": "int", "offset": "bigint"}


@stream(source=KafkaTopic(TOPIC, value=Json(COLUMNS)), sink=DeltaTable("orders"))
def orders(orders: Any) -> Any:
    """The job's rows, by Recourse."""
    return orders


class TwoPartitions:
    """A topic with two partitions, as an admin client would describe it."""

    def __init__(self, earliest: int = 0, latest: int = 1_000) -> None:
        self.bounds = OffsetBounds(dict.fromkeys((0, 1), earliest), dict.fromkeys((0, 1), latest))

    def describe(self, name: str) -> TopicInfo:
        return TopicInfo(name, "topic-1", 2, -1, "delete")

    def offsets(self, _: str) -> OffsetBounds:
        return self.bounds

    def latest(self, _: str) -> dict[int, int]:
        return self.bounds.latest

    def high_watermarks(self, _: str) -> dict[int, int]:
        return self.bounds.latest

    def offsets_for_time(self, _: str, ms: int) -> dict[int, int]:
        return self.bounds.latest

    def mean_size(self, _: str, starts: Any) -> float | None:
        return None


MakeJob = Callable[[JobKind], PlainJob]


@pytest.fixture
def make_job(home: Settings, tmp_path: Path) -> MakeJob:
    """Makes a job whose table lies where the stream's does."""

    def make(kind: JobKind) -> PlainJob:
        (tmp_path / "job").mkdir()
        job = PlainJob(tmp_path / "job", random.Random(3), kind)
        assert isinstance(home.tables, Path)
        home.tables.mkdir(parents=True)
        job.table.rename(home.tables / "orders")
        job.table = home.tables / "orders"
        return job

    return make


def no_state(history: CheckpointHistory, batch: int) -> CarriedState:
    raise AssertionError("the job has no state")


def fits(history: CheckpointHistory, batch: int) -> CarriedState:
    return CarriedState(batch, 3, {"0": "Aggregate"})


def plan(
    home: Settings, job: PlainJob, declared: Stream = orders, try_state: TryState = no_state, **options: Any
) -> AdoptionPlan:
    return plan_adoption(home, declared, job.checkpoint, TwoPartitions(), try_state, **options)


def keep_state(job: PlainJob) -> None:
    """Lay the files of an operator's state beside the job's batches; nothing reads their content."""
    for partition in range(2):
        folder = job.checkpoint / "state" / "0" / str(partition)
        folder.mkdir(parents=True, exist_ok=True)
        for version in range(1, len(job.batches) + 1):
            (folder / f"{version}.delta").write_bytes(b"%d" % version)


def adopted(home: Settings, job: PlainJob, before: dict[str, Any]) -> None:
    """Preflight lets the stream start where the job has stopped, and rows and checkpoint are as they were."""
    record = stream_record.existing(home, "orders")
    assert record.starts == {TOPIC: dict(enumerate(job.position))} and record.adopted
    table = Table(str(job.table))
    assert table.metadata().configuration[STREAM_PROPERTY] == "orders"
    assert table.transaction_version(app_id("orders", "orders")) == Txn(1, -1).version
    assert sorted(Path(path).name for path in table.file_uris()) == sorted(job.live)
    assert state_of(job.root) == before
    assert check_start(take_snapshot(home, orders, TwoPartitions())) == []


@pytest.mark.parametrize("kind", ["sink", "append", "append-once", "merge"])
def test_a_stream_starts_where_the_job_has_stopped_and_nothing_else_has_changed(
    home: Settings, make_job: MakeJob, kind: JobKind
) -> None:
    job = make_job(kind)
    job.run(4)
    job.optimize()
    job.cut_log()
    job.run(2)
    before, shown = state_of(job.root), plan(home, job)
    assert (shown.batch, shown.starts) == (5, {TOPIC: dict(enumerate(job.position))}) and not shown.recorded
    assert stream_record.load(home, "orders") is None, "a plan writes nothing"
    assert adopt(home, orders, shown) is True
    adopted(home, job, before)
    accepted = stream_record.existing(home, "orders").accepts("orders")
    assert {job.version - 1, job.version} <= accepted <= set(range(job.version + 1)), "for the verifier"
    assert adopt(home, orders, plan(home, job)) is False, "it was done before"


@pytest.mark.parametrize("place", ["before the record", "after the record", "after the commit"])
def test_an_adoption_that_is_killed_is_finished_by_the_next_and_no_stream_starts_in_between(
    home: Settings, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    job = make_job("append")
    job.run(3)
    before, shown = state_of(job.root), plan(home, job)
    with monkeypatch.context() as killed:
        if place == "before the record":
            killed.setattr(stream_record, "save", _die)
        elif place == "after the record":
            killed.setattr(adoption, "_take_over", _die)
        else:
            killed.setattr(adoption.DeltaSink, "sync", _die)
        with pytest.raises(KeyboardInterrupt):
            adopt(home, orders, shown)
    if place != "after the commit":
        refused = check_start(take_snapshot(home, orders, TwoPartitions()))
        assert "was not made by Recourse" in refused[0].found
    again = plan(home, job)
    assert again.recorded is (place != "before the record")
    assert adopt(home, orders, again) is (place != "after the commit")
    adopted(home, job, before)


def test_a_job_that_has_gone_on_after_a_killed_adoption_is_adopted_at_its_new_end(
    home: Settings, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("sink")
    job.run(3)
    with monkeypatch.context() as killed:
        killed.setattr(adoption, "_take_over", _die)
        with pytest.raises(KeyboardInterrupt):
            adopt(home, orders, plan(home, job))
    shown = plan(home, job)
    job.run(2)
    with pytest.raises(CommitRefused, match="the job still runs"):
        adopt(home, orders, shown)
    before = state_of(job.root)
    assert adopt(home, orders, plan(home, job)) is True
    adopted(home, job, before)


def test_a_commit_of_the_job_after_the_adoption_refuses_the_start(home: Settings, make_job: MakeJob) -> None:
    job = make_job("sink")
    job.run(3)
    adopt(home, orders, plan(home, job))
    job.before.append(dict(job.live))  # the version of the adoption
    job.run(1)
    [refused] = check_start(take_snapshot(home, orders, TwoPartitions()))
    assert "changed rows and was not written by stream orders" in refused.found


def test_a_batch_that_was_planned_and_not_committed_has_to_be_decided(home: Settings, make_job: MakeJob) -> None:
    job = make_job("append")
    job.run(3, kill="written")
    with pytest.raises(UsageError, match="its rows are in the table") as refused:
        plan(home, job)
    assert "--after-batch 2, which keeps these rows" in refused.value.next_step
    assert plan(home, job, after=2).starts == {TOPIC: dict(enumerate(job.position))}
    assert plan(home, job, after=1).starts == {TOPIC: dict(enumerate(job.batches[1].end))}
    with pytest.raises(UsageError, match="batch 0 is not the job's last one"):
        plan(home, job, after=0)


def put_back(job: PlainJob) -> None:
    job.run(6)
    job.put_back_checkpoint(3)


def put_back_with_the_table(job: PlainJob) -> None:
    put_back(job)
    job.restore(job.version - 2)


def earlier_life(job: PlainJob) -> None:
    job.run(4)
    job.wipe_checkpoint([0, 0])
    job.run(6)


def earlier_query(job: PlainJob) -> None:
    job.run(4)
    job.delete_checkpoint([0, 0])
    job.run(2)


def other_program(job: PlainJob) -> None:
    job.run(3)
    job.append_by_hand(4)


def other_program_before(job: PlainJob) -> None:
    other_program(job)
    job.run(1)


def deleted_rows(job: PlainJob) -> None:
    job.run(4)
    job.delete_rows(0.5)


def damaged_in_between(job: PlainJob) -> None:
    job.run(5)
    (job.checkpoint / "offsets" / "1").write_text("v1\n{")


@pytest.mark.parametrize(
    ("kind", "story", "words"),
    [
        ("sink", put_back, "the checkpoint ends at batch 3"),
        ("append-once", put_back, "the checkpoint ends at batch 3"),
        ("append", put_back, "batches from before the checkpoint was put back"),
        ("merge", put_back, "batches from before the checkpoint was put back"),
        ("sink", put_back_with_the_table, None),
        ("append", put_back_with_the_table, None),
        ("sink", earlier_life, "an earlier checkpoint wrote them"),
        ("sink", earlier_query, "its checkpoint was not given"),
        ("sink", other_program, r"version 3 \(WRITE\) .* is of no batch"),
        ("append", other_program, r"version 3 \(WRITE\) .* is of no batch"),
        ("append", other_program_before, None),
        ("append", deleted_rows, None),
        ("append", damaged_in_between, "offsets/1 cannot be read"),
    ],
)
def test_a_table_that_may_end_after_the_last_batch_is_adopted_only_despite_the_findings(
    home: Settings, make_job: MakeJob, kind: JobKind, story: Callable[[PlainJob], None], words: str | None
) -> None:
    job = make_job(kind)
    story(job)
    if words is not None:
        with pytest.raises(UsageError, match=words) as refused:
            plan(home, job)
        assert "--despite-findings" in refused.value.next_step
    shown = plan(home, job, despite_findings=words is not None)
    assert shown.starts == {TOPIC: dict(enumerate(job.position))}


def test_a_table_that_recourse_wrote_after_the_job_is_adopted_only_despite_the_findings(
    home: Settings, make_job: MakeJob
) -> None:
    job = make_job("sink")
    job.run(3)
    job.commit("WRITE", {"mode": "Append"}, add=[[(-1, -1, 1)]])
    note_entry(job, 3, LedgerEntry("batch", "another", "orders", 1, 7, (read(job, 0, 2),)))
    with pytest.raises(UsageError, match="Recourse wrote version 3"):
        plan(home, job)


def test_a_batch_that_delta_would_skip_is_kept_only_despite_the_findings(home: Settings, make_job: MakeJob) -> None:
    job = make_job("sink")
    job.run(4, kill="written")
    job.restore(job.version - 1)
    with pytest.raises(UsageError, match="Delta skips it"):
        plan(home, job, after=3)
    assert plan(home, job, after=2).batch == 2


@pytest.mark.parametrize("kind", ["sink", "append", "append-once", "merge"])
def test_the_checkpoint_of_another_job_is_refused(home: Settings, make_job: MakeJob, kind: JobKind) -> None:
    job = make_job(kind)
    job.run(5)
    (job.root / "other").mkdir()
    other = PlainJob(job.root / "other", random.Random(9), kind, clock=1_760_000_000.0)
    other.run(2)
    # an application may be that of an earlier checkpoint
    words = "an earlier checkpoint wrote them" if kind == "append-once" else "no commit in its log is of checkpoint"
    with pytest.raises(UsageError, match=words):
        plan_adoption(home, orders, other.checkpoint, TwoPartitions(), no_state)


@pytest.mark.parametrize("file", ["offsets/4", "metadata"])
@pytest.mark.parametrize("text", [None, "", "v1", "v1\n{", "v1\n{}\n{"])
def test_a_damaged_end_of_the_checkpoint_is_refused_and_not_stepped_over(
    home: Settings, make_job: MakeJob, file: str, text: str | None
) -> None:
    job = make_job("append")
    job.run(5)
    if text is None:
        (job.checkpoint / file).unlink()
    else:
        (job.checkpoint / file).write_text(text)
    with pytest.raises(UsageError, match="newest entries of .* cannot be used: .*offsets/4|has no query id: metadata"):
        plan(home, job, despite_findings=True)


@pytest.mark.parametrize("late", ["read_checkpoint", "read_table"])
def test_a_batch_that_the_job_commits_while_it_is_inspected_refuses_the_plan(
    home: Settings, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    job = make_job("append")
    job.run(4)
    reads = getattr(inspection, late)

    def read_late(folder: Any) -> Any:
        job.run(1)
        return reads(folder)

    monkeypatch.setattr(inspection, late, read_late)
    with pytest.raises(UsageError, match="changed while they were read|the job still runs"):
        plan(home, job, despite_findings=True)


def test_a_batch_that_the_job_has_planned_since_the_plan_refuses_the_adoption(
    home: Settings, make_job: MakeJob
) -> None:
    job = make_job("append")
    job.run(4)
    shown = plan(home, job)
    job.run(1, kill="planned")
    with pytest.raises(CommitRefused, match="has other newest entries than in the plan"):
        adopt(home, orders, shown)
    assert stream_record.load(home, "orders") is None


def test_the_table_of_another_stream_is_not_taken(home: Settings, make_job: MakeJob) -> None:
    job = make_job("sink")
    job.run(3)
    shown = plan(home, job)
    Table(str(job.table)).alter.set_table_properties({STREAM_PROPERTY: "another"}, raise_if_not_exists=False)
    with pytest.raises(UsageError, match="belongs to stream another"):
        plan(home, job, despite_findings=True)
    with pytest.raises(UsageError, match="belongs to stream another"):
        adopt(home, orders, shown)


def test_a_resumed_adoption_accepts_the_commits_that_it_has_shown(
    home: Settings, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("append")
    job.run(3)
    with monkeypatch.context() as killed:
        killed.setattr(adoption, "_take_over", _die)
        with pytest.raises(KeyboardInterrupt):
            adopt(home, orders, plan(home, job))
    job.delete_rows(0.5)
    again = plan(home, job)
    assert again.recorded and again.accepted == (0, 1, 2, 3)
    assert adopt(home, orders, again) is True
    assert stream_record.existing(home, "orders").accepts("orders") == {0, 1, 2, 3}


def test_a_job_that_was_killed_in_its_first_batch_gets_an_advice_that_can_be_followed(
    home: Settings, make_job: MakeJob
) -> None:
    job = make_job("append")
    job.run(1, kill="planned")
    job.commit("CREATE TABLE", {}, add=[])
    with pytest.raises(UsageError, match="batch 0 of the job was planned and not committed") as refused:
        plan(home, job)
    assert "let the job finish the batch; or declare a new stream" in refused.value.next_step
    with pytest.raises(UsageError, match="is not the job's last one") as refused:
        plan(home, job, after=4)
    assert refused.value.next_step == "name batch 0"


def test_what_does_not_fit_is_refused_before_anything_is_written(home: Settings, make_job: MakeJob) -> None:
    job = make_job("sink")
    job.run(3)
    upsert = DeltaTable("orders", keys=["id"], order_by=["offset"])
    for declared, words in (
        (
            stream(source=KafkaTopic("other", value=Json(COLUMNS)), sink=DeltaTable("orders"), name="o")(
                lambda other: other
            ),
            "reads",
        ),
        (
            stream(source=KafkaTopic(TOPIC, value=Json(COLUMNS)), sink=upsert, name="up")(lambda orders: orders),
            "no order",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            plan(home, job, declared)
    for topics in (TwoPartitions(earliest=500), TwoPartitions(latest=1)):
        with pytest.raises(UsageError, match="records between are gone, or the topic was created again"):
            plan_adoption(home, orders, job.checkpoint, topics, no_state)
    stream_record.save(home, stream_record.first("orders"))
    with pytest.raises(UsageError, match="has run before"):
        plan(home, job)


def table_of(job: PlainJob) -> tuple[object, ...]:
    """What a job and its readers see of a table."""
    table = Table(str(job.table))
    metadata = table.metadata()
    return (metadata.id, metadata.configuration, sorted(table.file_uris()), str(table.schema()), table.protocol())


@pytest.mark.parametrize("kind", ["sink", "append", "append-once", "merge"])
def test_an_undone_adoption_leaves_the_table_to_the_job_and_can_be_adopted_again(
    home: Settings, make_job: MakeJob, kind: JobKind
) -> None:
    job = make_job(kind)
    job.run(4)
    Table(str(job.table)).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
    job.before.append(dict(job.live))
    before, seen = state_of(job.root), table_of(job)
    adopt(home, orders, plan(home, job))
    begin_without_a_batch(home)
    assert table_of(job) != seen
    shown = plan_undo(home, orders)
    assert stream_record.existing(home, "orders").adopted and shown.before == shown.version - 2, "a plan writes nothing"
    undo(home, orders, shown)
    assert table_of(job) == seen and state_of(job.root) == before
    assert stream_record.load(home, "orders") is None and not (home.state / "orders" / "g0001").exists()
    [refused] = check_start(take_snapshot(home, orders, TwoPartitions()))
    assert "table orders was not made by Recourse" in refused.found
    with pytest.raises(UsageError, match="has no adoption"):
        plan_undo(home, orders)
    job.before += [dict(job.live)] * (Table(str(job.table)).version() - len(job.before) + 1)
    job.run(2)
    assert not inspection.inspect([job.checkpoint], [job.table]).alarming
    before = state_of(job.root)
    assert adopt(home, orders, plan(home, job)) is True
    adopted(home, job, before)


def begin_without_a_batch(home: Settings) -> None:
    """A first start whose function fails: the table has the stream's properties, the checkpoint a planned batch."""
    sink = open_sink(home, orders.primary, "orders")
    assert sink is not None
    sink.set_properties({"delta.logRetentionDuration": "interval 6 hours"}, 1)
    offsets = StreamFolder.of(home, "orders").checkpoint(1).folder / "offsets"
    assert isinstance(offsets, Path)
    offsets.mkdir(parents=True, exist_ok=True)
    (offsets / "0").write_text("v1\n{}\n{}")


@pytest.mark.parametrize("place", ["before the commit", "after the commit"])
def test_an_undo_that_is_killed_is_finished_by_the_next(
    home: Settings, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    job = make_job("append")
    job.run(3)
    seen = table_of(job)
    adopt(home, orders, plan(home, job))
    with monkeypatch.context() as killed:
        killed.setattr(adoption, "_give_back" if place == "before the commit" else "remove_tree", _die)
        with pytest.raises(KeyboardInterrupt):
            undo(home, orders, plan_undo(home, orders))
    if place == "after the commit":
        assert "was not made by Recourse" in check_start(take_snapshot(home, orders, TwoPartitions()))[0].found
    again = plan_undo(home, orders)
    assert (again.before is None) is (place == "after the commit")
    undo(home, orders, again)
    assert table_of(job) == seen and stream_record.load(home, "orders") is None


def test_an_undo_is_refused_once_rows_have_changed_and_says_what_to_do(home: Settings, make_job: MakeJob) -> None:
    job = make_job("sink")
    job.run(3)
    with pytest.raises(UsageError, match="stream orders has no adoption"):
        plan_undo(home, orders)
    adopt(home, orders, plan(home, job))
    shown = plan_undo(home, orders)
    job.before.append(dict(job.live))
    job.run(1)
    with pytest.raises(UsageError, match=r"version 4 \(STREAMING UPDATE\) .* has changed rows") as refused:
        plan_undo(home, orders)
    assert "UNSET TBLPROPERTIES ('recourse.stream')" in refused.value.next_step
    with pytest.raises(UsageError, match="has changed rows"):
        undo(home, orders, shown)
    sink = open_sink(home, orders.primary, "orders")
    assert sink is not None
    sink.handle.alter.set_table_properties(
        {}, commit_properties=moving(LedgerEntry("batch", "orders", "orders", 1, 0, ()), sink.app_id)
    )
    with pytest.raises(UsageError, match="has committed since its adoption .*batch 0") as refused:
        plan_undo(home, orders)
    assert "recourse savepoints list orders" in refused.value.next_step


def test_neither_an_adoption_nor_an_undo_touches_a_stream_that_has_run(home: Settings, make_job: MakeJob) -> None:
    job = make_job("sink")
    job.run(3)
    adopt(home, orders, plan(home, job))
    begin_without_a_batch(home)
    sink = open_sink(home, orders.primary, "orders")
    assert sink is not None
    record = replace(stream_record.existing(home, "orders"), tables=(BoundTable("orders", sink.table_id, "primary"),))
    stream_record.save(home, record)
    batch = LedgerEntry("batch", "orders", "orders", 1, 0, ())
    sink.handle.alter.set_table_properties({}, commit_properties=moving(batch, sink.app_id))
    Table(str(job.table)).restore(2)  # somebody takes the property off
    before = state_of(home.state / "orders")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has run before"):
        adopt(home, orders, plan(home, job, despite_findings=True))
    with pytest.raises(UsageError, match="has committed since its adoption"):
        plan_undo(home, orders)
    after = state_of(home.state / "orders")  # type: ignore[arg-type]
    assert {k: v for k, v in after.items() if k != "lease"} == {k: v for k, v in before.items() if k != "lease"}


def test_a_table_that_has_changed_since_the_plan_of_an_undo_is_not_touched(home: Settings, make_job: MakeJob) -> None:
    job = make_job("sink")
    job.run(3)
    adopt(home, orders, plan(home, job))
    shown = plan_undo(home, orders)
    Table(str(job.table)).alter.set_table_properties({"delta.appendOnly": "false"})
    with pytest.raises(CommitRefused, match="has changed since the plan"):
        undo(home, orders, shown)
    assert stream_record.existing(home, "orders").adopted


def test_state_that_fits_is_copied_and_batches_go_on_after_the_last_one(home: Settings, make_job: MakeJob) -> None:
    job = make_job("append-once")
    job.run(6)
    keep_state(job)
    with pytest.raises(UsageError, match="does not fit"):
        plan(home, job, try_state=unfit)
    before, shown = state_of(job.root), plan(home, job, try_state=fits)
    assert shown.position == Txn(1, 5) and shown.as_json()["state"] == {"batch": 5, "keys": 3}
    stale = home.state / "orders" / "g0001"
    assert isinstance(stale, Path)
    (stale / "offsets").mkdir(parents=True)
    (stale / "offsets" / "9").write_text("of an adoption that was killed, at another batch")
    adopt(home, orders, shown)
    record = stream_record.existing(home, "orders")
    assert record.generations[0].first_batch == 6 and record.state_fingerprint == {"0": "Aggregate"}
    carried = StreamFolder.of(home, "orders").checkpoint(1)
    assert (carried.last_planned, carried.last_committed, carried.end(5)) == (5, 5, shown.starts)
    copies = list(stale.rglob("*.delta"))
    assert {each.name for each in copies} == {f"{n}.delta" for n in range(1, 7)}
    assert all(each.stat().st_nlink == 1 for each in copies), "the job's files stay its own"
    assert check_start(take_snapshot(home, orders, TwoPartitions())) == [] and state_of(job.root) == before
    undo(home, orders, plan_undo(home, orders))
    assert not stale.exists() and state_of(job.root) == before


def test_results_that_the_job_replaces_are_not_appended(home: Settings, make_job: MakeJob) -> None:
    job = make_job("merge")
    job.run(5)
    keep_state(job)
    with pytest.raises(UsageError, match="replaces results that it has written before"):
        plan(home, job, try_state=fits)
    keyed = replace(orders, sinks={"orders": DeltaTable("orders", keys=["id"])})
    assert plan(home, job, keyed, fits).state is not None


def unfit(history: CheckpointHistory, batch: int) -> CarriedState:
    raise UsageError("it does not fit", "start again")


def _die(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
