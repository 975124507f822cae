"""Recoveries over tables of any store: in memory, on an object store, and of two stores at once. Nothing is replaced
but Spark's replay.

The replay is written by hand: for each batch Spark's plan, then the question of the border, then the rows, as the
session asks and writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake
from pyspark.sql.types import LongType

from reprocessing import executor
from reprocessing.corrections import corrections
from reprocessing.explainer import explain
from reprocessing.plan.first_bad_row import before_first_bad
from reprocessing.plan.plan import Checks, RecoveryPlan
from reprocessing.plan.plan_file import load
from reprocessing.plan.planner import RecoveryRequest, make_plan, plan_undo
from reprocessing.plan.targets import Target
from reprocessing.replay.session import last_entry
from reprocessing.stages.publish import PublishPosition, has_published, publish
from reprocessing.stages.recovery import Recovery, RecoveryContext, RecoveryEvents
from reprocessing.stages.replay import border_of, kept_table, past_the_border
from reprocessing.stages.stages import AuditRefused
from streaming_jobs.declare.rules import NotNull
from streaming_jobs.errors import Fenced, ForeignWrite, UsageError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.preflight.truncated_files import repair
from streaming_jobs.runtime.stream_sinks import sinks_of, upkeep_of
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.stored import newest
from streaming_jobs.sinks.tables import begin_late, open_tables
from streaming_jobs.state import savepoints
from streaming_jobs.state.lease import take
from streaming_jobs.state.stream_record import CodeSince
from streaming_jobs.storage.locations import delta_table
from streaming_jobs.stream import DeltaTable, Stream
from streaming_jobs.testing import MemoryDeclaration, MemoryStore, MemoryTable
from tests.support.life import PER_BATCH, ROWS, STREAM, TOPIC, Life, Topics, append, ids_of, in_memory, run_stages
from tests.support.life import recovery as recovery_of

pytestmark = pytest.mark.slow

BATCHES, WRONG_FROM, LAST_READ = 6, 3, 90
RIGHT = list(range(BATCHES * PER_BATCH))
WRONG = sorted(n if n < WRONG_FROM * PER_BATCH else -n for n in RIGHT)
CHECKS = Checks(("id >= 0", "place IS NOT NULL"), 1.0)


def in_two_stores() -> Stream:
    return replace(STREAM, sinks={"things": DeltaTable("things"), "copies": MemoryDeclaration("copies", MemoryStore())})


def on_object_store() -> Stream:
    return replace(STREAM, sinks={"things": DeltaTable("things"), "copies": DeltaTable("copies")})


IN_BOTH = pytest.mark.parametrize("life", [in_memory, in_two_stores, on_object_store], indirect=True)
_LONG_IN_TWO = pytest.param(in_two_stores, marks=pytest.mark.long)
ON_A_STORE = pytest.mark.parametrize("life", [in_memory, on_object_store, _LONG_IN_TWO], indirect=True)
"""Marks a test that always runs on an object store, too, as what it proves depends on the store's commits."""


@pytest.fixture(params=[in_memory, pytest.param(on_object_store, marks=pytest.mark.long), _LONG_IN_TWO])
def life(request: pytest.FixtureRequest, tmp_path: Path) -> Life:
    """A stream of two tables; batches 0 to 2 are right, 3 to 5 are wrong. Its topic has thirty records more."""
    wrong = range(WRONG_FROM, BATCHES)
    flags = request.getfixturevalue("tables_on_a_store") if request.param is on_object_store else {}
    life = Life.begin(tmp_path, request.param(), Topics(end=LAST_READ), flags).run(
        *range(BATCHES), wrong=wrong, bug=wrong
    )
    life.change(code=(*life.record.code, CodeSince("bug", "1", 1, WRONG_FROM, 1.0)))
    return life


def planned(life: Life, target: Target | None = None, checks: Checks = CHECKS) -> RecoveryPlan:
    snapshot = life.snapshot()
    request = RecoveryRequest(snapshot, target or Target("batch", str(WRONG_FROM - 1)), checks)
    return make_plan(life.settings, [request])


def recovery(
    life: Life, plan: RecoveryPlan, replaying: Callable[[RecoveryContext], Mapping[str, Any]] | None = None
) -> Recovery:
    return recovery_of(life, plan.id, replay=replaying or replay)


