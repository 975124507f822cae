"""Where a recovery replays: a state folder and tables of its own, on which an ordinary session runs.

    <state>/recoveries/<plan>/state/<stream>/     stream.json, the new generation's checkpoint, its ledger
    <tables>/_staging/<plan>/<table>/             ordinary tables; nobody reads them but the audit

The tables begin with what the savepoint retains (of Delta tables, hard links), and say in their ledger that they hold
everything up to its batch; so the replay is nothing but this stream, started again from there, with today's code.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace

from reprocessing.plans.plan import StreamPlan
from reprocessing.plans.plan_file import folder, staging
from streaming_jobs.files import private_folder, sync, sync_tree
from streaming_jobs.ledger import LedgerEntry, Txn
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import all_tables, store_of
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.checkpoint_cut import copy
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import BoundTable, Generation, StreamRecord
from streaming_jobs.stream import Stream


def settings_of(settings: Settings, plan: StreamPlan) -> Settings:
    """The settings under which the replay runs: the stream's own, with the plan's folders."""
    return settings.model_copy(
        update={
            "state_dir": folder(settings, plan.id) / "state",
            "tables_dir": staging(settings, plan),
            "savepoint": settings.savepoint.model_copy(update={"every": settings.savepoint.every * 0}),
        }
    )


def prepare(
    settings: Settings, stream: Stream, plan: StreamPlan, record: StreamRecord, savepoint: Savepoint | None
) -> None:
    """Make the workshop anew, whatever a kill has left of it."""
    clear(settings, plan)
    own = settings_of(settings, plan)
    private_folder(own.tables)  # also where the replay makes the tables: `sync_all` comes before it
    opened = replace(
        record,
        generations=(*record.generations, opened_by(plan)),
        tables=(),
        accepted=(),
    )
    if savepoint is None or plan.discards_state:
        topics = tuple(replace(topic, start=plan.base.ends.get(topic.name, topic.start)) for topic in record.topics)
        opened = replace(opened, topics=topics, state_fingerprint={})
    if savepoint is None:
        stream_record.save(own, opened)
        return
    contents = savepoints.contents_of(settings, stream, savepoint)
    declared = {table.name: table for table, _ in all_tables(stream)}
    roles = {table.name: table.role for table in record.tables}
    bound = []
    for saved in savepoint.tables:
        entry = _up_to(plan, savepoint, saved.name, primary=roles[saved.name] == "primary")
        begun = declared[saved.name]
        table = store_of(begun).create(own, begun, plan.stream, contents[saved.name], entry)
        bound.append(BoundTable(saved.name, table.table_id, roles[saved.name]))
    if not plan.discards_state:
        opened = replace(opened, state_fingerprint=dict(savepoint.state_fingerprint))
        copy(
            savepoints.checkpoint_of(settings, savepoint),
            StreamFolder.of(own, plan.stream).make().checkpoint(plan.generation).folder,
        )
    stream_record.save(own, replace(opened, tables=tuple(bound)))


def sync_all(settings: Settings, plan: StreamPlan) -> None:
    """Have the workshop on disk: state, tables, and the folders that name them."""
    own = settings_of(settings, plan)
    for root in (own.state, own.tables):
        sync_tree(root)
    for above in (own.tables.parent, own.tables.parent.parent):
        sync(above)


def opened_by(plan: StreamPlan) -> Generation:
    """The generation that a plan's replay opens."""
    origin = plan.base.generation if plan.base.savepoint else None
    return Generation(
        plan.generation, time.time(), f"recovery {plan.id}", origin, plan.base.batch, restarts=plan.discards_state
    )


def clear(settings: Settings, plan: StreamPlan) -> None:
    """Remove the workshop; it stays removed."""
    state = folder(settings, plan.id) / "state"
    shutil.rmtree(StreamFolder.of(settings_of(settings, plan), plan.stream).path, ignore_errors=True)
    shutil.rmtree(staging(settings, plan), ignore_errors=True)
    parent = staging(settings, plan).parent
    for shared in (state, parent):  # with other streams of the plan, or with other plans
        if shared.is_dir() and not any(shared.iterdir()):
            shared.rmdir()
    for place in (state, folder(settings, plan.id), parent, parent.parent):
        if place.is_dir():
            sync(place)


def _up_to(plan: StreamPlan, savepoint: Savepoint, table: str, *, primary: bool) -> LedgerEntry:
    """An entry that says: this table holds everything up to the savepoint's batch, in the plan's generation."""
    at = Txn(plan.generation, opened_by(plan).first_batch - 1)
    return LedgerEntry(
        kind="publish",
        stream=plan.stream,
        table=table,
        generation=plan.generation,
        batch=at.batch,
        offsets=savepoint.offsets,
        txns={other.name: at.version for other in savepoint.tables if other.name != table} if primary else {},
        plan=plan.id,
        note=f"the files of savepoint {savepoint.id}",
    )
