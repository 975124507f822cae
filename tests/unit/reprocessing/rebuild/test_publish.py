"""Fence, publish, undo and abort on real Delta tables, without Kafka or Spark: the replay is written by hand."""

from __future__ import annotations

import gzip
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Field, write_deltalake

from reprocessing.planning.conditions import bad_rows, broken
from reprocessing.plans.journal import Journal
from reprocessing.plans.plan import Base, Checks, PlannedAgainst, RecoveryPlan, SawTable, SawTopic, StreamPlan, moved
from reprocessing.plans.plan_file import next_id, save, sealed, staging_folder
from reprocessing.rebuild import audit, staging
from reprocessing.rebuild.publish import fence, misfit, publish, refuse_foreign
from streaming_jobs.errors import Fenced, ForeignWrite, LedgerConflict, PreflightRefused, UsageError
from streaming_jobs.files import hard_link
from streaming_jobs.ledger import CodeVersion, Txn
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.take_snapshot import ledger_file
from streaming_jobs.sinks.delta import unencoded_paths
from streaming_jobs.sinks.delta.content import content_of
from streaming_jobs.sinks.delta.log import newest
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.stored_table import DeltaStoredTable
from streaming_jobs.sinks.delta.table_files import on_disk, table_files
from streaming_jobs.sinks.stored import Content
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import Accepted
from tests.support.life import STREAM, TOPIC, TOPIC_ID, Life

CODE = CodeVersion("fixed", "1")


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Batches 0 to 2 are right, 3 to 5 are wrong."""
    life = Life.begin(tmp_path)
    for number in range(6):
        life.batch(number, wrong=number > 2, code="bug" if number > 2 else "a")
    return life


def stored(table: Path) -> DeltaStoredTable:
    """A Delta table of anybody's, as a table of the stream."""
    return DeltaStoredTable(DeltaSink(table, STREAM.primary, STREAM.name, DeltaTable(table)))


def planned(life: Life, batch: int | None = 2) -> StreamPlan:
    taken = None if batch is None else savepoints.take(life.settings, STREAM, life.record, batch, "recovery")
    tables = tuple(
        SawTable(t.name, t.role, t.table_id, 1, 1, 1, "append")  # type: ignore[arg-type]
        for t in life.record.tables
    )
    name = next_id(life.settings, STREAM.name)
    plan = StreamPlan(
        id=name,
        stream=STREAM.name,
        kind="rewind",
        target="batch 2",
        wanted={TOPIC: {0: 30}},
        notes=(),
        saw=PlannedAgainst(1, 5, CodeVersion("fixed", "1"), tables, (SawTopic(TOPIC, TOPIC_ID, {0: 0}, {0: 60}),)),
        base=Base(taken.id, 1, 2, taken.ends) if taken else Base(None, 1, -1, {TOPIC: {0: 0}}),
        stateful=False,
        rate=10.0,
        record_bytes=None,
        checks=Checks(("id >= 0",), 0.6),
        staging=name,
    )
    save(life.settings, sealed(RecoveryPlan(name, 1.0, (plan,))))
    return plan


def staging_begun(life: Life, plan: StreamPlan) -> None:
    """Fence the tables, and let staging begin with the savepoint's rows."""
    fence(life.settings, STREAM, plan.id, plan.generation)
    base = savepoints.find(life.settings, STREAM.name, plan.base.savepoint or "")
    staging.prepare(life.settings, STREAM, plan, life.record, base)


def rebuilt(life: Life, plan: StreamPlan) -> None:
    """Everything up to the publish."""
    staging_begun(life, plan)
    replay(life, plan)


def replay(life: Life, plan: StreamPlan, last: int = 5) -> None:
    """Write the batches after the savepoint into the staging folders, as the session would."""
    replay_settings = staging.settings_of(life.settings, plan)
    staged = Life(replay_settings)
    for number in range(3, last + 1):
        staged.batch(number, generation=plan.generation, code="fixed")