def replay(context: RecoveryContext, *, wrong: bool = False) -> Mapping[str, Any]:
    """As the session does it, to the topic's end; past the published tables' end what they hold is kept aside."""
    staged, border = Life(context.replay_settings, context.stream), border_of(context)
    generation, first = context.plan.generation, context.plan.base.batch + 1
    for number in range(first, LAST_READ // PER_BATCH):
        staged.plan(number, generation=generation)
        assert not border(staged.checkpoint(generation), number), "these batches end where the published ones did"
        staged.batch(number, generation=generation, code="fixed", wrong=wrong)
    last = last_entry(context.replay_settings, context.stream)
    since = past_the_border(context, {TOPIC: {0: LAST_READ}})
    ends = {TOPIC: {0: LAST_READ}}
    return {"batch": last.batch, "seconds": 0.1, "records": LAST_READ - first * PER_BATCH, "since": since, "ends": ends}


def versions(life: Life) -> dict[str, int]:
    return {name: table.version for name, table in open_tables(life.settings, life.stream).items()}


def test_a_stream_over_them_can_start(life: Life) -> None:
    assert life.refused() == [] and repair(life.settings, life.stream) == []
    tables = open_tables(life.settings, life.stream)
    assert list(tables) == ["things", "copies", "things_dead_letters"]
    sinks = sinks_of(life.stream, tables, life.settings.for_stream(life.stream.name))
    assert [sink.name for sink in sinks] == list(tables) and sinks.primary.position == Txn(1, BATCHES - 1)
    for upkeep in upkeep_of(life.stream, tables, life.settings, 1):
        upkeep.after_commit()
        assert upkeep.name in tables and not upkeep.put_off
    assert versions(life) == {name: table.version for name, table in tables.items()}


@IN_BOTH
def test_a_recovery_replaces_the_wrong_rows_of_every_table(life: Life) -> None:
    before, plan = versions(life), planned(life)
    assert "copies (append, 6 files" in explain(plan)
    whole = recovery(life, plan)
    context = run_stages(whole, until="publish")
    assert life.ids() == life.ids("copies") == WRONG and life.at() == Txn(2, -1), "readers still see the old rows"
    assert any("fenced" in each.found for each in life.refused())
    assert context.result("replay")["since"] == LAST_READ - len(RIGHT)
    compared = {d.table: (*d.counts, d.old_rows, d.new_rows) for d in whole.differences}
    changed = (BATCHES - WRONG_FROM) * PER_BATCH
    assert compared == {
        "things": (changed, 0, 0, len(RIGHT), len(RIGHT)),
        "copies": (changed, 0, 0, len(RIGHT), len(RIGHT)),
        "things_dead_letters": (0, 0, 0, 0, 0),
    }, "records that came since are no difference"
    run_stages(whole)
    last = LAST_READ // PER_BATCH - 1
    assert life.ids() == life.ids("copies") == list(range(LAST_READ)) and life.at() == Txn(2, last)
    assert versions(life) == {name: version + 2 for name, version in before.items()}, "a fence, and one publish"
    entry = life.stored().commits().__next__().entry
    assert entry is not None and (entry.kind, entry.plan) == ("publish", plan.id)
    assert entry.txns == {"copies": Txn(2, last).version, "things_dead_letters": Txn(2, last).version}
    done = {each["table"]: (each["came"], each["went"], each["stayed"]) for each in context.result("publish")["tables"]}
    assert done["things"] == done["copies"] == (last - WRONG_FROM + 1, BATCHES - WRONG_FROM, WRONG_FROM)
    assert life.record.generation == 2 and life.refused() == []
    assert not (life.settings.tables / "_staging").exists() and whole.journal.outcome == "published"
    document = corrections(life.settings, plan)
    (of_stream,) = document["streams"]
    assert json.loads(json.dumps(document)) == document and document["outcome"] == "published"
    assert of_stream["generation"] == {"before": 1, "after": 2}
    replayed = {"topic": TOPIC, "partition": 0, "begin": WRONG_FROM * PER_BATCH, "end": LAST_READ}
    assert (of_stream["replayed"], of_stream["topics"], of_stream["skipped"]) == ([replayed], [], [])
    tables = {each["table"]: each for each in of_stream["tables"]}
    assert {name: each["version"] for name, each in tables.items()} == {
        name: {"before": version + 1, "after": version + 2} for name, version in before.items()
    }
    assert tables["copies"]["rows"]["corrected"] == changed and tables["copies"]["keys"] is None


@ON_A_STORE
def test_it_is_taken_back_to_the_savepoint_from_before_it(life: Life) -> None:
    plan = planned(life)
    run_stages(recovery(life, plan))
    undo = plan_undo(life.settings, {life.stream.name: life.stream}, life.topics, plan)
    assert undo.undoes == plan.id and undo.streams[0].base.batch == BATCHES - 1
    run_stages(recovery(life, undo, lambda context: replay(context, wrong=True)))
    assert life.ids() == life.ids("copies") == sorted([*WRONG, *(-n for n in range(len(RIGHT), LAST_READ))])
    assert life.at() == Txn(3, LAST_READ // PER_BATCH - 1) and life.refused() == []
    assert corrections(life.settings, plan)["undone_by"] == undo.id
    document = corrections(life.settings, undo)
    assert (document["undoes"], document["streams"][0]["generation"]) == (plan.id, {"before": 2, "after": 3})


@pytest.mark.parametrize(
    ("life", "reached"),
    [
        pytest.param(kind, reached, marks=() if kind is in_memory or reached == always else pytest.mark.long)
        for kind, always in ((in_memory, None), (on_object_store, "publish"), (in_two_stores, None))
        for reached in ("prepare", "replay", "audit", "publish")
    ],
    indirect=["life"],
)
def test_it_can_be_given_up_until_it_has_published(life: Life, reached: str) -> None:
    whole = recovery(life, planned(life))
    run_stages(whole, until=reached)
    executor.give_up(whole)
    assert life.ids() == life.ids("copies") == WRONG and life.at() == Txn(3, BATCHES - 1) and life.refused() == []
    commit, _ = newest(life.stored("copies").commits(), life.stream.name)
    assert commit is not None and not commit.changes_data, "no row was written again"
    assert not (life.settings.tables / "_staging").exists() and whole.journal.outcome == "aborted"


@ON_A_STORE
def test_the_commits_of_a_recovery_carry_the_epoch_of_its_lease(life: Life) -> None:
    paused = list(open_tables(life.settings, life.stream).values())
    with take(life.settings, life.stream.name, purpose="session") as lease:
        for table in paused:
            table.under(lease, 1)
    executor.apply(recovery(life, planned(life)))
    tables = open_tables(life.settings, life.stream)
    assert {table.epoch for table in tables.values()} == {lease.epoch + 1}
    for table in paused:
        with pytest.raises(Fenced):
            table.mark(LedgerEntry("fence", life.stream.name, table.name, 9, -1))


@IN_BOTH
def test_a_publish_that_was_killed_between_two_tables_goes_on(life: Life) -> None:
    whole = recovery(life, planned(life))
    context = run_stages(whole, until="publish")
    last = last_entry(context.replay_settings, context.stream)
    contents = {name: table.content() for name, table in open_tables(context.replay_settings, context.stream).items()}

    def at(between: Callable[[str], None]) -> None:
        publish(
            life.settings,
            life.stream,
            contents,
            record=life.record,
            plan=context.plan.id,
            position=PublishPosition(last.txn, last.offsets, last.code),
            between=between,
        )

    def killed(table: str) -> None:
        raise KeyboardInterrupt(table)

    with pytest.raises(KeyboardInterrupt, match="copies"):
        at(killed)
    assert life.ids("copies") == list(range(LAST_READ)) and life.ids() == WRONG
    assert not has_published(life.settings, life.stream, context.plan.id)
    before = life.stored("copies").version
    run_stages(whole)
    assert life.ids() == life.ids("copies") == list(range(LAST_READ)) and life.stored("copies").version == before
    assert has_published(life.settings, life.stream, context.plan.id) and life.refused() == []
    contents["copies"] = life.stored("copies").no_rows()
    with pytest.raises(KeyboardInterrupt, match="copies"):
        at(killed)
    assert life.ids("copies") == [], "a commit that has left other rows is made again at its position"
    assert life.stored("copies").version == before + 1 and life.stored("copies").position == last.txn


@IN_BOTH
def test_nothing_of_an_old_driver_and_nothing_over_somebody_elses_rows(life: Life) -> None:
    zombie, whole = life.stored("copies"), recovery(life, planned(life))
    rows = zombie.readable().to_pyarrow_table().slice(0, 1)
    run_stages(whole, until="audit")
    with pytest.raises(Fenced):
        append(zombie, rows, replace(life.entry(BATCHES), table="copies"))
    copies = life.stored("copies")
    if isinstance(copies, MemoryTable):
        version = copies.write_as_somebody_else(rows)
    else:
        assert isinstance(copies, DeltaSink)
        write_deltalake(other := delta_table(copies.path), rows, mode="append")
        version = other.version()
    for refused in (lambda: run_stages(whole), lambda: executor.give_up(whole)):
        with pytest.raises(ForeignWrite, match=f"version {version} of table copies"):
            refused()
    life.accept(version, "copies")
    executor.give_up(whole)
    assert life.ids() == WRONG and len(life.ids("copies")) == len(WRONG) + 1, "what was accepted stays"


def test_what_breaks_a_rule_or_does_not_fit_is_not_published(life: Life) -> None:
    whole = recovery(life, planned(life), lambda context: replay(context, wrong=True))
    run_stages(whole, until="audit")
    with pytest.raises(AuditRefused, match="rows break the rule id >= 0"):
        run_stages(whole)
    assert life.ids() == WRONG and whole.journal.done("publish", STREAM.name) is None
    executor.give_up(whole)
    unknown = planned(life, checks=Checks(("colour = 'red'",)))
    assert any("the table has no column colour yet" in note for note in unknown.streams[0].notes)


def test_a_suite_judges_the_rebuilt_rows_and_what_fails_there_is_not_published(life: Life) -> None:
    made = planned(life, checks=Checks(suites=("plausible",)))
    assert load(life.settings, made.id).streams[0].checks.suites == ("plausible",)
    assert "suite plausible" in explain(made)
    judged: list[tuple[str, list[int]]] = []
    failing = ["id_between fails, 3 rows of 60"]

    def run_suite(context: RecoveryContext, suite: str) -> list[str]:
        judged.append((suite, Life(context.replay_settings, context.stream).ids()))
        return failing

    said: list[str] = []
    whole = recovery_of(life, made.id, events=RecoveryEvents(said.append), replay=replay, run_suite=run_suite)
    with pytest.raises(AuditRefused, match="suite plausible: id_between fails, 3 rows of 60"):
        run_stages(whole)
    assert not any("passed" in line for line in said)
    assert life.ids() == WRONG and judged == [("plausible", list(range(LAST_READ)))]
    failing.clear()
    run_stages(whole)
    assert life.ids() == list(range(LAST_READ)) and len(judged) == 2
    assert "  passed: suite plausible" in said


def test_a_recovery_with_a_quarantine_that_is_new_can_be_given_up_or_published(life: Life) -> None:
    judged = replace(life.stream, rules={"things": [NotNull("id", on_fail="quarantine")]})
    aside = "things_quarantine"
    now = Life(life.settings, judged, life.topics)
    whole = recovery(now, planned(now))
    run_stages(whole, until="audit")
    executor.give_up(whole)
    assert now.ids() == WRONG and open_tables(life.settings, judged)[aside].position == Txn(3, BATCHES - 1)

    def as_a_start_does(context: RecoveryContext) -> Mapping[str, Any]:
        begin_late(context.replay_settings, context.stream, generation=context.plan.generation)
        return replay(context)

    run_stages(recovery(now, planned(now), as_a_start_does))
    assert now.ids() == list(range(LAST_READ)) and aside in open_tables(life.settings, judged)


def test_a_plan_with_suites_is_not_carried_out_by_somebody_who_cannot_run_them(life: Life) -> None:
    whole = recovery(life, planned(life, checks=Checks(suites=("plausible",))))
    with pytest.raises(UsageError, match="asks for the suite plausible, which cannot be run from here"):
        run_stages(whole)
    assert life.ids() == WRONG


@IN_BOTH
def test_what_was_kept_at_the_border_is_compared_and_goes_with_staging(life: Life) -> None:
    whole = recovery(life, planned(life))
    context = run_stages(whole, until="audit")
    for name in ("things", "copies"):
        copy = kept_table(context, life.stream.sinks[name])
        assert copy is not None and ids_of(copy) == RIGHT
        assert type(copy) is type(life.stored(name))
    assert Life(context.replay_settings, context.stream).ids("copies") == list(range(LAST_READ))
    executor.give_up(whole)
    assert kept_table(context, life.stream.primary) is None


def test_the_first_bad_row_is_found_by_savepoints_and_versions(life: Life) -> None:
    life.savepoint(1)
    snapshot = life.snapshot()
    target, resolved = before_first_bad(snapshot, "id < 0", exact=False)
    assert resolved.batch == Txn(1, WRONG_FROM - 1) and "before the first bad row" in str(target.value)
    with pytest.raises(UsageError, match="no row of table things is bad"):
        before_first_bad(snapshot, "id > 1000", exact=False)
    assert not [*(life.settings.tables / "_staging").iterdir()], "what was looked at is gone"


def test_savepoints_of_all_tables_are_dropped_together(life: Life) -> None:
    taken = life.savepoint(2, "purpose")
    assert [(table.name, table.files) for table in taken.tables] == [
        ("things", 3),
        ("copies", 3),
        ("things_dead_letters", 0),
    ]
    assert savepoints.savepoints(life.settings, STREAM.name) == [taken]
    contents = savepoints.contents_of(life.settings, life.stream, taken)
    assert {name: content.pieces for name, content in contents.items()} == {t.name: t.files for t in taken.tables}
    assert savepoints.cost(life.settings, life.stream, taken).files > 0
    savepoints.drop(life.settings, life.stream, taken.id)
    assert savepoints.savepoints(life.settings, STREAM.name) == []
    with pytest.raises((OSError, LookupError)):
        savepoints.contents_of(life.settings, life.stream, taken)
    assert ROWS["id"].dataType == LongType() == life.stored("copies").schema["id"].dataType
