"""The void ranges of a recovery: declared when its streams stand still, and what replaces them if it is given up.

    [........ right ........|..... wrong .....|... appended by the replay ...
                            begin             end, when all streams are fenced

A batch that was written to the topic, and that a crash kept from the tables, is repeated by whatever continues the
stream, in another generation. So its records become void too, also if the recovery is given up, or only skips.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

from reprocessing.plan.affected_streams import all_streams, left_out
from reprocessing.plan.plan import opened_by
from reprocessing.plan.void_records import declared_since, first_written, lowest, path_with, topics_written, wrong_from
from reprocessing.plan.written_topics import IN_SHARDS, GroupPosition
from reprocessing.stages.recovery import RecoveryContext
from streaming_jobs.errors import OffsetsLost, PreflightRefused, TransientError, UsageError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import TopicOffsets, WrittenRange, by_place, decode, ends_of
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.sinks.tables import all_tables, existing_table
from streaming_jobs.sources.void_ranges import VoidRanges
from streaming_jobs.state import topic_records
from streaming_jobs.state.stream_record import Generation
from streaming_jobs.state.topic_records import VoidRange
from streaming_jobs.table_sources.topics import versions_of
from streaming_jobs.text import commands


def refuse_unfinished(context: RecoveryContext, position: Txn) -> None:
    """Raise UsageError for a batch that a topic has, and the tables do not: readers may have it already."""
    for sink in context.stream.topic_sinks.values():
        newest = context.written.newest(context.stream, sink)
        if newest is not None and newest.kind == "batch" and newest.txn > position:
            code = "with the corrected code if need be"
            if newest.note == IN_SHARDS:
                code = f"with code {newest.code.hash}, which began it"
            raise UsageError(
                f"topic {sink.name} has {newest.txn}, and the tables of stream {context.stream.name} lack it",
                f"let the stream finish it ({commands.run(context.stream.name, trigger='available-now')}), {code}; "
                "then resume",
            )


def fence_topics(context: RecoveryContext) -> list[WrittenRange]:
    """Fence every topic of the stream; returns the ranges of a batch that only topics have."""
    found: list[WrittenRange] = []
    generation, position = context.plan.generation, context.stopped_at
    for sink in context.stream.topic_sinks.values():
        found += context.written.fence(context.stream, sink, generation, context.plan.id, position)
        context.crash_point("recover_fence_topic")
    return found


def void_records(context: RecoveryContext) -> Mapping[str, Any]:
    """Wait until no topic has an open transaction, and declare the wrong records void: no stream reads them again."""
    stream, plan = context.stream, context.plan
    in_flight = _ranges(context.result("fence").get("in_flight", ()))
    sinks = [sink.name for sink in stream.topic_sinks.values()]
    ids = {name: _existing(context, name) for name in sinks}
    firsts = first_written(context.settings, stream, context.record, plan.base, ids)
    named = topics_written(stream, {**firsts, **plan.wrong_from, **{each.topic: {} for each in in_flight}})
    ids |= {name: found for name in named if (found := context.written.topic_id(name)) is not None}
    names = list(ids)
    ends = {name: context.written.settled(name) for name in names}
    records = [each for name in names if (each := topic_records.load(context.settings, name)) is not None]
    known = [plan.wrong_from, declared_since(records, context.record, plan.base, opened_by(plan))]
    begins = wrong_from(plan.base, ends, firsts, known=known, in_flight=in_flight)
    _refuse_readers_beyond(context, begins)
    before = lowest(in_flight)
    kept = {name: {p: before.get(name, {}).get(p, end) for p, end in each.items()} for name, each in ends.items()}
    for name in names:
        declare(context, name, ids[name], opened_by(plan), begins[name], ends[name], under_way=plan.id)
    refuse_new_readers(context)
    groups = [list(group) for name in names for group in _groups(context, name, begins[name], ends[name])]
    return {"topics": ids, "begins": begins, "ends": ends, "kept": kept, "groups": groups}


def refuse_new_readers(context: RecoveryContext) -> None:
    """Raise UsageError if a stream that the plan does not have reads what it changes, and has begun since then."""
    if late := left_out(context.settings, context.whole, [context.stream], context.topics):
        raise UsageError(
            f"stream {late[0]} reads what plan {context.plan.id} changes, and has begun since it was made",
            f"if it has finished no batch, stop it and resume; otherwise give the plan up "
            f"({commands.abort(context.plan.id)}) and make a new one, which takes the stream along",
        )


def _existing(context: RecoveryContext, topic: str) -> str:
    """The id of a topic that the stream declares; raises UsageError without it."""
    if (found := context.written.topic_id(topic)) is None:
        if not context.plan.wrong_from.get(topic, {}):  # there was none when the plan was made
            raise UsageError(f"there is no topic {topic}", f"create it; then {commands.resume(context.plan.id)}")
        raise UsageError(f"topic {topic} is gone", "give the plan up; create the topic, and plan anew")
    return found


def _refuse_readers_beyond(context: RecoveryContext, begins: TopicOffsets) -> None:
    """Raise UsageError if a stream of the plan would start after a wrong record that was written since planning."""
    for each in context.whole.streams:
        for topic, offsets in begins.items():
            ends = {} if each.base.savepoint is None else each.base.ends.get(topic, {})
            if beyond := [p for p, begin in offsets.items() if ends.get(p, 0) > begin]:
                raise UsageError(
                    f"records of topic {topic}, partition {beyond[0]}, from {offsets[beyond[0]]} on are wrong too, and "
                    f"stream {each.stream} was to start at {ends[beyond[0]]}",
                    f"give the plan up: {commands.abort(context.plan.id)}; then make a new one",
                )


def _groups(
    context: RecoveryContext, topic: str, begins: Mapping[int, int], ends: Mapping[int, int]
) -> list[GroupPosition]:
    """The consumer groups that have read wrong records; a recovery does not fail because they cannot be listed."""
    wrong = {p: begin for p, begin in begins.items() if begin < ends[p]}
    try:
        return context.written.groups(topic, wrong) if wrong else []
    except TransientError as error:
        context.events.tell(f"  whether other consumers have read wrong records of {topic} is not known: {error.found}")
        return []


def declare(
    context: RecoveryContext,
    topic: str,
    topic_id: str,
    opened: Generation,
    begins: Mapping[int, int],
    ends: Mapping[int, int],
    *,
    under_way: str | None = None,
) -> None:
    """Write void ranges of one topic, for the generation that is opened."""
    now, plan, left = time.time(), context.plan.id, context.whole.left
    ranges = [
        VoidRange(p, begin, ends[p], plan, opened.number, now, left)
        for p, begin in sorted(begins.items())
        if begin < ends[p]
    ]
    topic_records.declare_void(
        context.settings,
        topic,
        topic_id,
        writer=context.stream.name,
        path=path_with(context.record, opened),
        ranges=ranges,
        under_way=under_way,
    )


def release(context: RecoveryContext) -> None:
    """Let the readers of the stream's topics start: the corrected records count from now on."""
    for record in topic_records.under_way_of(context.settings, context.plan.id):
        if record.writer == context.stream.name:
            declare(context, record.topic, record.topic_id, opened_by(context.plan), {}, {})


