"""The start of a replay, refusals of a plan, and the first bad row, on a stream's files on disk."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable as Opened
from deltalake import Field, write_deltalake

from reprocessing.explainer import explain
from reprocessing.plan import first_bad_row, planner
from reprocessing.plan.first_bad_row import before_first_bad
from reprocessing.plan.journal import journal_of
from reprocessing.plan.plan import NO_CHECKS, Checks, StreamRecoveryPlan, moved
from reprocessing.plan.plan_file import load, names
from reprocessing.plan.planner import NotRebuilt
from reprocessing.plan.snapshot import PlanningSnapshot, look_for_plan
from reprocessing.plan.targets import Target
from reprocessing.plan.void_records import CommittedOffsets
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.declare.lookup import Lookup
from streaming_jobs.declare.postgres_table import PostgresTable
from streaming_jobs.declare.table_source import DeltaSource
from streaming_jobs.errors import BrokerUnreachable, PreflightRefused, UsageError
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry, Txn
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.sinks.redriven import RedrivenRecord
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.checkpoint import copy
from streaming_jobs.state.redrive_requests import RedrivePart, RedriveRequest, RedriveRequests
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.slice_requests import SliceCommitRequest, SliceRequests
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import CodeSince, Generation
from streaming_jobs.stream import DeltaTable, Stream
from tests.support.life import Life, Topics, plan_one, undo_one
from tests.support.life_flows import OTHERS, ROWS, STREAM, things

pytestmark = pytest.mark.slow


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Nine batches; from the fifth on the code was wrong."""
    life = Life.of_batches(tmp_path, 9, wrong=range(5, 9), code="aaaaxxxxx")
    life.change(code=(*life.record.code, CodeSince("bug", "1", 1, 4, time.time())))
    return life


def snapshot_of(life: Life, topics: Topics | None = None) -> PlanningSnapshot:
    return look_for_plan(life.settings, STREAM, lambda: topics or Topics())


def test_the_targets_own_batch_is_taken_while_the_logs_show_it(life: Life) -> None:
    plan = life.plan_to(Target("batch", "3"))
    assert (plan.base.savepoint, plan.base.batch, plan.records) == ("g0001-b000000003", 3, 50)
    assert savepoints.find(life.settings, STREAM.name, "g0001-b000000003") is not None
    text = explain(load(life.settings, plan.id))
    for words in (
        "rewind to batch 3",
        "starts from  savepoint g0001-b000000003",
        "50 records, about 5.0 KB to replay",
        "8. clean_up",
        "downstream",
        "Lost for good",
    ):
        assert words in text


