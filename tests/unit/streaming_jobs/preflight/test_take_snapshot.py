"""The snapshot of a stream on disk: real tables, a checkpoint as Spark writes it, a topic that answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.preflight.findings import StartFinding
from streaming_jobs.sinks.delta.store import ensure_sink
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state import stream_record
from tests.conftest import SettingsFactory
from tests.support.delta_table import shorten_log
from tests.support.worlds import (
    DEAD_LETTERS,
    OUTPUT,
    PRIMARY,
    SECONDARY,
    STREAM,
    TOPIC,
    TOPIC_ID,
    Disk,
    checkpoint_world,
    ends,
    entry,
    parity,
)

pytestmark = pytest.mark.slow

ROW = pa.table({"k": ["foreign"], "n": [0]})


@pytest.fixture
def disk(settings: SettingsFactory) -> Disk:
    return Disk(settings())


def test_before_the_first_start_there_is_nothing_but_the_topic_and_tables_in_their_order(disk: Disk) -> None:
    assert [(t.name, role) for t, role in all_tables(parity)] == [
        (PRIMARY, "primary"),
        (SECONDARY, "secondary"),
        (DEAD_LETTERS, "secondary"),
    ]
    snapshot = disk.snapshot()
    assert snapshot.record is None
    assert [(t.table_id, t.txn, t.entry) for t in snapshot.tables] == [(None, None, None)] * 3
    assert snapshot.topics[0].latest == {0: 1000, 1: 1000}
    assert disk.findings() == []


def test_the_world_after_some_batches_is_the_one_that_was_left(disk: Disk) -> None:
    snapshot = disk.open().run(0, 1, 2).snapshot()
    assert snapshot.checkpoint == checkpoint_world(2, 2)
    primary, secondary, letters = snapshot.tables
    assert (primary.txn, secondary.txn, letters.txn) == (Txn(1, 2), Txn(1, 2), Txn(1, 0))
    assert primary.entry is not None and primary.entry.offsets == entry(2).offsets
    assert {t.owner for t in snapshot.tables} == {STREAM}
    assert all(t.log_reaches_entry and not t.foreign for t in snapshot.tables)


STEPS: dict[str, Callable[[Disk], object]] = {
    "nothing": lambda disk: None,
    "offsets/N": lambda disk: disk.plan(2),
    "offsets/N and the secondary table": lambda disk: (disk.plan(2), disk.write(SECONDARY, 2)),
    "all but commits/N": lambda disk: (disk.plan(2), disk.write(SECONDARY, 2), disk.write(PRIMARY, 2)),
    "all": lambda disk: disk.run(2),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_a_driver_killed_at_any_point_of_a_batch_can_start_again(disk: Disk, step: Callable[[Disk], object]) -> None:
    disk.open().run(0, 1)
    step(disk)
    assert disk.findings() == []


def test_a_driver_killed_before_or_in_its_first_batch_can_start_again(disk: Disk) -> None:
    assert disk.open().findings() == []
    disk.plan(0)
    assert disk.findings() == []
    for table in (DEAD_LETTERS, SECONDARY, PRIMARY):
        disk.write(table, 0)
        assert disk.findings() == [], f"killed after {table}"
    disk.finish(0)
    assert disk.findings() == []


def foreign_append(disk: Disk) -> None:
    write_deltalake(disk.table(PRIMARY), ROW, mode="append")


def deleted_rows(disk: Disk) -> None:
    DeltaTable(disk.table(SECONDARY)).delete("n = 1")


def restored(disk: Disk) -> None:
    DeltaTable(disk.table(PRIMARY)).restore(2)


def gone(disk: Disk) -> None:
    shutil.rmtree(disk.table(SECONDARY))


def made_anew(disk: Disk) -> None:
    shutil.rmtree(disk.table(SECONDARY))
    write_deltalake(disk.table(SECONDARY), ROW)


def older_copy_of_the_table(disk: Disk) -> None:
    for version in (3, 4):
        (disk.table(PRIMARY) / "_delta_log" / f"{version:020d}.json").unlink()


def without_checkpoint(disk: Disk) -> None:
    shutil.rmtree(disk.folder)


def older_copy_of_the_checkpoint(disk: Disk) -> None:
    for log in ("offsets", "commits"):
        for batch in (2, 3):
            (disk.folder / log / str(batch)).unlink()


def without_state_folder(disk: Disk) -> None:
    shutil.rmtree(disk.settings.state)


def without_topic(disk: Disk) -> None:
    disk.topics.info = None


def topic_made_anew(disk: Disk) -> None:
    disk.topics.info = TopicInfo(TOPIC, "another id", 2, -1, "delete")


def truncated_topic(disk: Disk) -> None:
    disk.topics.found = OffsetBounds({0: 41, 1: 0}, {0: 1000, 1: 1000})


def short_topic(disk: Disk) -> None:
    disk.topics.found = OffsetBounds({0: 0, 1: 0}, {0: 39, 1: 1000})


def fenced(disk: Disk) -> None:
    fence = entry(-1, kind="fence", generation=2, plan="r17")
    disk.sinks[PRIMARY].commit(fence, lambda *_: None)


HARM = {
    foreign_append: f"version 5 of table {PRIMARY} (WRITE) changed rows",
    deleted_rows: f"version 5 of table {SECONDARY} (DELETE) changed rows",
    restored: f"version 5 of table {PRIMARY} (RESTORE) changed rows",
    gone: f"table {SECONDARY} is gone",
    made_anew: f"table {SECONDARY} was not made by Recourse",
    older_copy_of_the_table: f"table {PRIMARY} has batch 1, the checkpoint has batch 3",
    without_checkpoint: f"table {PRIMARY} has batch 3, the checkpoint has no batch",
    older_copy_of_the_checkpoint: f"table {PRIMARY} has batch 3, the checkpoint has batch 1",
    without_state_folder: f"table {PRIMARY} holds rows of stream {STREAM} up to g0001 batch 3",
    without_topic: f"topic {TOPIC}, which stream parity has read, does not exist",
    topic_made_anew: f"topic {TOPIC} was deleted and made anew: everything after offsets 0:40, 1:20",
    truncated_topic: f"offsets 40 to 40 of topic {TOPIC}, partition 0, are gone",
    short_topic: f"topic {TOPIC}, partition 0, ends at offset 39, the stream is at 40",
    fenced: f"table {PRIMARY} is fenced by the recovery plan r17",
}


@pytest.mark.parametrize(("harm", "expected"), HARM.items(), ids=[harm.__name__ for harm in HARM])
def test_harm_done_to_a_stream_that_stands_still_is_found(
    disk: Disk, harm: Callable[[Disk], None], expected: str
) -> None:
    disk.open().run(0, 1, 2, 3)
    harm(disk)
    findings = disk.findings()
    assert any(expected in f.found for f in findings), findings


def test_rows_put_back_by_hand_leave_the_transaction_as_it_was_and_are_found(disk: Disk) -> None:
    disk.open().run(0, 1, 2, 3)
    restored(disk)
    assert disk.snapshot().tables[0].txn == Txn(1, 3)
    assert [f.severity for f in disk.findings()] == ["refuse"]


def test_files_compacted_and_removed_by_hand_are_no_harm(disk: Disk) -> None:
    disk.open().run(0, 1, 2, 3)
    table = DeltaTable(disk.table(PRIMARY))
    table.optimize.compact()
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    assert disk.findings() == []


def test_an_accepted_commit_lets_the_stream_start_and_the_next_one_does_not(disk: Disk) -> None:
    disk.open().run(0, 1)
    deleted_rows(disk)
    stream_record.accept(disk.settings, parity, SECONDARY, 3, "a customer asked for it")
    assert disk.findings() == []
    write_deltalake(disk.table(SECONDARY), ROW, mode="append")
    assert [f.found[:9] for f in disk.findings()] == ["version 4"]


CUT_OFF = {
    "cut off": '{"commitInfo":{"timestamp":17',
    "no object": "[]",
    "another value": "17",
    "empty object": "{}",
    "empty action": '{"commitInfo":null}',
}


@pytest.mark.parametrize("text", CUT_OFF.values(), ids=CUT_OFF.keys())
@pytest.mark.parametrize("table", [PRIMARY, SECONDARY])
def test_a_table_whose_log_is_damaged_is_named(disk: Disk, table: str, text: str) -> None:
    disk.open().run(0, 1)
    newest = max((disk.table(table) / "_delta_log").glob("*.json"))
    newest.write_text(text)
    with pytest.raises(PreflightRefused, match=f"the log of table {table} cannot be read") as refused:
        disk.snapshot()
    assert "_delta_log back from a copy" in refused.value.next_step


@pytest.mark.parametrize("name", ["offsets/1", "commits/1"])
def test_a_damaged_checkpoint_is_refused_before_anything_else(disk: Disk, name: str) -> None:
    disk.open().run(0, 1)
    (disk.folder / name).write_text("v1\n")
    with pytest.raises(PreflightRefused, match=f"{name} cannot be read") as refused:
        disk.snapshot()
    assert "put the checkpoint folder back" in refused.value.next_step
    assert f"move {disk.folder.parent} " in refused.value.next_step, "and where the stream lies"


def test_the_checkpoint_of_the_current_generation_is_looked_at(disk: Disk) -> None:
    disk.open().run(0, 1)
    record = disk.snapshot().record
    assert record is not None
    second = stream_record.Generation(2, 1.0, "recovery r1")
    stream_record.save(disk.settings, replace(record, generations=(*record.generations, second)))
    assert disk.snapshot().checkpoint.planned is None


def upkeep(disk: Disk, table: str, times: int) -> None:
    """Our own commits without rows."""
    for number in range(times):
        wanted = disk.settings.model_copy(
            update={"table": disk.settings.table.model_copy(update={"checkpoint_interval": 60 + number})}
        )
        ensure_sink(wanted, disk.sinks[table].declared, STREAM, OUTPUT, generation=1)


@pytest.mark.parametrize("since", [0, 1, 2])
def test_a_log_shortened_up_to_the_newest_entry_is_made_up_for_by_the_ledger_beside_the_state(
    disk: Disk, since: int
) -> None:
    disk.open().run(0, 1)
    upkeep(disk, PRIMARY, since)
    shorten_log(disk.table(PRIMARY), since)
    snapshot = disk.snapshot()
    assert snapshot.tables[0].entry == entry(1)
    assert disk.findings() == []


def test_a_foreign_commit_behind_a_shortened_log_is_found_and_a_log_that_hides_what_came_after_the_entry_is_refused(
    disk: Disk,
) -> None:
    disk.open().run(0, 1)
    foreign_append(disk)
    shorten_log(disk.table(PRIMARY), 1)
    assert ["(WRITE) changed rows" in f.found for f in disk.findings()] == [True]
    upkeep(disk, PRIMARY, 1)
    shorten_log(disk.table(PRIMARY), 1)
    findings: list[StartFinding] = disk.findings()
    assert ["no longer shows what happened" in f.found for f in findings] == [True]


def test_without_the_ledger_beside_the_state_a_shortened_log_is_refused(disk: Disk) -> None:
    disk.open().run(0, 1)
    upkeep(disk, PRIMARY, 1)
    shorten_log(disk.table(PRIMARY), 1)
    shutil.rmtree(disk.ledger_file.folder)
    assert any("no longer shows what happened" in f.found for f in disk.findings())


def test_a_table_that_is_rarely_written_needs_no_entry_in_its_log(disk: Disk) -> None:
    disk.open().run(0, 1, 2)
    shorten_log(disk.table(DEAD_LETTERS), 0)
    assert disk.findings() == []


def test_the_topic_and_the_planned_batch_are_seen_with_offsets_id_and_retention(disk: Disk) -> None:
    disk.topics.info = TopicInfo(TOPIC, TOPIC_ID, 2, 604_800_000, "delete")
    topic = disk.snapshot().topics[0]
    assert (topic.topic_id, topic.earliest, topic.retention_ms) == (TOPIC_ID, {0: 0, 1: 0}, 604_800_000)
    assert [f.severity for f in disk.findings()] == ["warn"]
    disk.open().run(0, 1)
    disk.plan(2)
    checkpoint = disk.snapshot().checkpoint
    assert (checkpoint.planned, checkpoint.committed) == (2, 1)
    assert checkpoint.starts == {2: ends(1)}
    assert checkpoint.ends == {1: ends(1), 2: ends(2)}