def mark_topics(context: RecoveryContext, at: Txn) -> list[WrittenRange]:
    """Say in every topic that it has the stream's batches up to a position; returns what only topics have."""
    if not context.stream.topic_sinks:
        return []
    found: list[WrittenRange] = []
    for sink in context.stream.topic_sinks.values():
        found += context.written.mark(context.stream, sink, at, context.plan.id, context.stopped_at)
    return found


def continue_topics(context: RecoveryContext, at: Txn, opened: Generation) -> None:
    """Let the topics continue as they were before the plan: what was written since becomes void."""
    if not context.stream.topic_sinks:
        return
    before = lowest(mark_topics(context, at))
    settled = context.journal.done("void_records")
    if settled is not None:  # what the replay has written may be in further partitions and topics
        replayed = lowest(each for entry in context.replayed() for each in entry.written)
        kept = decode(settled["kept"])
        before = {
            t: {**replayed.get(t, {}), **before.get(t, {}), **kept.get(t, {})} for t in {*replayed, *before, *kept}
        }
    records = topic_records.under_way_of(context.settings, context.plan.id)
    begun = [each.topic for each in records if each.writer == context.stream.name]
    declared = [sink.name for sink in context.stream.topic_sinks.values()]
    for topic in dict.fromkeys([*declared, *begun, *before]):
        if (topic_id := context.written.topic_id(topic)) is None:
            continue
        begins = before.get(topic, {})
        ends = context.written.settled(topic) if begins else {}
        declare(context, topic, topic_id, opened, begins, ends)
        context.crash_point("recover_continue_topic")


def void_for(context: RecoveryContext) -> dict[str, VoidRanges]:
    """By topic, the ranges of earlier streams in the plan, which the replay of a stream must not read."""
    found = {}
    for upstream in context.whole.upstream(context.stream.name):
        for topic in upstream.wrong_from:
            if (record := topic_records.load(context.settings, topic)) is not None:
                found[topic] = record.holding()
    return found


def appended_until(context: RecoveryContext, border: TopicOffsets) -> dict[str, dict[int, int]]:
    """By topic and partition, where a replay's records end that come from records before a border.

    It is where the next batch has written, or the end of the topic, so that transaction markers are not between.
    """
    beyond = lowest(each for entry in context.replayed() if not _within(entry, border) for each in entry.written)
    ends = {topic: context.written.settled(topic) for topic in context.result("void_records")["topics"]}
    return {topic: {p: beyond.get(topic, {}).get(p, end) for p, end in each.items()} for topic, each in ends.items()}


