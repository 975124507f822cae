"""Fence, publish and abort on real Delta tables, without Kafka or Spark: the replay is written by hand."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Field, write_deltalake

from reprocessing.plan.plan import StreamRecoveryPlan
from reprocessing.plan.plan_file import staging_folder
from reprocessing.replay import staging
from reprocessing.stages.publish import PublishPosition, fence, misfit, publish, refuse_foreign
from streaming_jobs.errors import Fenced, ForeignWrite, LedgerConflict, PreflightRefused
from streaming_jobs.ledger.entry import CodeVersion, Txn
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.sinks.delta.content import content_of
from streaming_jobs.sinks.delta.log import newest
from streaming_jobs.sinks.delta.replace_rows import rename_actions
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.table_files import on_disk, table_files
from streaming_jobs.sinks.stored import Content
from streaming_jobs.state import savepoints
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.storage.files import hard_link
from tests.support.life import STREAM, TOPIC, TOPIC_ID, Life
from tests.support.rewind import planned, replay

pytestmark = pytest.mark.slow

CODE = CodeVersion("fixed", "1")


def stored(table: Path) -> DeltaSink:
    """A Delta table of anybody's, as a table of the stream."""
    return DeltaSink(table, STREAM.primary, STREAM.name, DeltaTable(table))


def staging_begun(life: Life, plan: StreamRecoveryPlan) -> None:
    """Fence the tables, and let staging begin with the savepoint's rows."""
    fence(life.settings, STREAM, plan.id, plan.generation)
    base = savepoints.find(life.settings, STREAM.name, plan.base.savepoint or "")
    staging.prepare(life.settings, STREAM, plan, life.record, base)


@pytest.fixture
def plan(life: Life) -> StreamRecoveryPlan:
    """A plan up to its publish."""
    made = planned(life)
    staging_begun(life, made)
    replay(life, made)
    return made


