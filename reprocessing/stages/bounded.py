"""The end of a bounded recovery: rebuilt rows and later rows become one content per table.

With K the savepoint of the replay's start, U the last batch to correct, and L the stream's last batch, a table's new
content is

    the rows at K + the rebuilt rows of the batches up to U + the rows at L that are not among those at U

as multisets. The replay has put the first two into the staging tables. Rows after U keep their files where no file
holds both (`StoredTable.add_later_rows`). Below the folder of the staging tables are then, for the audit:

    _combined/<table>    the new content, which is published
    _until/<table>       the rows at U
    _before/<table>      the rows at L

The new generation continues after L, with the checkpoint of the old one cut there, so no later batch is read again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from reprocessing.plan.conditions import columns
from reprocessing.plan.plan import Until
from reprocessing.plan.plan_file import compared_folder
from reprocessing.plan.replay_range import rows_of_no_batch
from reprocessing.replay.difference import one, unequal
from reprocessing.replay.session import last_entry
from reprocessing.stages.publish import PublishPosition
from reprocessing.stages.recovery import RecoveryContext
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.platform.table_rows import opened
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime import output_plans
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.sinks.tables import all_tables, copied_table, remove_tables, store_of
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.checkpoint import copy, is_made
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import CorrectedBatches, Generation
from streaming_jobs.storage.locations import local_scratch, remove_tree, sync_location
from streaming_jobs.text import commands

_COMBINED, _UNTIL, _BEFORE = "_combined", "_until", "_before"


def publish_position(context: RecoveryContext) -> PublishPosition:
    """The end of the replay, or, of a bounded recovery, the end of the stream before it."""
    last = last_entry(context.replay_settings, context.stream)
    begins = context.plan.base.ends  # so that the log shows the offsets from which the rows were rebuilt
    at, ranges = last.txn, last.offsets
    if context.plan.until is not None:
        kept = context.kept()
        at, ranges = Txn(context.plan.generation, kept.batch), kept.offsets
    offsets = tuple(replace(each, start=dict(begins.get(each.topic, {}))) for each in ranges)
    return PublishPosition(at, offsets, last.code)


def until_savepoint(context: RecoveryContext) -> Savepoint:
    """The savepoint with the rows as of the last batch to correct; raises PreflightRefused if it was dropped."""
    return context.savepoint(_until(context).savepoint)


def add_later_rows(context: RecoveryContext) -> Mapping[str, Any]:
    """Recreate the tables below the staging folder; returns the findings of the stage.

    Raises PreflightRefused if there are rows that are of no batch (`refuse_other_changes`).
    """
    refuse_other_changes(context)
    for folder in (_COMBINED, _UNTIL, _BEFORE):
        remove_tables(context.beside(folder), context.stream)
    before, then = (
        savepoints.contents_of(context.settings, context.stream, savepoint)
        for savepoint in (context.kept(), until_savepoint(context))
    )
    position, later_files = publish_position(context), dict[str, Any]()
    for declared, _ in all_tables(context.stream):
        staged = context.staged()[declared.name]
        nothing = staged.no_rows()  # a quarantine may be younger than a savepoint
        now, earlier = before.get(declared.name, nothing), then.get(declared.name, nothing)
        entry = LedgerEntry(
            "publish",
            context.stream.name,
            declared.name,
            position.at.generation,
            position.at.batch,
            position.offsets,
            code=position.code,
            plan=context.plan.id,
        )
        combined = store_of(declared).create(
            combined_settings(context), declared, context.stream.name, staged.content(), entry
        )
        later = combined.add_later_rows(now, earlier)
        for folder, content in ((_UNTIL, earlier), (_BEFORE, now)):
            copied_table(context.replay_settings, context.beside(folder), declared, context.stream.name, content)
        context.crash_point("recover_add_later_rows_between")
        later_files[declared.name] = {"whole": later.whole, "split": later.split}
    for folder in (_COMBINED, _UNTIL, _BEFORE):
        sync_location(context.beside(folder))
    return {"later_files": later_files}


def refuse_other_changes(context: RecoveryContext, *, waiting: bool = False) -> None:
    """Raise PreflightRefused for rows that are of no batch (`rows_of_no_batch`)."""
    end = until_savepoint(context)
    reason = rows_of_no_batch(context.settings, context.stream, context.record, context.base(), end, waiting=waiting)
    if reason is not None:
        again = f"give the plan up: {commands.abort(context.plan.id)}; then plan again"
        raise PreflightRefused(reason[0], f"{again} {'with a later end, or ' if reason[1] else ''}without --until")


def combined(context: RecoveryContext) -> dict[str, StoredTable]:
    """The tables that a plan publishes, by name: the combined ones, or, of an ordinary recovery, the staging tables."""
    folder = "" if context.plan.until is None else _COMBINED
    return {declared.name: context.rebuilt_table(declared, folder) for declared, _ in all_tables(context.stream)}


def combined_settings(context: RecoveryContext) -> Settings:
    """The settings under which the tables to publish are ordinary tables."""
    settings = context.replay_settings
    return settings if context.plan.until is None else settings.with_tables(context.beside(_COMBINED))


def rows_until(context: RecoveryContext, declared: DeclaredTable) -> StoredTable:
    return context.rebuilt_table(declared, _UNTIL)


def unequal_later_rows(context: RecoveryContext, declared: DeclaredTable) -> int:
    """The number of rows, after the last batch to correct, that the combined table lacks or has too many of.

    All rows are counted, whatever pieces hold them: combined + at U = before + staging. Pieces on both sides of the
    equation are not read.
    """
    after, until, before, staged = (
        context.rebuilt_table(declared, folder).content() for folder in (_COMBINED, _UNTIL, _BEFORE, "")
    )
    after, staged = after.without(staged), staged.without(after)
    before, until = before.without(until), until.without(before)
    after, before = after.without(before), before.without(after)
    until, staged = until.without(staged), staged.without(until)
    if not any(content.pieces for content in (after, until, before, staged)):
        return 0
    folder = compared_folder(context.settings, context.plan)
    remove_tree(folder)
    try:
        tables = {}
        for name, content in (("combined", after), ("until", until), ("before", before), ("staged", staged)):
            copied = copied_table(context.replay_settings, folder / name, declared, context.stream.name, content)
            tables[name] = copied.readable()
        weights = {"combined": 1, "until": 1, "before": -1, "staged": -1}
        names = list(dict.fromkeys(name for table in tables.values() for name in columns(table)))
        sql = unequal(names, {name: (weights[name], columns(table)) for name, table in tables.items()})
        with local_scratch(folder) as scratch:
            return int(one(opened(tables, scratch / "_spill"), sql, declared.name)["n"])
    finally:
        remove_tree(folder)


def continue_after(context: RecoveryContext) -> Mapping[str, Any]:
    """Let the stream continue after its last batch, in the plan's generation; may be run again after a kill."""
    settings, record, number = context.settings, context.record, context.plan.generation
    if record.generation == number:
        return {"generation": number}
    kept, folder = context.kept(), StreamFolder.of(settings, context.stream.name)
    target = folder.checkpoint(number).folder
    if not is_made(target):
        copy(savepoints.checkpoint_of(settings, kept), target)
    context.crash_point("recover_continue_generation_between")
    ledger, line = ledger_file(settings, context.stream.name), _border_line(context, kept)
    if not any(each.entry.txn == line.txn for each in ledger.after(line.stream, None, at_most=1)):
        ledger.append(line, {}, durable=True)
    output_plans.adopt(folder.output_plans, StreamFolder.of(context.replay_settings, context.stream.name).output_plans)
    opened_by = Generation(
        number,
        time.time(),
        f"recovery {context.plan.id}",
        kept.generation,
        kept.batch,
        corrected=_corrected(context, kept),
    )
    stream_record.save(settings, replace(record, generations=(*record.generations, opened_by)))
    return {"generation": number}