def border_offsets(context: RecoveryContext) -> dict[str, Mapping[int, int]]:
    """The offsets at which rebuilt tables are compared with the published ones (`lagged`: not of the same records).

    They are those at which the published tables end. In a topic that another stream of the plan has appended to, it is
    where that stream's records end which come from the same source records; in a table that it rebuilds, the fence, up
    to which these rows are read, unless the published tables have read no row that it writes anew.
    """
    border: dict[str, Mapping[int, int]] = dict(context.position)
    for upstream in context.whole.upstream(context.stream.name):
        appended = (context.journal.done("replay", upstream.stream) or {}).get("appended", {})
        border |= {topic: each for topic, each in decode(appended).items() if topic in border}
    for each in rebuilt_tables(context):
        if border.get(each.table, {}).get(0, 0) > each.begin or each.begin == 0:
            border[each.table] = {0: each.end}
    return border


def lagged(context: RecoveryContext) -> bool:
    """True if the stream had not read all records of the plan's topics when it was stopped.

    Then the border has records that its published tables do not have.
    """
    position = context.position
    for upstream in context.whole.upstream(context.stream.name):
        ends = decode((context.journal.done("void_records", upstream.stream) or {}).get("ends", {}))
        for topic, each in ends.items():
            at = position.get(topic)
            if at is not None and any(at.get(p, 0) < end for p, end in each.items()):
                return True
    for rebuilt in rebuilt_tables(context):
        versions = versions_of(context.settings, context.stream, rebuilt.table)
        try:
            if any(each.rows for each in versions.between(position.get(rebuilt.table, {}).get(0, 0), rebuilt.end)):
                return True
        except OffsetsLost:
            return True
    return False


# Tables that a stream of the plan reads and another one rebuilds. The reader passes over the wrong versions, and gets
# the rebuilt rows at the fence of its writer; rows of records that came after the border it gets from the publish.


def fenced_versions(context: RecoveryContext) -> Mapping[str, Any]:
    """A finding of the fence: the versions of the tables that other streams of the plan read."""
    versions = {name: table.version for name, table in _read_by_others(context).items()}
    return {"versions": versions} if versions else {}


def _read_by_others(context: RecoveryContext) -> dict[str, StoredTable]:
    """The stream's tables that other streams of the plan read."""
    return {
        declared.name: existing_table(context.settings, declared, context.stream.name)
        for declared, _ in all_tables(context.stream)
        if declared.name in context.plan.wrong_versions
    }


class RebuiltTable(NamedTuple):
    """A table that a stream reads and `writer` rebuilds: the rows of versions `begin` to `end - 1` are written anew.

    The last of these versions is the writer's fence.
    """

    writer: str
    table: str
    begin: int
    end: int


def rebuilt_tables(context: RecoveryContext) -> Iterator[RebuiltTable]:
    """Yields the tables that the stream reads and an earlier stream of the plan rebuilds, once that one is fenced."""
    for upstream in context.whole.upstream(context.stream.name):
        fenced = (context.journal.done("fence", upstream.stream) or {}).get("versions", {})
        for table, begin in upstream.wrong_versions.items():
            if table in fenced and any(each.name == table for each in context.stream.tables_read):
                yield RebuiltTable(upstream.stream, table, begin, fenced[table] + 1)


def refuse_ahead(context: RecoveryContext, position: Txn) -> None:
    """Raise UsageError for a batch that a table which others read has, and the primary table does not."""
    for name, table in _read_by_others(context).items():
        if (at := table.position) is not None and at > position:
            raise UsageError(
                f"table {name} has {at}, and the primary table of stream {context.stream.name} lacks it",
                f"let the stream finish it ({commands.run(context.stream.name, trigger='available-now')}); then resume",
            )


def refuse_left(context: RecoveryContext) -> None:
    """Raise PreflightRefused if a stream that the plan leaves alone would miss rows of a table.

    Its reader goes on with the rows of records that the recovered stream had not read when it stopped, and which they
    are is not known if that stream had not read all that the plan rebuilds.
    """
    streams = all_streams(context.settings, [context.stream]) if context.whole.left else {}
    left = (streams[name] for name in context.whole.left if name in streams)
    read = [(each.name, table.name) for each in left for table in each.tables_read]
    for name, table in read:
        if table in context.plan.wrong_versions and lagged(context):
            raise PreflightRefused(
                f"stream {context.stream.name} had not read all rows when it was stopped, so stream {name}, which the "
                f"plan leaves alone, would miss some of table {table}",
                f"{commands.abort(context.plan.id)}, let {context.stream.name} read on, stop it, and plan again",
            )


def _within(entry: LedgerEntry, border: TopicOffsets) -> bool:
    ends = by_place(border)
    return all(offset <= ends.get(place, offset) for place, offset in by_place(ends_of(entry.offsets)).items())


def _ranges(values: Iterable[Sequence[Any]]) -> list[WrittenRange]:
    return [WrittenRange(*each) for each in values]


def range_lists(ranges: Iterable[WrittenRange]) -> list[list[Any]]:
    return [list(astuple(each)) for each in ranges]