def published(
    life: Life,
    plan: StreamRecoveryPlan,
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
        position=PublishPosition(Txn(generation, 5), life.entry(5).offsets, CODE),
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
        staging_begun(life, plan)
        replay(life, plan)
        published(life, plan)
    finally:
        os.umask(before)
    files = [on_disk(life.table, path) for path in content_of(life.table).files]
    assert any(f"r-{plan.id}" in file.parts for file in files)
    folders = {folder for file in files for folder in file.parents if folder.is_relative_to(life.table)}
    assert {oct(folder.stat().st_mode & 0o777) for folder in folders} == {"0o755"}
    assert all(file.stat().st_mode & stat.S_IROTH for file in files)


def test_publishing_twice_changes_nothing(life: Life, plan: StreamRecoveryPlan) -> None:
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
    from streaming_jobs.preflight.snapshot import (
        CheckpointSnapshot,
        StreamSnapshot,
        TopicSnapshot,
        _checkpoint,
        _tables,
    )

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


def test_a_table_that_somebody_else_changes_meanwhile_is_not_published_over(
    life: Life, plan: StreamRecoveryPlan
) -> None:
    """After the secondary table's publish and before the primary's: the primary keeps what is in it."""

    def meddle(table: str) -> None:
        if table == "things_dead_letters":
            life.meddle()

    old = life.rows()
    with pytest.raises(ForeignWrite):
        published(life, plan, meddle)
    assert sorted(DeltaTable(life.table).to_pyarrow_table()["id"].to_pylist()) == sorted([*old, 7])


def linking(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """Let something happen once, while a publish links its files."""
    link, waiting = os.link, [meanwhile]

    def linked(*names: Path) -> None:
        link(*names)
        if "r-" in str(names[1]) and waiting:
            waiting.pop()()

    monkeypatch.setattr("streaming_jobs.storage.files.os.link", linked)


def test_a_compaction_by_somebody_else_during_a_publish_doubles_no_row(
    life: Life, plan: StreamRecoveryPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rewrites files that the publish was to keep and files that it was to remove."""
    seen = []

    def compact() -> None:
        assert DeltaTable(life.table).optimize.compact()["numFilesRemoved"] > 1
        seen.append(DeltaTable(life.table).version())

    linking(monkeypatch, compact)
    published(life, plan)
    assert seen and DeltaTable(life.table).version() == seen[0] + 1, "one commit, after the compaction"
    assert life.rows() == list(range(60)) and life.at() == Txn(2, 5)
    published(life, plan)
    assert DeltaTable(life.table).version() == seen[0] + 1


def test_files_count_as_new_when_they_enter_a_table(life: Life, plan: StreamRecoveryPlan) -> None:
    """Delta's VACUUM lists the folder after it has read the table's version: an old file that came between would go."""
    weeks_ago = time.time() - 30 * 86400
    for file in life.settings.tables.rglob("*.parquet"):
        os.utime(file, (weeks_ago, weeks_ago))
    listed = set(table_files(life.table, DeltaTable(life.table).version()))
    published(life, plan)
    came = set(table_files(life.table, DeltaTable(life.table).version())) - listed
    assert came
    old = [path for path in came if on_disk(life.table, path).stat().st_mtime < time.time() - 7 * 86400]
    assert not old, "VACUUM would delete these"


def test_what_somebody_else_did_before_a_publish_that_goes_on_is_not_written_over(
    life: Life, plan: StreamRecoveryPlan
) -> None:
    version = life.meddle()
    with pytest.raises(ForeignWrite, match="was not written by stream things"):
        published(life, plan)
    assert DeltaTable(life.table).version() == version
    life.accept(version)
    published(life, plan)
    assert life.rows() == list(range(60)), "an accepted change is not repeated, as the plan says"


def test_what_the_table_holds_afterwards_is_compared(
    life: Life, plan: StreamRecoveryPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streaming_jobs.sinks.delta.sink.has_content", lambda *_: False)
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
    savepoint = life.savepoint(5, "recovery")
    fence(life.settings, STREAM, plan.id, plan.generation)
    published(life, plan, contents=savepoints.contents_of(life.settings, STREAM, savepoint), generation=3)
    assert life.rows() == old and life.at() == Txn(3, 5)
    commit, _ = newest(life.table, STREAM.name)
    assert commit is not None and not commit.changes_data, "nothing was rewritten"


def test_an_abort_that_was_killed_in_the_middle_goes_on(life: Life) -> None:
    """Its secondary table is a generation further than the fence already."""
    plan = planned(life)
    old = life.rows()
    savepoint = life.savepoint(5, "recovery")
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
    version = life.meddle()
    with pytest.raises(ForeignWrite, match=f"version {version} of table things"):
        refuse_foreign(life.settings, STREAM, life.record)
    life.accept(version)
    refuse_foreign(life.settings, STREAM, life.record)


def test_files_with_unencoded_paths_go_when_others_replace_them(life: Life) -> None:
    handle = DeltaTable(life.table)
    actions: list[Mapping[str, object]] = [{"commitInfo": {"operation": "OPTIMIZE"}}]
    for path, file in table_files(life.table, handle.version()).items():
        if file.partition["place"] == "über:all":
            name = f"place=über/{Path(path).name}"  # as delta-spark writes it into the log
            hard_link(on_disk(life.table, path), life.table / name)
            actions += rename_actions(replace(file, path=path), name, 1)
    (life.table / "_delta_log" / f"{handle.version() + 1:020d}.json").write_text(
        "\n".join(json.dumps(action, ensure_ascii=False) for action in actions), encoding="utf-8"
    )
    assert len(actions) > 1
    plan = planned(life)
    staging_begun(life, plan)
    replay(life, plan)
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


def test_a_publish_that_has_left_other_rows_is_made_again_at_the_same_position(
    life: Life, plan: StreamRecoveryPlan
) -> None:
    """The commit is in the table, and it is not the plan's content: whatever made it so, resume puts it right."""
    savepoint = savepoints.find(life.settings, STREAM.name, plan.base.savepoint or "")
    assert savepoint is not None
    published(life, plan, contents=savepoints.contents_of(life.settings, STREAM, savepoint))
    assert life.rows() == list(range(30)) and life.at() == Txn(2, 5)
    version = DeltaTable(life.table).version()
    for _ in range(2):
        published(life, plan)
        assert life.rows() == list(range(60)) and life.at() == Txn(2, 5)
        assert DeltaTable(life.table).version() == version + 1, "once"


def test_a_reader_of_the_table_gets_no_row_twice_when_a_publish_is_made_again(
    life: Life, plan: StreamRecoveryPlan
) -> None:
    """Both commits are in the log; the files that the first one has named as unread are not named again."""
    staged = content_of(staging_folder(life.settings, plan) / "things")
    savepoint = savepoints.find(life.settings, STREAM.name, plan.base.savepoint or "")
    assert savepoint is not None
    rebuilt_files = staged.without(savepoints.contents_of(life.settings, STREAM, savepoint)["things"])
    first = dict(list(rebuilt_files.files.items())[:1])
    whole, entry = stored(life.table), replace(life.entry(5), kind="publish", generation=2, plan=plan.id)
    some = replace(staged, files={**{p: f for p, f in staged.files.items() if p not in rebuilt_files.files}, **first})
    assert whole.replace_rows(some, entry, "r-1", rebuilt_files).version
    DeltaTable(life.table).optimize.compact()
    assert stored(life.table).replace_rows(staged, entry, "r-1", rebuilt_files).version
    named = [c.entry.new for c in stored(life.table).commits() if c.entry and c.entry.kind == "publish"]
    again, before = (set(each or ()) for each in named)
    assert len(before) == 1 and len(again) == len(rebuilt_files.files) - 1 and not again & before


def test_a_publish_that_goes_on_after_an_accepted_change_is_compared_as_it_was_published(
    life: Life, plan: StreamRecoveryPlan
) -> None:
    published(life, plan)
    version = life.meddle()
    life.accept(version)
    published(life, plan)
    assert DeltaTable(life.table).version() == version