def published(
    life: Life,
    plan: StreamPlan,
    between: Callable[[str], None] = lambda _: None,
    *,
    contents: Mapping[str, Content] | None = None,
    generation: int = 2,
) -> None:
    """Publish what staging holds, or these contents."""
    staged = staging_folder(life.settings, plan)
    publish(
        life.settings,
        STREAM,
        contents or {t.name: content_of(staged / t.name) for t in life.record.tables},
        record=life.record,
        plan=plan.id,
        at=Txn(generation, 5),
        offsets=life.entry(5).offsets,
        code=CODE,
        between=between,
    )


def test_the_rebuilt_rows_replace_the_wrong_ones_in_one_commit(life: Life) -> None:
    plan = planned(life)
    before = DeltaTable(life.table).version()
    staging_begun(life, plan)
    staged = staging_folder(life.settings, plan) / "things"
    assert life.rows(staged) == list(range(30)), "staging begins with the savepoint's rows"
    replay(life, plan)
    assert life.rows(staged) == list(range(60))
    assert min(life.rows()) < 0, "readers still see the old rows"
    published(life, plan)
    assert life.rows() == list(range(60))
    assert DeltaTable(life.table).version() == before + 2, "a fence and one publish"
    assert life.at() == Txn(2, 5)
    commit, foreign = newest(life.table, STREAM.name)
    assert commit is not None and commit.entry is not None and not foreign
    assert (commit.entry.kind, commit.entry.plan) == ("publish", plan.id)
    assert commit.entry.txns == {"things_dead_letters": Txn(2, 5).version}
    retained = {f for f in DeltaTable(life.table).file_uris() if f"r-{plan.id}" not in f}
    assert retained, "files of the savepoint that the table still had stayed where they were"
    staging.clear(life.settings, plan)
    assert life.rows() == list(range(60)) and not (life.settings.tables / "_staging").exists()


def test_who_could_read_the_table_can_read_what_was_published(life: Life) -> None:
    """With the usual umask another user enters every folder that leads to a live file, and reads the file."""
    before = os.umask(0o022)
    try:
        plan = planned(life)
        rebuilt(life, plan)
        published(life, plan)
    finally:
        os.umask(before)
    files = [on_disk(life.table, path) for path in content_of(life.table).files]
    assert any(f"r-{plan.id}" in file.parts for file in files)
    folders = {folder for file in files for folder in file.parents if folder.is_relative_to(life.table)}
    assert {oct(folder.stat().st_mode & 0o777) for folder in folders} == {"0o755"}
    assert all(file.stat().st_mode & stat.S_IROTH for file in files)


def test_publishing_twice_changes_nothing(life: Life) -> None:
    plan = planned(life)
    rebuilt(life, plan)
    published(life, plan)
    version = DeltaTable(life.table).version()
    fence(life.settings, STREAM, plan.id, plan.generation)
    published(life, plan)
    assert DeltaTable(life.table).version() == version


def test_from_the_fence_on_an_old_driver_writes_nothing_and_nobody_else_starts(life: Life) -> None:
    plan = planned(life)
    zombie, entry = life.sink(), life.entry(6)
    fence(life.settings, STREAM, plan.id, plan.generation)
    rows = pa.table({"id": [1], "place": ["plain"]})
    with pytest.raises(Fenced):
        zombie.commit(entry, lambda handle, how: write_deltalake(handle, rows, mode="append", commit_properties=how))
    from streaming_jobs.preflight.snapshot import CheckpointSnapshot, StreamSnapshot, TopicSnapshot
    from streaming_jobs.preflight.take_snapshot import _checkpoint, _tables

    checkpoint: CheckpointSnapshot = _checkpoint(StreamFolder.of(life.settings, STREAM.name).checkpoint(1))
    snapshot = StreamSnapshot(
        STREAM.name,
        life.record,
        checkpoint,
        tuple(_tables(life.settings, STREAM)),
        (TopicSnapshot(TOPIC, TOPIC_ID, {0: 0}, {0: 60}),),
    )
    refusals = [f for f in check_start(snapshot) if f.severity == "refuse"]
    assert any(f"fenced by the recovery plan {plan.id}" in f.found for f in refusals)


