"""Going on without a replay: what abort does, and a plan that goes forward.

After the fence the tables are one generation ahead of the checkpoint. So the stream continues from the savepoint of
stage `keep`: the same checkpoint, a publish of the files that the tables already have, and a generation that names its
origin. Going forward is the same with a checkpoint whose last batch ends further on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from reprocessing.rebuild import staging
from reprocessing.rebuild.context import RecoveryContext
from reprocessing.rebuild.publish import fence, fenced_by, publish, tables_to_publish
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger import LedgerEntry, Txn
from streaming_jobs.positions import OffsetRange, TopicOffsets, decode
from streaming_jobs.preflight.take_snapshot import ledger_file
from streaming_jobs.sinks.stored import Content, StoredTable, newest
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.checkpoint_cut import copy
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import Generation

Doing = Literal["abort", "skip"]


def abort(context: RecoveryContext) -> Mapping[str, Any]:
    """Bring the stream to where it goes on as it was; may be run again from its beginning after a kill."""
    number = context.plan.generation + 1
    fenced = fenced_by(context.settings, context.stream, context.plan.id)  # else the stream was free to run on
    if context.journal.begun("fence") and fenced and context.record.generation != number:
        kept = context.kept()
        # Of all tables: a kill may have left some without it.
        fence(context.settings, context.stream, context.plan.id, context.plan.generation, passed=True)
        reopen(context, kept, kept.ends, number=number, doing="abort")
    staging.clear(context.settings, context.plan)
    return {"generation": context.record.generation}


def skip(context: RecoveryContext) -> Mapping[str, Any]:
    """Let the stream go on at the plan's offsets; may be run again from its beginning after a kill."""
    if context.record.generation != context.plan.generation:
        kept = context.kept()
        reopen(context, kept, skipped_to(context), number=context.plan.generation, doing="skip")
    return {"generation": context.record.generation}


def skipped_to(context: RecoveryContext) -> TopicOffsets:
    """Where the stream goes on: the plan's offsets, or where it is by now, if that is further."""
    at = position(context)
    return {
        topic: {p: max(offset, at.get(topic, {}).get(p, 0)) for p, offset in each.items()}
        for topic, each in context.plan.wanted.items()
    }


def position(context: RecoveryContext) -> TopicOffsets:
    """Where the stream had come when it was kept: a batch that only the tables know as done counts."""
    return decode(context.found("keep")["position"])


def _as_they_are(context: RecoveryContext, kept: Savepoint, doing: Doing) -> dict[str, Content]:
    """What the tables hold after the savepoint's batch; where a person has accepted a change since, with that change.

    A batch that the tables have and the checkpoint does not know as done comes again after an abort, so its rows go; a
    skip lies behind it, so they stay. Raises PreflightRefused where an accepted change came on top of rows that go.
    """
    unfinished = context.found("keep")["batch"] != kept.batch
    if unfinished and doing == "skip":
        return {table.name: table.content() for table in tables_to_publish(context.settings, context.stream)}
    contents = savepoints.contents_of(context.settings, context.stream, kept)
    for table in tables_to_publish(context.settings, context.stream):
        _, foreign = newest(table.commits(), context.stream.name)
        if foreign and all(commit.version in context.record.accepts(table.name) for commit in foreign):
            if unfinished or _further(table, kept):
                raise PreflightRefused(
                    f"version {foreign[0].version} of table {table.name} came after a batch that was not finished",
                    f"put the table back to version {foreign[-1].version - 1}, and make the change again afterwards",
                )
            contents[table.name] = table.content()
    return contents


def _further(table: StoredTable, kept: Savepoint) -> bool:
    """True if the table has a batch after the savepoint's: a crash came before the primary table had it too."""
    entries = (commit.entry for commit in table.commits() if commit.entry is not None)
    newest_batch = next((e for e in entries if e.stream == kept.stream and e.kind == "batch"), None)
    return newest_batch is not None and newest_batch.txn > kept.txn


def reopen(context: RecoveryContext, kept: Savepoint, ends: TopicOffsets, *, number: int, doing: Doing) -> None:
    """Open generation `number` on what the savepoint holds; the next batch begins at `ends`."""
    settings, record = context.settings, context.record
    target = StreamFolder.of(settings, context.stream.name).checkpoint(number).folder
    if not target.exists():
        copy(savepoints.checkpoint_of(settings, kept), target, ends=ends)
    publish(
        settings,
        context.stream,
        _as_they_are(context, kept, doing),
        record=record,
        plan=context.plan.id,
        at=Txn(number, kept.batch),
        offsets=[OffsetRange(topic, kept.topic_ids[topic], {}, dict(each)) for topic, each in ends.items()],
        code=kept.code,
        between=lambda _: context.crash_point(f"recover_{doing}_between"),
    )
    context.crash_point(f"recover_{doing}_published")
    reason, aborts = f"{doing} of {context.plan.id}", doing == "abort"
    opened = Generation(number, time.time(), reason, kept.generation, kept.batch, aborts=aborts)
    void = []
    if doing == "skip":
        void = list(_void(context, ends, number))
        border = tuple(
            OffsetRange(topic, kept.topic_ids[topic], dict(each), dict(each)) for topic, each in ends.items()
        )
        entry = LedgerEntry("batch", context.stream.name, context.stream.primary.name, number, kept.batch, border)
        ledger_file(settings, context.stream.name).append(replace(entry, code=kept.code), {})
    opened_record = replace(record, generations=(*record.generations, opened), void_ranges=(*record.void_ranges, *void))
    stream_record.save(settings, opened_record)


def _void(context: RecoveryContext, ends: TopicOffsets, generation: int) -> Iterator[Mapping[str, Any]]:
    """The ranges that are never read, as the record keeps them: as long as their generation is on the path."""
    at = position(context)
    earliest = {topic.name: topic.earliest for topic in context.plan.saw.topics}
    for topic, each in ends.items():
        for partition, end in each.items():
            begin = at.get(topic, {}).get(partition, earliest[topic].get(partition, 0))
            if begin < end:
                place = {"topic": topic, "partition": partition, "from": begin, "to": end}
                yield {**place, "plan": context.plan.id, "generation": generation, "at": time.time()}