def _border_line(context: RecoveryContext, kept: Savepoint) -> LedgerEntry:
    """A batch without records after the last one, so that the ledger shows where the generation begins."""
    at, primary = Txn(context.plan.generation, kept.batch), context.stream.primary.name
    return LedgerEntry(
        "batch",
        context.stream.name,
        primary,
        at.generation,
        at.batch,
        tuple(replace(each, start=dict(each.end)) for each in kept.offsets),
        txns={table.name: at.version for table, _ in all_tables(context.stream) if table.name != primary},
        code=kept.code,
    )


def _corrected(context: RecoveryContext, kept: Savepoint) -> CorrectedBatches:
    """What the replay has read and written, in place of the batches that it has corrected."""
    base, until = context.plan.base, _until(context)
    rows = Counter[str]()
    for entry in {entry.txn: entry for entry in context.replayed()}.values():  # a repeated batch counts once
        rows.update(entry.rows)
    offsets = (
        OffsetRange(topic, kept.topic_ids[topic], dict(base.ends.get(topic, {})), dict(ends))
        for topic, ends in until.ends.items()
    )
    return CorrectedBatches(base.after, until.txn, tuple(offsets), dict(rows), publish_position(context).code.hash)


def _until(context: RecoveryContext) -> Until:
    assert context.plan.until is not None
    return context.plan.until