def test_a_replay_that_starts_over_replaces_everything(life: Life) -> None:
    plan = planned(life, None)
    staging.prepare(life.settings, STREAM, plan, life.record, None)
    staging.sync_all(life.settings, plan)  # as the stage does; the replay has yet to make the tables
    replay_settings = staging.settings_of(life.settings, plan)
    record = stream_record.load(replay_settings, STREAM.name)
    assert record is not None and record.generation == 2 and record.tables == () and record.topics == life.record.topics
    assert not StreamFolder.of(replay_settings, STREAM.name).checkpoint(2).folder.exists()


def test_a_table_that_somebody_else_changes_meanwhile_is_not_published_over(life: Life) -> None:
    """After the secondary table's publish and before the primary's: the primary keeps what is in it."""
    plan = planned(life)
    rebuilt(life, plan)

    def meddle(table: str) -> None:
        if table == "things_dead_letters":
            write_deltalake(life.table, pa.table({"id": [7], "place": ["two words"]}), mode="append")

    old = life.rows()
    with pytest.raises(ForeignWrite):
        published(life, plan, meddle)
    assert sorted(DeltaTable(life.table).to_pyarrow_table()["id"].to_pylist()) == sorted([*old, 7])


def test_what_somebody_else_did_before_a_publish_that_goes_on_is_not_written_over(life: Life) -> None:
    plan = planned(life)
    rebuilt(life, plan)
    write_deltalake(life.table, pa.table({"id": [7], "place": ["two words"]}), mode="append")
    version = DeltaTable(life.table).version()
    with pytest.raises(ForeignWrite, match="was not written by stream things"):
        published(life, plan)
    assert DeltaTable(life.table).version() == version
    life.save(replace(life.record, accepted=(Accepted("things", version, "right", 1.0),)))
    published(life, plan)
    assert life.rows() == list(range(60)), "an accepted change is not repeated, as the plan says"


