"""Records for topics that a replay beside its stream has staged: appended once the stream has stopped, and compared.

    follow           each batch's records go to files in staging, and its rows to the staging tables
    append_records   batch by batch, each topic gets the records from the writer that its stream uses

A note beside each batch has the ranges of its records in the topic. After a kill, batches with a note are passed over.
Only the newest appended batch may lack its note: the topic's marker has the batch and the same ranges. A topic with
delivery `at_least_once` has no marker, so it gets this batch a second time.

Records of a batch that the staging tables lack are left out: Spark repeats that batch, and the replay appends it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from reprocessing.stages.recovery import RecoveryContext
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.sinks.batches import batches_rows
from streaming_jobs.sinks.kafka.staged import StagedBatch, staged_batches, written_below
from streaming_jobs.sources.record_blocks import ArchivedRecords
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted

_FIRST_STAGED_OFFSET = 1 << 40
"""Offsets of staged records begin here in a comparison: after every offset of the topic."""

Staged = Mapping[str, Mapping[Txn, StagedBatch]]
"""By sink, as ledger entries name it, the staged batches in order."""


def staged(context: RecoveryContext) -> Staged:
    """The staged batches of all topics of the stream, also those that are appended."""
    return {
        sink.ledger_name: staged_batches(context.staged_records / sink.name)
        for sink in context.stream.topic_sinks.values()
    }


def records_staged(context: RecoveryContext) -> int:
    return sum(batch.count for batches in staged(context).values() for batch in batches.values())


def append_records(context: RecoveryContext) -> Mapping[str, Any]:
    """Append the staged records in the order of their batches; may be run again after a kill.

    A topic with delivery `exactly_once` gets each batch once, in a transaction; with `at_least_once` a batch is
    appended again if a kill has kept it from its note.

    Raises PreflightRefused before the first one if staged records are gone, and the errors of topics and brokers.
    """
    began, waiting, appended = time.monotonic(), staged(context), 0
    at = context.rebuilt_table(context.stream.primary).position
    batches = {
        name: [batch for txn, batch in of_topic.items() if at is not None and txn <= at]
        for name, of_topic in waiting.items()
    }
    refuse_incomplete(context)
    for sink in context.stream.topic_sinks.values():
        due = [batch for batch in batches[sink.ledger_name] if batch.written is None]
        if not due:
            continue
        with context.written.appending(context.stream, sink, context.plan.generation) as writer:
            for batch in due:
                writer.write(batch.entry, context.written.records(batch))
                context.crash_point("recover_append_written")
                assert writer.newest is not None
                batch.note_written(writer.newest.written)
                appended += batch.count
                context.crash_point("recover_append_next")
    if context.stream.batches_only:
        _list_batches(context)
    records = sum(batch.count for of_topic in batches.values() for batch in of_topic)
    return {"records": records, "appended": appended, "seconds": round(time.monotonic() - began, 1)}


def refuse_incomplete(context: RecoveryContext) -> None:
    """Raise PreflightRefused if staged records are gone: the replay has counted those of each batch."""
    waiting = staged(context)
    for entry in context.replayed() if waiting else ():
        for name, of_topic in waiting.items():
            made = entry.rows.get(name, 0)
            there = of_topic[entry.txn].count if entry.txn in of_topic else 0
            if made != there:
                raise PreflightRefused(
                    f"{counted(there, 'staged record')} of {entry.txn} for {name} {'is' if there == 1 else 'are'} "
                    f"there, and the replay has made {made}",
                    f"give the plan up: {commands.abort(context.plan.id)}; then make a new one",
                )


def _list_batches(context: RecoveryContext) -> None:
    """Add the rows of the appended batches to the staging table that lists them: the replay could not know the ranges.

    Once, however often it runs: a commit of kind `redrive` is idempotent by the plan's id.
    """
    table = context.rebuilt_table(context.stream.primary)
    newest = table.newest_entry()
    rows = [batches_rows(txn, written) for txn, written in written_below(context.staged_records).items()]
    if rows and newest is not None:
        table.append(pa.concat_tables(rows), replace(newest, kind="redrive", plan=context.plan.id))


def rows_of(context: RecoveryContext, sink: KafkaSink) -> Iterator[ArchivedRecords]:
    """Yields the staged records of a topic as records of partition 0, with offsets from `_FIRST_STAGED_OFFSET` on.

    Records without a timestamp have the present time.
    """
    number, now = _FIRST_STAGED_OFFSET, int(time.time() * 1000)
    for batch in staged_batches(context.staged_records / sink.name).values():
        for block in batch.blocks():
            of_topic = block.filter(pa.compute.equal(block["topic"], sink.name))
            times = [at or now for at in of_topic["timestamp"].to_pylist()]
            columns = {
                "offset": pa.array(range(number, number + len(times)), pa.int64()),
                "timestamp_ms": pa.array(times, pa.int64()),
                "timestamp_type": pa.array(["CreateTime"] * len(times), pa.string()),
                **{name: of_topic[name] for name in ("key", "value", "headers")},
            }
            number += len(times)
            if times:
                yield ArchivedRecords(0, pa.RecordBatch.from_pydict(columns))


def written_until(context: RecoveryContext, topic: str) -> dict[int, int]:
    """By partition, where the running stream's records of batches end up to which the replay has followed.

    A partition that no batch after the replay's start has written is left out; there may be one that the plan lacks.
    """
    found, upto = dict[int, int](), context.result("follow")
    goal = Txn(upto["generation"], upto["batch"])
    topic_id, partitions = context.written.topic_id(topic), context.written.partitions(topic)
    for day in ledger_file(context.settings, context.stream.name).days(context.stream.name):
        for line in reversed(day):
            if line.txn <= context.plan.base.after or len(found) == partitions:
                return found  # the stream stands still meanwhile, and older batches end before
            for each in line.read().entry.written if line.txn <= goal else ():
                if (each.topic, each.topic_id) == (topic, topic_id):
                    found[each.partition] = max(each.end, found.get(each.partition, 0))
    return found