def test_streams_that_look_the_tables_up_are_named_and_those_that_never_began_are_not(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = Stream("copied", things, {"value": DeltaSource("things", schema=ROWS)}, {"c": DeltaTable("c")})
    looking = replace(OTHERS, function=lambda value, names: value, lookups={"names": Lookup("things", schema=ROWS)})
    topology = Topology.of([STREAM, looking, copied])
    monkeypatch.setattr(Topology, "load", classmethod(lambda *_: topology))

    def named() -> list[str]:
        return [note for note in life.plan_to(Target("batch", "3")).notes if "look up its tables" in note]

    assert named() == []
    Life.begin(life.settings.home, OTHERS).run(0)
    assert [note.partition(": ")[2].partition(".")[0] for note in named()] == ["others"]


def test_else_the_nearest_savepoint_before_it(life: Life) -> None:
    life.savepoint(1)
    life.savepoint(2)
    life.forget(5)
    plan = life.plan_to(Target("batch", "4"))
    assert plan.base.savepoint == "g0001-b000000002"
    assert any("nearest savepoint before g0001 batch 4 is g0001-b000000002" in note for note in plan.notes)


def test_else_the_very_start_if_every_record_is_still_there(life: Life) -> None:
    life.forget(5)
    plan = life.plan_to(Target("batch", "4"))
    assert plan.base.savepoint is None and plan.records == 90
    assert any("everything is replayed" in note for note in plan.notes)


def test_else_it_is_refused_with_the_oldest_way_back(life: Life) -> None:
    life.savepoint(7)
    life.forget(5)
    with pytest.raises(UsageError, match="offsets 0 to 4 of topic things, partition 0, are gone") as refused:
        plan_one(snapshot_of(life, Topics(first=5)), Target("batch", "4"))
    assert "--savepoint g0001-b000000007" in refused.value.next_step
    assert names(life.settings) == []


def test_a_savepoint_whose_records_are_gone_is_no_way_back(life: Life) -> None:
    life.savepoint(1)
    with pytest.raises(UsageError, match="cannot be replayed from"):
        plan_one(snapshot_of(life, Topics(first=30)), Target("savepoint", "g0001-b000000001"))


def test_a_named_savepoint_that_a_recovery_left_behind_is_gone_to_itself(life: Life) -> None:
    """Its generation was undone; the largest position before it on the path would lie after it in the topic."""
    taken = life.savepoint(3, "recovery")
    g2 = StreamFolder.of(life.settings, STREAM.name).checkpoint(2).folder
    copy(savepoints.checkpoint_of(life.settings, taken), g2)
    generations = (*life.record.generations, Generation(2, 1.0, "recovery things-0001", 1, 3))
    life.change(generations=generations)
    life.sink().commit(LedgerEntry("fence", STREAM.name, "things", 2, -1), lambda *_: None)
    life.batch(4, generation=2)
    left = life.savepoint(4)
    undone = (*generations, Generation(3, 2.0, "recovery things-0002", 1, 8))
    life.change(generations=undone)
    copy(
        savepoints.folder(life.settings, STREAM.name) / left.id / "checkpoint",
        StreamFolder.of(life.settings, STREAM.name).checkpoint(3).folder,
    )
    plan = life.plan_to(Target("savepoint", left.id))
    assert (plan.base.savepoint, plan.base.generation, plan.base.batch) == (left.id, 2, 4)


@pytest.mark.parametrize(
    ("topics", "words"), [(Topics(topic_id="other"), "deleted and made anew"), (Topics(), "cannot be evaluated")]
)
def test_what_cannot_be_replayed_or_checked_makes_no_plan(life: Life, topics: Topics, words: str) -> None:
    with pytest.raises((PreflightRefused, UsageError), match=words):
        plan_one(snapshot_of(life, topics), Target("batch", "3"), Checks(("nope(id) > 1",)))
    assert names(life.settings) == []


def test_a_table_behind_a_fence_makes_no_plan(life: Life) -> None:
    life.sink().commit(LedgerEntry("fence", STREAM.name, "things", 2, -1, plan="things-0009"), lambda *_: None)
    with pytest.raises(PreflightRefused, match="plan things-0009 of table things is under way"):
        life.plan_to(Target("batch", "3"))


def test_before_the_first_bad_row_is_before_the_code_that_wrote_its_batch(life: Life) -> None:
    """The wrong code ran from batch 4 on, the first wrong row came with batch 5."""
    target, resolved = before_first_bad(snapshot_of(life), "id < 0", exact=False)
    assert resolved.batch == Txn(1, 3) and "first bad row: id < 0" in str(target)
    assert "the first came with g0001 batch 5, written by code bug, which ran since g0001 batch 4" in resolved.notes[0]
    _, resolved = before_first_bad(snapshot_of(life), "id < 0", exact=True)
    assert resolved.batch == Txn(1, 4) and "--exact" in resolved.notes[1]


def test_each_file_is_read_once_in_the_search_over_savepoints(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [life.savepoint(batch) for batch in (0, 1, 2)]
    read = list[str]()
    judge = first_bad_row.bad_rows

    def noted(table: Opened, *arguments: Any, **more: Any) -> int:
        if "_staging" in table.table_uri:
            read.extend(Path(uri).name for uri in table.file_uris())
        return judge(table, *arguments, **more)

    monkeypatch.setattr(first_bad_row, "bad_rows", noted)
    before_first_bad(snapshot_of(life), "id < 0", exact=True)
    newest = savepoints.contents_of(life.settings, STREAM, taken[2])[STREAM.primary.name]
    assert len(read) == len(set(read)) == newest.pieces


def test_the_first_bad_row_is_found_between_savepoints_too(life: Life) -> None:
    for batch in (2, 4, 6):
        life.savepoint(batch)
    life.sink().handle.create_checkpoint()
    for version in range(9):
        (life.table / "_delta_log" / f"{version:020d}.json").unlink()
    _, resolved = before_first_bad(snapshot_of(life), "id < 0", exact=True)
    assert resolved.batch == Txn(1, 4)
    assert not (life.settings.tables / "_staging").exists() or not list((life.settings.tables / "_staging").iterdir())


def published(life: Life, plan: StreamRecoveryPlan, last: int, *generations: Generation) -> Savepoint:
    """The plan was published, and batch 8 is in the newest of these generations, whose number is `last`."""
    savepoint = life.savepoint(8, "recovery")
    journal = journal_of(life.settings, plan.id)
    journal.write("take_savepoint", "done", {"savepoint": savepoint.id})
    journal.write("clean_up", "done")
    copy(
        savepoints.checkpoint_of(life.settings, savepoint),
        StreamFolder.of(life.settings, STREAM.name).checkpoint(last).folder,
    )
    opened = Generation(2, 1.0, f"recovery {plan.id}", 1, 3)
    life.change(generations=(*life.record.generations, opened, *generations))
    ledger_file(life.settings, STREAM.name).append(life.entry(8, generation=2), {})
    return savepoint


def test_after_an_aborted_plan_the_published_one_before_it_can_still_be_undone(life: Life) -> None:
    plan = life.plan_to(Target("batch", "3"))
    savepoint = published(life, plan, 4, Generation(4, 2.0, "abort of things-0002", 2, 8, aborts=True))
    undo = undo_one(life, plan.id)
    undoes = load(life.settings, undo.id).undoes
    assert (undo.base.savepoint, undoes, undo.generation) == (savepoint.id, plan.id, 5)
    life.change(generations=(*life.record.generations, Generation(5, 3.0, "recovery things-0003", 4, 8)))
    with pytest.raises(UsageError, match="undo the later recovery first"):
        undo_one(life, plan.id)


def today() -> CodeVersion:
    return code_version(STREAM, [])


def wrote(life: Life, *, since: int) -> None:
    """The code of today is what wrote the batches from that one on."""
    now = today()
    life.change(code=(CodeSince("a", "1", 1, 0, 1.0), CodeSince(now.hash, now.package, 1, since, 2.0)))


@pytest.fixture
def same(tmp_path: Path) -> Life:
    """Nine batches; from the fifth on by the code that is still there, and wrong from the sixth on."""
    life = Life.begin(tmp_path)
    for number in range(9):
        life.batch(number, wrong=number > 4, code=today().hash if number > 3 else "a")
    wrote(life, since=4)
    return life


def test_the_code_that_wrote_the_bad_rows_is_not_what_puts_them_right(same: Life) -> None:
    with pytest.raises(UsageError, match=f"code {today().hash} .* wrote the first bad row") as refused:
        before_first_bad(snapshot_of(same), "id < 0", exact=False)
    assert "deploy" in refused.value.next_step and "--same-code" in refused.value.next_step
    _, resolved = before_first_bad(snapshot_of(same), "id < 0", exact=False, same_code=True)
    assert resolved.batch == Txn(1, 3) and any("--same-code" in note for note in resolved.notes)


def test_a_newer_version_of_the_package_corrects_no_function(same: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streaming_jobs.runtime.code_version.package_version", lambda: "2")
    with pytest.raises(UsageError, match=r"\(1 then, 2 today\) wrote the first bad row"):
        before_first_bad(snapshot_of(same), "id < 0", exact=False)
    with pytest.raises(UsageError, match="is today.s code"):
        same.plan_to(Target("code", today().hash[:6]))


def test_before_the_code_of_today_is_no_way_out_of_its_bug(same: Life) -> None:
    with pytest.raises(UsageError, match="is today.s code") as refused:
        same.plan_to(Target("code", today().hash[:6]))
    assert "--same-code" in refused.value.next_step and names(same.settings) == []
    made = same.plan_to(Target("code", today().hash[:6]), same_code=True)
    assert any("--same-code" in note for note in made.notes)


def test_other_targets_may_replay_with_the_code_that_there_is(same: Life) -> None:
    assert same.plan_to(Target("batch", "3")).records == 50


def test_a_column_that_newer_code_added_is_null_in_what_is_older(life: Life) -> None:
    """Savepoints of before it cannot be asked for it: they count as what a reader sees there today, and it is said."""
    for batch in (2, 6):
        life.savepoint(batch)
    sink = life.sink()
    sink.handle.alter.add_columns([Field("grade", "string")])
    life.accept(life.sink().handle.version(), why="mine")
    entry = life.entry(9, code="new")
    rows = pa.table({"id": [900], "place": ["plain"], "grade": ["bad"]})
    life.sink().commit(entry, lambda handle, how: write_deltalake(handle, rows, mode="append", commit_properties=how))
    ledger_file(life.settings, STREAM.name).append(entry, {"things": life.sink().handle.version()})
    _, resolved = before_first_bad(snapshot_of(life), "grade = 'bad'", exact=True)
    assert resolved.batch == Txn(1, 8)
    assert any("have no column grade" in note and "up to g0001-b000000006" in note for note in resolved.notes)
    _, resolved = before_first_bad(snapshot_of(life), "grade IS NULL", exact=True)
    assert resolved.batch is None, "older rows are bad too, as every reader of the table sees them"


@pytest.mark.parametrize("after", [True, False])
def test_a_slice_that_was_rebuilt_after_the_base_is_named_since_the_replay_does_not_have_it(
    life: Life, after: bool
) -> None:
    life.savepoint(2)
    base = savepoints.savepoints(life.settings, STREAM.name)[0]
    table = next(each for each in base.tables if each.name == "things")
    entry = life.entry(2).encode()
    rebuilt = SliceCommitRequest("s-1", STREAM.name, "things", entry, {}, 0.0, {"slice": "2013-03-01"})
    version = table.version + 1 if after else table.version
    SliceRequests.of(life.settings, STREAM.name).end(rebuilt.ended("committed", version=version))
    notes = life.plan_to(Target("batch", "2")).notes
    assert any("slice 2013-03-01 of table things" in note for note in notes) == after
    assert not any("slice" in note for note in life.plan_to(Target("batch", "-1")).notes)


def test_redrives_that_the_base_lacks_are_named_with_the_command_that_repeats_them(life: Life) -> None:
    life.savepoint(2)
    table = next(each for each in savepoints.savepoints(life.settings, STREAM.name)[0].tables if each.name == "things")
    entry = LedgerEntry("redrive", STREAM.name, "things", 1, 2, plan="r-1").encode()
    records = (RedrivenRecord("things", 0, 1, "malformed_json", "row"),)
    parts = (RedrivePart("things", "add", entry, table.version + 1),)
    request = RedriveRequest("r-1", STREAM.name, "dead letters", STREAM.dead_letters, records, parts, 0.0, {})
    RedriveRequests.of(life.settings, STREAM.name).end(request.ended("committed"))
    notes = life.plan_to(Target("batch", "2")).notes
    assert any("1 record of table" in note and f"deadletters replay {STREAM.name}" in note for note in notes)
    assert not any("redriven" in note for note in life.plan_to(Target("batch", "-1")).notes)


def test_a_rule_on_a_column_that_the_fix_adds_is_asked_of_the_rebuilt_rows(life: Life) -> None:
    plan = life.plan_to(Target("batch", "3"), Checks(("grade IS NOT NULL",)))
    assert any("no column grade" in note and "rebuilt" in note for note in plan.notes)


def test_where_no_other_code_is_there_a_rule_on_an_unknown_column_is_a_mistake(same: Life) -> None:
    with pytest.raises(UsageError, match="there is no column grade"):
        same.plan_to(Target("batch", "3"), Checks(("grade IS NOT NULL",)))
    assert names(same.settings) == []


def test_a_table_that_takes_no_removals_is_refused_while_planning(life: Life) -> None:
    life.sink().handle.alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(UsageError, match=r"things is append-only \(delta.appendOnly\)"):
        life.plan_to(Target("batch", "3"))
    assert plan_one(snapshot_of(life, Topics(end=120)), Target("offsets", "0:110")).skips, "a skip removes nothing"


SUM, MAX = {"0": "Aggregate [k], [k, sum(value) AS s]"}, {"0": "Aggregate [k], [k, max(value) AS s]"}


def test_state_that_does_not_fit_the_code_of_today_is_told_by_the_plan(life: Life) -> None:
    """The stream runs max() by now, and that is the code of today; the savepoint's state was made by sum()."""
    life.change(state_fingerprint=SUM)
    savepoint = life.savepoint(3)
    life.change(state_fingerprint=MAX)
    wrote(life, since=4)
    with pytest.raises(UsageError, match=r"sum\(value\) AS s -> max\(value\) AS s") as refused:
        life.plan_to(Target("savepoint", savepoint.id))
    assert "--to-batch -1" in refused.value.next_step and "--discard-state" in refused.value.next_step
    assert names(life.settings) == []
    assert life.plan_to(Target("savepoint", savepoint.id), discard_state=True).discards_state
    life.change(code=(CodeSince("other", "1", 1, 4, 1.0),))
    assert life.plan_to(Target("savepoint", savepoint.id)), "what other code keeps is not known yet"


def test_an_undo_that_the_code_of_today_cannot_carry_out_is_not_planned(life: Life) -> None:
    life.change(state_fingerprint=SUM)
    plan = life.plan_to(Target("batch", "3"))
    savepoint = published(life, plan, 2)
    life.change(state_fingerprint=MAX)
    wrote(life, since=4)
    with pytest.raises(UsageError, match=r"sum\(value\) AS s -> max\(value\) AS s") as refused:
        undo_one(life, plan.id)
    assert f"deploy code {savepoint.code[0]}" in refused.value.next_step
    assert names(life.settings) == [plan.id]


class Away(Topics):
    """No broker."""

    def describe(self, name: str) -> TopicInfo:
        raise BrokerUnreachable("no broker at nowhere:1 answered", "start it")

    offsets = offsets_for_time = mean_size = describe  # type: ignore[assignment]


@pytest.mark.parametrize("target", [Target("batch", "3"), Target("code", "bug"), Target("table-version", "4")])
def test_what_needs_no_broker_is_planned_without_one(life: Life, target: Target) -> None:
    plan = plan_one(snapshot_of(life, Away()), target)
    assert plan.base.batch == 3 and plan.records == 50
    assert any("no broker answered" in note and "apply" in note for note in plan.notes)
    assert not moved(plan, snapshot_of(life).planned_against), "apply looks again, with a broker"
    assert any("are gone since" in words for words in moved(plan, snapshot_of(life, Topics(first=45)).planned_against))


def test_the_first_bad_row_is_found_without_a_broker(life: Life) -> None:
    target, resolved = before_first_bad(snapshot_of(life, Away()), "id < 0", exact=False)
    assert plan_one(snapshot_of(life, Away()), target, resolved=resolved).base.batch == 3


@pytest.mark.parametrize("kind", ["earliest", "latest", "duration", "datetime"])
def test_what_only_the_broker_knows_says_so(life: Life, kind: str) -> None:
    value = {"duration": "2 hours", "datetime": "2026-03-02T06:00:00+00:00"}.get(kind, "")
    with pytest.raises(BrokerUnreachable, match="only the broker knows"):
        plan_one(snapshot_of(life, Away()), Target(kind, value))  # type: ignore[arg-type]


def test_streams_that_got_new_code_in_the_same_deploy_are_named(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """OTHERS was deployed with the wrong code of STREAM; a stream that changed a day before was not."""
    at = life.record.code[-1].at
    first = CodeSince("x", "1", 1, 0, at - 90_000)
    far = replace(OTHERS, name="far")
    for stream, moment in ((OTHERS, at + 60), (far, at - 86_400)):
        changed = (first, CodeSince("y", "1", 1, 4, moment))
        stream_record.save(life.settings, replace(stream_record.first(stream.name), code=changed))
    topology = Topology({each.name: each for each in (STREAM, OTHERS, far)})
    monkeypatch.setattr(Topology, "load", classmethod(lambda *_: topology))
    notes = life.plan_to(Target("batch", "3")).notes
    (note,) = [each for each in notes if "not in the plan, got new code" in each]
    assert "stream others" in note and "recourse recover plan others --before-code y" in note
    later = life.plan_to(Target("batch", "6")).notes
    assert not [each for each in later if "got new code" in each], "the code is not what this plan replays"


def test_code_that_is_only_hashed_by_the_next_scheme_is_no_deploy(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    at = life.record.code[-1].at
    same = (CodeSince("x", "1", 1, 0, at - 90_000), CodeSince("2-x", "1", 1, 4, at, "x"))
    stream_record.save(life.settings, replace(stream_record.first(OTHERS.name), code=same))
    topology = Topology({each.name: each for each in (STREAM, OTHERS)})
    monkeypatch.setattr(Topology, "load", classmethod(lambda *_: topology))
    notes = life.plan_to(Target("batch", "3")).notes
    assert not [each for each in notes if "got new code" in each]


def test_a_stream_that_writes_a_table_of_postgresql_makes_no_plan_and_the_way_out_is_named(life: Life) -> None:
    snapshot = snapshot_of(life)
    writing = replace(snapshot, stream=replace(snapshot.stream, postgres_tables={"orders": PostgresTable("orders")}))
    with pytest.raises(NotRebuilt, match="REC-043 .* writes the PostgreSQL table orders") as refused:
        plan_one(writing, Target("batch", "3"))
    assert "Put a table right" in refused.value.next_step
    request = planner.RecoveryRequest(writing, Target("batch", "3"), NO_CHECKS)
    with pytest.raises(NotRebuilt, match="takes stream things along, and cannot") as refused:
        planner._draft_along(request, None, {}, CommittedOffsets(life.settings))
    assert "--leave things; after the recovery, declare a new stream" in refused.value.next_step
    assert "--rebuild" not in refused.value.next_step, "it would be refused too"
    further = replace(snapshot_of(life, Topics(end=120)), stream=writing.stream)
    assert plan_one(further, Target("offsets", "0:110")).skips, "a skip rebuilds nothing"