def test_what_the_table_holds_afterwards_is_compared(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(life)
    rebuilt(life, plan)
    monkeypatch.setattr("streaming_jobs.sinks.delta.stored_table.has_content", lambda *_: False)
    with pytest.raises(LedgerConflict, match="does not hold the files"):
        published(life, plan)


def test_a_publish_brings_a_new_column_along(life: Life) -> None:
    plan = planned(life)
    staging_begun(life, plan)
    replay(life, plan)
    staged = staging_folder(life.settings, plan) / "things"
    DeltaTable(staged).alter.add_columns(Field("extra", "string"), commit_properties=CommitProperties())
    published(life, plan)
    assert [f.name for f in DeltaTable(life.table).schema().fields] == ["id", "place", "extra"]
    assert life.rows() == list(range(60))


def test_an_abort_leaves_the_tables_as_they_were_one_generation_later(life: Life) -> None:
    plan = planned(life)
    old = life.rows()
    savepoint = savepoints.take(life.settings, STREAM, life.record, 5, "recovery")
    fence(life.settings, STREAM, plan.id, plan.generation)
    published(life, plan, contents=savepoints.contents_of(life.settings, STREAM, savepoint), generation=3)
    assert life.rows() == old and life.at() == Txn(3, 5)
    commit, _ = newest(life.table, STREAM.name)
    assert commit is not None and not commit.changes_data, "nothing was rewritten"


def test_an_abort_that_was_killed_in_the_middle_goes_on(life: Life) -> None:
    """Its secondary table is a generation further than the fence already."""
    plan = planned(life)
    old = life.rows()
    savepoint = savepoints.take(life.settings, STREAM, life.record, 5, "recovery")
    contents = savepoints.contents_of(life.settings, STREAM, savepoint)

    def killed(table: str) -> None:
        raise KeyboardInterrupt(table)

    for between in (killed, str):
        fence(life.settings, STREAM, plan.id, plan.generation, passed=True)
        try:
            published(life, plan, between, contents=contents, generation=3)
        except KeyboardInterrupt as end:
            assert str(end) == "things_dead_letters" and life.at() == Txn(2, -1)
    assert life.rows() == old and life.at() == Txn(3, 5)


def test_the_fence_of_another_plan_is_not_taken_for_ones_own(life: Life) -> None:
    fence(life.settings, STREAM, "things-0001", 2)
    with pytest.raises(PreflightRefused, match="fenced by plan things-0001"):
        fence(life.settings, STREAM, "things-0002", 2)


def test_a_change_by_somebody_else_is_seen_until_it_is_accepted(life: Life) -> None:
    refuse_foreign(life.settings, STREAM, life.record)
    write_deltalake(life.table, pa.table({"id": [7], "place": ["plain"]}), mode="append")
    version = DeltaTable(life.table).version()
    with pytest.raises(ForeignWrite, match=f"version {version} of table things"):
        refuse_foreign(life.settings, STREAM, life.record)
    life.save(replace(life.record, accepted=(Accepted("things", version, "right", 1.0),)))
    refuse_foreign(life.settings, STREAM, life.record)


def test_a_savepoint_from_before_an_accepted_change_is_not_what_an_abort_goes_back_to(life: Life) -> None:
    savepoint = savepoints.take(life.settings, STREAM, life.record, 5, "time")
    savepoints.drop_outdated(life.settings, STREAM, life.record, 5)
    assert savepoints.find(life.settings, STREAM.name, savepoint.id) == savepoint
    DeltaTable(life.table).delete("id = 1")
    savepoints.drop_outdated(life.settings, STREAM, life.record, 5)
    assert savepoints.find(life.settings, STREAM.name, savepoint.id) is None
    again = savepoints.take(life.settings, STREAM, life.record, 5, "time")
    assert again.tables[0].version > savepoint.tables[0].version
    savepoints.keep_for_recovery(life.settings, again)
    assert savepoints.savepoints(life.settings, STREAM.name)[0].reason == "recovery"


def test_files_with_unencoded_paths_go_when_others_replace_them(life: Life) -> None:
    handle = DeltaTable(life.table)
    actions: list[Mapping[str, object]] = [{"commitInfo": {"operation": "OPTIMIZE"}}]
    for path, file in table_files(life.table, handle.version()).items():
        if file.partition["place"] == "über:all":
            name = f"place=über/{Path(path).name}"  # as delta-spark writes it into the log
            hard_link(on_disk(life.table, path), life.table / name)
            actions += unencoded_paths._actions(replace(file, path=path), name, 1)
    (life.table / "_delta_log" / f"{handle.version() + 1:020d}.json").write_text(
        "\n".join(json.dumps(action, ensure_ascii=False) for action in actions), encoding="utf-8"
    )
    assert len(actions) > 1
    plan = planned(life)
    rebuilt(life, plan)
    published(life, plan)
    assert life.rows() == list(range(60))


def test_files_of_another_schema_do_not_fit(life: Life, tmp_path: Path) -> None:
    for name, rows, partitions, words in (
        ("type", pa.table({"id": ["1"], "place": ["plain"]}), ["place"], "column id of table things is long"),
        ("gone", pa.table({"place": ["plain"], "other": ["x"]}), ["place"], "in the rebuilt one gone"),
        ("parts", pa.table({"id": [1], "place": ["plain"]}), None, "partitioned by other columns"),
    ):
        write_deltalake(tmp_path / name, rows, partition_by=partitions)
        assert len(reasons := misfit(stored(life.table), stored(tmp_path / name))) == 1 and words in reasons[0]
    more = pa.table({"id": [1], "place": ["plain"], "more": ["x"]})
    write_deltalake(tmp_path / "more", more, partition_by=["place"])
    assert misfit(stored(life.table), stored(tmp_path / "more")) == []


def test_statistics_that_were_written_wrong_hide_no_row_from_a_condition(tmp_path: Path) -> None:
    """As deltalake rounds decimals in them, in tables of before; a scan passes over the file by them."""
    amounts = pa.array([Decimal("1.00"), Decimal("12345678901234567.89")], pa.decimal128(20, 2))
    write_deltalake(tmp_path / "table", pa.table({"amount": amounts}))
    (commit,) = (tmp_path / "table" / "_delta_log").glob("*.json")
    actions = [json.loads(line) for line in commit.read_text("utf-8").splitlines()]
    for added in (action["add"] for action in actions if "add" in action):
        added["stats"] = json.dumps(
            {"numRecords": 2, "minValues": {"amount": 1.0}, "maxValues": {"amount": 2.0}, "nullCount": {"amount": 0}}
        )
    commit.write_text("".join(json.dumps(action) + "\n" for action in actions), "utf-8")
    table = DeltaTable(tmp_path / "table")
    assert table.to_pyarrow_table(filters=[("amount", ">", Decimal(5))]).num_rows == 0, "it does hide it from others"
    assert bad_rows(table, "amount > 5") == 1
    assert broken(DeltaTable(tmp_path / "table"), ["amount < 5"])["amount < 5"].rows == 1


def test_rules_and_differences_are_told(life: Life, tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    rows = pa.table({"id": list(range(60)), "place": ["plain"] * 60})
    write_deltalake(staged, rows)
    by_rule = broken(DeltaTable(life.table), ["id >= 0", "place IS NOT NULL"])
    assert {rule: (each.rows, each.null) for rule, each in by_rule.items()} == {
        "id >= 0": (30, 0),
        "place IS NOT NULL": (0, 0),
    }
    never_null = "(id < 0) IS NOT TRUE"  # as a plan before the first bad row asks of what it has rebuilt
    assert (
        broken(DeltaTable(life.table), [never_null])[never_null].rows
        == 30
        == bad_rows(DeltaTable(life.table), never_null)
    )
    by_row = audit.compare("things", DeltaTable(life.table), DeltaTable(life.table), ())
    assert (by_row.only_old, by_row.only_new, by_row.changed, by_row.share) == (0, 0, 0, 0.0)
    by_key = audit.compare("things", DeltaTable(life.table), DeltaTable(staged), ("id",))
    assert (by_key.old_rows, by_key.new_rows, by_key.only_old, by_key.only_new) == (60, 60, 30, 30)
    assert by_key.changed == 30 - 6, "one place in five is the same"
    by_row = audit.compare("things", DeltaTable(life.table), DeltaTable(staged), ())
    assert (by_row.only_old, by_row.only_new) == (54, 54)
    assert by_row.totals["id"] == (sum(range(30)) - sum(range(30, 60)), sum(range(60)))
    assert len(by_row.sample) == len(by_key.sample) == 5


def test_what_differs_is_counted_by_time(tmp_path: Path) -> None:
    def table(name: str, quantity: int) -> Path:
        at = [datetime(2026, 3, 2 + n, 6, tzinfo=UTC) for n in range(4)]
        rows = pa.table(
            {"id": [0, 1, 2, 3], "n": [1, quantity, quantity, 1], "at": pa.array(at, pa.timestamp("us", "UTC"))}
        )
        write_deltalake(tmp_path / name, rows.slice(0, 3 if quantity == 1 else 4))
        return tmp_path / name

    old, new = table("old", 1), table("new", 2)
    by_key = audit.compare("t", DeltaTable(old), DeltaTable(new), ("id",))
    assert by_key.time_column == "at" and (by_key.changed, by_key.only_new) == (2, 1)
    assert list(by_key.by_time) == [
        ("2026-03-03 06:00", 0, 0, 1),
        ("2026-03-04 06:00", 0, 0, 1),
        ("2026-03-05 06:00", 0, 1, 0),
    ]
    by_row = audit.compare("t", DeltaTable(old), DeltaTable(new), ())
    assert list(by_row.by_time) == [
        ("2026-03-03 06:00", 1, 1, 0),
        ("2026-03-04 06:00", 1, 1, 0),
        ("2026-03-05 06:00", 0, 1, 0),
    ]
    assert audit.compare("t", DeltaTable(old), DeltaTable(old), ("id",)).by_time == ()


def test_times_before_1970_and_columns_of_any_type_are_compared(tmp_path: Path) -> None:
    at = pa.array([datetime(1960, 1, 1, 6, 5, tzinfo=UTC)], pa.timestamp("us", "UTC"))
    for name, n in (("old", 1), ("new", 2)):
        rows = pa.table({"inside": [{"a": n}], "list": [[n]], "at": at})
        write_deltalake(tmp_path / name, rows)
    difference = audit.compare("t", DeltaTable(tmp_path / "old"), DeltaTable(tmp_path / "new"), ())
    assert list(difference.by_time) == [("1960-01-01 06:05", 1, 1, 0)]


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us")], ids=str)
@pytest.mark.parametrize("year", [1, 1677, 2263, 9999])
def test_dates_beyond_what_nanoseconds_can_hold_are_compared(tmp_path: Path, kind: pa.DataType, year: int) -> None:
    zone = UTC if getattr(kind, "tz", None) else None
    far = datetime(year, 12, 31, 23, 59, 59, 999_999, tzinfo=zone)
    near = datetime(2026, 1, 1, tzinfo=zone)
    days = [far.date(), near.date()] if pa.types.is_date(kind) else [far, near]
    for name, n in (("old", 1), ("new", 2)):
        write_deltalake(tmp_path / name, pa.table({"id": [1, 2], "n": [n, n], "at": pa.array(days, kind)}))
    for keys in (("id",), ()):
        difference = audit.compare("t", DeltaTable(tmp_path / "old"), DeltaTable(tmp_path / "new"), keys)
        assert len(difference.by_time) == 2
        assert sum(gone + came + changed for _, gone, came, changed in difference.by_time) == (2 if keys else 4)
        assert all(period[4] == "-" for period, *_ in difference.by_time)


@pytest.mark.parametrize("rule", ["nothing > 1", "id >>> 1 (", "'", "1 / (id - id) = 1", "CAST(place AS INT) > 0"])
def test_a_rule_that_cannot_be_asked_is_refused(life: Life, rule: str) -> None:
    with pytest.raises(UsageError, match="cannot be evaluated"):
        broken(DeltaTable(life.table), [rule])
    with pytest.raises(UsageError, match="cannot be evaluated"):
        bad_rows(DeltaTable(life.table), rule)


def test_what_moved_is_told_and_the_streams_own_progress_is_not(life: Life) -> None:
    plan = planned(life)
    saw = plan.saw
    further = replace(saw, batch=9, tables=tuple(replace(t, version=t.version + 7) for t in saw.tables))
    assert moved(plan, saw) == [] == moved(plan, further)
    topic = saw.topics[0]
    for now, words in (
        (replace(saw, generation=2), "in generation 2"),
        (replace(saw, batch=4), "at batch 4"),
        (replace(saw, code=CodeVersion("other", "1")), "the code is other"),
        (replace(saw, tables=(replace(saw.tables[0], table_id="x"), *saw.tables[1:])), "is another table"),
        (replace(saw, tables=(replace(saw.tables[0], version=0), *saw.tables[1:])), "at version 0"),
        (replace(saw, topics=(replace(topic, topic_id="y"),)), "deleted or made anew"),
        (replace(saw, topics=(replace(topic, latest={0: 60, 1: 0}),)), "has 2 partitions"),
        (replace(saw, topics=(replace(topic, earliest={0: 31}),)), "offsets 30 to 30"),
    ):
        assert len(changes := moved(plan, now)) == 1 and words in changes[0]


def test_a_journal_line_that_a_kill_cut_off_counts_as_not_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "plan" / "journal.jsonl")
    assert journal.outcome == "planned"
    journal.write("keep", "begun")
    journal.write("keep", "done", {"savepoint": "x"})
    with journal.path.open("ab") as file:
        file.write(b'{"stage":"fence","sta')
    assert [line.stage for line in journal.lines()] == ["keep", "keep"]
    journal.write("fence", "begun")
    assert journal.done("keep") == {"savepoint": "x"} and journal.begun("fence") and journal.done("fence") is None
    assert journal.outcome == "applying"
    journal.write("audit", "failed", {"error": "no"})
    assert journal.outcome == "refused"
    journal.write("abort", "begun")
    assert journal.outcome == "aborting"
    journal.write("abort", "done")
    assert journal.outcome == "aborted"


def test_the_ledger_adopts_lines_once_and_those_of_packed_days_too(life: Life) -> None:
    plan = planned(life)
    base = savepoints.find(life.settings, STREAM.name, plan.base.savepoint or "")
    staging.prepare(life.settings, STREAM, plan, life.record, base)
    replay(life, plan)
    replay_settings = staging.settings_of(life.settings, plan)
    mine, other = ledger_file(life.settings, STREAM.name), ledger_file(replay_settings, STREAM.name)
    today = next(other.folder.glob("*.jsonl"))
    text = today.read_text().splitlines()
    with gzip.open(other.folder / "2026-01-01.jsonl.gz", "wt") as packed:
        packed.write("\n".join(text[:2]) + "\n")
    today.write_text("\n".join(text[2:]) + "\n")
    mine.adopt(other)
    mine.adopt(other)
    lines = [raw.read() for day in reversed(list(mine.days(STREAM.name))) for raw in day]
    assert [line.entry.txn for line in lines] == [*(Txn(1, n) for n in range(6)), *(Txn(2, n) for n in range(3, 6))]
    assert [bool(line.versions) for line in lines] == [True] * 6 + [False] * 3, "staging's versions are not the table's"


def test_what_a_killed_publish_has_left_is_compared_when_it_goes_on(life: Life) -> None:
    """The commit is in the table; the process died before it could look whether the table holds the plan's files."""
    plan = planned(life)
    rebuilt(life, plan)
    savepoint = savepoints.find(life.settings, STREAM.name, plan.base.savepoint or "")
    assert savepoint is not None
    published(life, plan, contents=savepoints.contents_of(life.settings, STREAM, savepoint))
    with pytest.raises(LedgerConflict, match="does not hold the files"):
        published(life, plan)


def test_a_publish_that_goes_on_after_an_accepted_change_is_compared_as_it_was_published(life: Life) -> None:
    plan = planned(life)
    rebuilt(life, plan)
    published(life, plan)
    write_deltalake(life.table, pa.table({"id": [7], "place": ["two words"]}), mode="append")
    version = DeltaTable(life.table).version()
    life.save(replace(life.record, accepted=(Accepted("things", version, "right", 1.0),)))
    published(life, plan)
    assert DeltaTable(life.table).version() == version


@pytest.mark.parametrize("unknown", ["nope", "nope(id)", "id > 'x'", "id >"])
def test_a_condition_that_cannot_be_asked_says_what_is_unknown(life: Life, unknown: str) -> None:
    with pytest.raises(UsageError) as refused:
        bad_rows(DeltaTable(life.table), unknown)
    assert {
        "nope": "there is no column nope; the columns are id, place",
        "nope(id)": "there is no function nope",
        "id > 'x'": "Cannot cast string 'x'",
        "id >": "Expected: an expression",
    }[unknown] in refused.value.found
    assert "Did you mean" not in refused.value.found, "'now' is no help where 'nope' is unknown"


def test_a_misspelt_name_is_told_the_one_that_is_near_it(life: Life) -> None:
    with pytest.raises(UsageError, match="there is no column plase; did you mean place"):
        bad_rows(DeltaTable(life.table), "plase = 'x'")
    with pytest.raises(UsageError, match="there is no function sqrrt; did you mean sqrt"):
        bad_rows(DeltaTable(life.table), "sqrrt(id) > 1")


def tables(tmp_path: Path, old: pa.Table, new: pa.Table) -> tuple[DeltaTable, DeltaTable]:
    """Two versions of a table `t`."""
    for name, rows in (("old", old), ("new", new)):
        write_deltalake(tmp_path / name / "t", rows)
    return DeltaTable(tmp_path / "old" / "t"), DeltaTable(tmp_path / "new" / "t")


def test_the_largest_differences_are_shown_first(tmp_path: Path) -> None:
    """Sixteen totals went on a little; one is wrong by a thousand, and it is the last by name."""
    keys = [f"k{n:02d}" for n in range(16)]
    old = pa.table({"k": keys, "total": pa.array([100 + n for n in range(15)] + [1_115], pa.int64())})
    new = pa.table({"k": keys, "total": pa.array([101 + n for n in range(16)], pa.int64())})
    difference = audit.compare("t", *tables(tmp_path, old, new), ["k"])
    assert difference.changed == 16 and difference.sample[0]["k"] == "k15"
    assert (difference.sample[0]["total published"], difference.sample[0]["total rebuilt"]) == (1_115, 116)


def test_a_difference_of_unknown_size_and_rows_that_come_or_go_hide_no_large_one(tmp_path: Path) -> None:
    old = pa.table({"k": ["a", "b", "c", "d"], "x": pa.array([None, 5.0, float("nan"), 1.0]), "s": ["p"] * 4})
    new = pa.table({"k": ["a", "b", "c", "e"], "x": pa.array([1.0, 900.0, 2.0, 1.0]), "s": ["q"] * 4})
    difference = audit.compare("t", *tables(tmp_path, old, new), ["k"])
    assert (difference.changed, difference.only_old, difference.only_new) == (3, 1, 1)
    assert difference.sample[0]["k"] == "b" and len(difference.sample) == 5


def test_of_rows_without_a_key_the_largest_are_shown_first(tmp_path: Path) -> None:
    old = pa.table({"name": [f"r{n}" for n in range(9)], "amount": pa.array([1] * 8 + [70_000], pa.int64())})
    new = pa.table({"name": [f"s{n}" for n in range(9)], "amount": pa.array([1] * 9, pa.int64())})
    difference = audit.compare("t", *tables(tmp_path, old, new), [])
    assert difference.sample[0] == {"published": {"name": "r8", "amount": 70_000}}


def test_sums_of_money_are_told(tmp_path: Path) -> None:
    kind = pa.decimal128(38, 4)
    old = pa.table({"k": ["a", "b"], "amount": pa.array([Decimal("99999999999999999999.9999"), Decimal("1.5")], kind)})
    new = pa.table({"k": ["a", "b"], "amount": pa.array([Decimal("99999999999999999999.9999"), Decimal("2.5")], kind)})
    difference = audit.compare("t", *tables(tmp_path, old, new), ["k"])
    assert difference.totals["amount"] == ("100000000000000000001.4999", "100000000000000000002.4999")


def test_a_sum_that_does_not_fit_its_type_ends_no_audit(tmp_path: Path) -> None:
    kind = pa.decimal128(38, 0)
    large = Decimal(9 * 10**37)
    old = pa.table({"k": ["a", "b"], "amount": pa.array([large, large], kind), "n": pa.array([2**63 - 1] * 2)})
    new = pa.table({"k": ["a", "b"], "amount": pa.array([large, Decimal(1)], kind), "n": pa.array([2**63 - 1, 1])})
    difference = audit.compare("t", *tables(tmp_path, old, new), ["k"])
    assert difference.changed == 1
    assert [str(x) for x in difference.totals["n"]] == [str(2**64 - 2), str(2**63)]
    assert float(difference.totals["amount"][0]) == pytest.approx(1.8e38)


def test_rows_that_break_a_rule_are_shown_and_nulls_are_named(tmp_path: Path) -> None:
    amounts = pa.array([None, None, -1, 5], pa.int64())
    write_deltalake(tmp_path / "t", pa.table({"id": [1, 2, 3, 4], "amount": amounts}))
    breach = broken(DeltaTable(tmp_path / "t"), ["amount >= 0"])["amount >= 0"]
    assert (breach.rows, breach.null) == (3, 2)
    words = breach.words("amount >= 0")
    assert words.startswith("3 rows break the rule amount >= 0: for 2 it is null") and "id 3, amount -1" in words
    assert broken(DeltaTable(tmp_path / "t"), ["id > 0"])["id > 0"].rows == 0


def test_a_position_that_only_new_code_writes_is_no_difference(tmp_path: Path) -> None:
    schema = pa.schema(
        [("id", pa.int64()), pa.field("_position", pa.int64(), metadata={"recourse.column": "position"})]
    )
    for name, positions in (("old", [None, None]), ("new", [7, 8])):
        write_deltalake(tmp_path / name, pa.table({"id": [1, 2], "_position": positions}, schema=schema))
    difference = audit.compare("t", DeltaTable(tmp_path / "old"), DeltaTable(tmp_path / "new"), ("id",))
    assert (difference.changed, difference.only_old, difference.only_new, dict(difference.totals)) == (0, 0, 0, {})
    by_row = audit.compare("t", DeltaTable(tmp_path / "old"), DeltaTable(tmp_path / "new"), ())
    assert by_row.only_old == by_row.only_new == 0
