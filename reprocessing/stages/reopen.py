"""Continuing without a replay: an abort, and a plan that skips forward.

After the fence the tables are one generation ahead of the checkpoint. So the stream continues from the savepoint of
stage `take_savepoint`: the same checkpoint, a publish of the files that the tables already have, and a generation that
names its origin. A skip does the same, with a checkpoint whose last batch ends at the plan's offsets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from reprocessing.replay import staging
from reprocessing.stages.database_tables import continue_tables, refuse_to_repeat
from reprocessing.stages.publish import PublishPosition, fence, fenced_by, publish, refuse_foreign, tables_to_publish
from reprocessing.stages.recovery import RecoveryContext
from reprocessing.stages.void_ranges import continue_topics
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange, TopicOffsets
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.sinks.stored import Content, StoredTable, newest
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.checkpoint import copy, is_made
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import Generation

Doing = Literal["abort", "skip"]


def abort(context: RecoveryContext) -> Mapping[str, Any]:
    """Let the stream continue as it was; may be run again from its beginning after a kill."""
    number = context.plan.generation + 1
    fenced = fenced_by(context.settings, context.stream, context.plan.id)  # if not, the stream may have run since
    if context.journal.begun("fence") and fenced and context.record.generation != number:
        savepoint = context.kept()
        refuse_to_repeat(context, savepoint.batch)
        # All tables: after a kill, some may not have it.
        generation = context.plan.generation
        fence(context.settings, context.stream, context.plan.id, generation, passed=True, lease=context.lease)
        reopen(context, savepoint, savepoint.ends, number=number, doing="abort")
    staging.clear(context.settings, context.plan)
    return {"generation": context.record.generation}


def skip(context: RecoveryContext) -> Mapping[str, Any]:
    """Let the stream continue at the plan's offsets; may be run again from its beginning after a kill."""
    if context.record.generation != context.plan.generation:
        savepoint = context.kept()
        reopen(context, savepoint, skipped_to(context), number=context.plan.generation, doing="skip")
    return {"generation": context.record.generation}


def skipped_to(context: RecoveryContext) -> TopicOffsets:
    """The offsets at which the stream continues: those of the plan, or its position, if that is further."""
    at = context.position
    return {
        topic: {p: max(offset, at.get(topic, {}).get(p, 0)) for p, offset in each.items()}
        for topic, each in context.plan.wanted.items()
    }


def check_skip(context: RecoveryContext) -> None:
    """Raise what `skip` would raise if the tables stay as they are: ForeignWrite or PreflightRefused."""
    refuse_foreign(context.settings, context.stream, context.record)
    if context.record.generation != context.plan.generation:
        _as_they_are(context, context.kept(), "skip")


def _as_they_are(context: RecoveryContext, savepoint: Savepoint, doing: Doing) -> dict[str, Content]:
    """The content of the tables after the savepoint's batch, with changes that a person has accepted since.

    A batch that is in the tables and not committed in the checkpoint is repeated after an abort, so its rows are
    removed; a skip continues after it, so they stay. Raises PreflightRefused if an accepted change came after rows that
    would be removed.
    """
    unfinished = context.stopped_at.batch != savepoint.batch
    if unfinished and doing == "skip":
        return {table.name: table.content() for table in tables_to_publish(context.settings, context.stream)}
    contents = savepoints.contents_of(context.settings, context.stream, savepoint)
    for table in tables_to_publish(context.settings, context.stream):
        _, foreign = newest(table.commits(), context.stream.name)
        if foreign and all(commit.version in context.record.accepts(table.name) for commit in foreign):
            if unfinished or _further(table, savepoint):
                raise PreflightRefused(
                    f"version {foreign[0].version} of table {table.name} came after a batch that was not finished",
                    f"put the table back to version {foreign[-1].version - 1}, and make the change again afterwards",
                )
            contents[table.name] = table.content()
    return contents


def _further(table: StoredTable, savepoint: Savepoint) -> bool:
    """True if the table has a batch after the savepoint's, which a crash kept out of the primary table."""
    entries = (commit.entry for commit in table.commits() if commit.entry is not None)
    newest_batch = next((e for e in entries if e.stream == savepoint.stream and e.kind == "batch"), None)
    return newest_batch is not None and newest_batch.txn > savepoint.txn


def reopen(context: RecoveryContext, savepoint: Savepoint, ends: TopicOffsets, *, number: int, doing: Doing) -> None:
    """Open generation `number` on the content of the savepoint; the next batch begins at `ends`."""
    settings, record = context.settings, context.record
    target = StreamFolder.of(settings, context.stream.name).checkpoint(number).folder
    if not is_made(target):
        copy(savepoints.checkpoint_of(settings, savepoint), target, ends=ends)
    reason, aborts = f"{doing} of {context.plan.id}", doing == "abort"
    opened = Generation(number, time.time(), reason, savepoint.generation, savepoint.batch, aborts=aborts)
    continue_topics(context, Txn(number, savepoint.batch), opened)
    continue_tables(context, Txn(number, savepoint.batch))
    publish(
        settings,
        context.stream,
        _as_they_are(context, savepoint, doing),
        record=record,
        plan=context.plan.id,
        position=PublishPosition(
            Txn(number, savepoint.batch),
            tuple(OffsetRange(topic, savepoint.topic_ids[topic], {}, dict(each)) for topic, each in ends.items()),
            savepoint.code,
        ),
        new={table.name: table.no_rows() for table in tables_to_publish(settings, context.stream)},
        between=lambda _: context.crash_point(f"recover_{doing}_between"),
        lease=context.lease,
    )
    context.crash_point(f"recover_{doing}_published")
    void = []
    if doing == "skip":
        void = list(_void(context, ends, number))
        border = tuple(
            OffsetRange(topic, savepoint.topic_ids[topic], dict(each), dict(each)) for topic, each in ends.items()
        )
        entry = LedgerEntry("batch", context.stream.name, context.stream.primary.name, number, savepoint.batch, border)
        ledger_file(settings, context.stream.name).append(replace(entry, code=savepoint.code), {}, durable=True)
    opened_record = replace(record, generations=(*record.generations, opened), void_ranges=(*record.void_ranges, *void))
    stream_record.save(settings, opened_record)


def _void(context: RecoveryContext, ends: TopicOffsets, generation: int) -> Iterator[Mapping[str, Any]]:
    """Yields the record's entries for the void ranges, which hold as long as their generation is on the path."""
    at = context.position
    earliest = {topic.name: topic.earliest for topic in context.plan.saw.topics}
    for topic, each in ends.items():
        for partition, end in each.items():
            begin = at.get(topic, {}).get(partition, earliest[topic].get(partition, 0))
            if begin < end:
                place = {"topic": topic, "partition": partition, "from": begin, "to": end}
                yield {**place, "plan": context.plan.id, "generation": generation, "at": time.time()}
