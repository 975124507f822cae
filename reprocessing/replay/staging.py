"""The folders of a replay: a state folder and tables, on which an ordinary session runs.

Of a recovery:

    <state>/recoveries/<plan>/state/<stream>/     stream.json, the new generation's checkpoint, its ledger
    <tables>/_staging/<plan>/<table>/             ordinary tables; only the audit reads them
    <tables>/<table>/_staged-<plan>/              on a store: there they are below the table that they are staged for

The tables begin with the content of a savepoint (of Delta tables, hard links), and with a ledger entry at its batch; so
the replay is simply this stream, started again from there, with today's code.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from reprocessing.plan.plan import StreamRecoveryPlan, opened_by
from reprocessing.plan.plan_file import compared_folder, folder, replay_state, staging_folder
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import TopicOffsets
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import all_tables, open_table, store_of
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.checkpoint import copy
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import BoundTable, Generation, StreamRecord
from streaming_jobs.storage.files import sync, sync_tree
from streaming_jobs.storage.locations import StorePath, made_folder, remove_tree, sync_location
from streaming_jobs.stream import Stream

_SNAPSHOTS = {
    "spark.sql.streaming.stateStore.maintenanceInterval": "5s",
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "2",
}
"""State is loaded from its last snapshot, and the changes since then one by one: of a replay these can be millions.

By Spark's defaults a snapshot is at least ten batches, and up to a minute, old. While the last round of the replay, and
the stream's next start, load the state, the stream stands still.
"""


def settings_of(settings: Settings, plan: StreamRecoveryPlan) -> Settings:
    own = settings.for_replay(plan.stream, replay_state(settings, plan.id), staging_folder(settings, plan))
    spark = own.spark.model_copy(update={"extra": {**_SNAPSHOTS, **own.spark.extra}})
    own = own.model_copy(update={"spark": spark})
    if isinstance(own.tables, Path) and not plan.wrong_versions:
        return own
    # deltalake rewrites no file outside of a table's prefix, and a staged table shares those of the published one. The
    # replay of a reader of the table needs the rebuilt rows in files of their own.
    return own.model_copy(update={"table": own.table.model_copy(update={"compact_after_files": 0})})


def prepare(
    settings: Settings, stream: Stream, plan: StreamRecoveryPlan, record: StreamRecord, savepoint: Savepoint | None
) -> None:
    """Create the staging folders, and remove what a kill has left in them."""
    clear(settings, plan)
    target = settings_of(settings, plan)
    fill(settings, target, stream, record, opened_by(plan), savepoint, starts=plan.base.ends, plan=plan.id)


def fill(
    settings: Settings,
    target: Settings,
    stream: Stream,
    record: StreamRecord,
    opened: Generation,
    savepoint: Savepoint | None,
    *,
    starts: TopicOffsets,
    plan: str,
) -> None:
    """Make the tables and the state of a replay below the folders of its settings `target`, which must be empty.

    They are those of the savepoint; without one, the replay makes the tables, and begins at `starts`. `opened` is its
    generation; if that restarts, state begins empty at `starts` too. `plan` is named by the tables' entries.
    """
    made_folder(target.tables)  # also where the replay makes the tables: `sync_all` comes before it
    begun = replace(record, generations=(*record.generations, opened), tables=(), accepted=(), tag=None)
    if savepoint is None or opened.restarts:
        topics = tuple(replace(topic, start=starts.get(topic.name, topic.start)) for topic in record.topics)
        begun = replace(begun, topics=topics, state_fingerprint={})
    if savepoint is None:
        stream_record.save(target, begun)
        return
    contents = savepoints.contents_of(settings, stream, savepoint)
    declared = {table.name: table for table, _ in all_tables(stream)}
    roles = {table.name: table.role for table in record.tables}
    bound = []
    for saved in savepoint.tables:
        entry = _up_to(plan, opened, savepoint, saved.name, primary=roles[saved.name] == "primary")
        table = store_of(declared[saved.name]).create(
            target, declared[saved.name], stream.name, contents[saved.name], entry
        )
        bound.append(BoundTable(saved.name, table.table_id, roles[saved.name]))
    if not opened.restarts:
        begun = replace(begun, state_fingerprint=dict(savepoint.state_fingerprint))
        copy(
            savepoints.checkpoint_of(settings, savepoint),
            StreamFolder.of(target, stream.name).make().checkpoint(opened.number).folder,
        )
    stream_record.save(target, replace(begun, tables=tuple(bound)))


def make_empty_tables(settings: Settings, target: Settings, stream: Stream, opened: Generation, plan: str) -> None:
    """Make the stream's tables without rows after `fill`, so that the code meets the columns that it would meet."""
    bound = []
    for declared, role in all_tables(stream):
        live = open_table(settings, declared, stream.name)
        if live is not None:
            entry = LedgerEntry("publish", stream.name, declared.name, opened.number, -1, plan=plan)
            made = store_of(declared).create(target, declared, stream.name, live.no_rows(), entry)
            bound.append(BoundTable(declared.name, made.table_id, role))
    stream_record.save(target, replace(stream_record.existing(target, stream.name), tables=tuple(bound)))


def scratch_folder(settings: Settings, plan: StreamRecoveryPlan) -> Path:
    """A folder of this machine for scratch files; `clear` removes it."""
    staging = staging_folder(settings, plan)
    return staging if isinstance(staging, Path) else folder(settings, plan.id) / "scratch"


def sync_all(settings: Settings, plan: StreamRecoveryPlan) -> None:
    """Sync the staging folders: state, tables, and the folders above them."""
    target = settings_of(settings, plan)
    sync_location(target.state)
    if isinstance(tables := target.tables, Path):
        sync_tree(tables)
        for above in (tables.parent, tables.parent.parent):
            sync(above)


def clear(settings: Settings, plan: StreamRecoveryPlan) -> None:
    """Remove the staging tables and their state, durably.

    Of tables on a store the logs are removed: their files may have become files of the tables that they were staged
    for, and maintenance of those tables removes the others.
    """
    scratch = scratch_folder(settings, plan)
    remove_tree(StreamFolder.of(settings_of(settings, plan), plan.stream).path)
    shutil.rmtree(scratch, ignore_errors=True)
    places = [folder(settings, plan.id) / "state"]
    if isinstance(settings.tables, StorePath):
        for table in settings.tables.iterdir():
            for staged in table.glob(f"_staged-{plan.staging}*"):
                remove_tree(staged / "_delta_log")
        remove_tree(compared_folder(settings, plan))
    else:
        places.append(scratch.parent)
    for shared in places:  # with other streams of the plan, or with other plans
        if shared.is_dir() and not any(shared.iterdir()):
            shared.rmdir()
    for changed in (folder(settings, plan.id), *places, *(place.parent for place in places)):
        if changed.is_dir():
            sync(changed)


def _up_to(plan: str, opened: Generation, savepoint: Savepoint, table: str, *, primary: bool) -> LedgerEntry:
    """The ledger entry of a staging table with the rows up to the savepoint's batch, in the replay's generation."""
    at = Txn(opened.number, opened.first_batch - 1)
    return LedgerEntry(
        kind="publish",
        stream=savepoint.stream,
        table=table,
        generation=at.generation,
        batch=at.batch,
        offsets=savepoint.offsets,
        txns={other.name: at.version for other in savepoint.tables if other.name != table} if primary else {},
        plan=plan,
        note=f"the files of savepoint {savepoint.id}",
    )
