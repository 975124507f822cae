"""The void ranges of a recovery: declared when its streams stand still, and what replaces them if it is given up.

    [........ right ........|..... wrong .....|... appended by the replay ...
                            begin             end, when all streams are fenced

A batch that was written to the topic, and that a crash kept from the tables, is repeated by whatever continues the
stream, in another generation. So its records become void too, also if the recovery is given up, or only skips.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from reprocessing.rebuild.context import RecoveryContext
from reprocessing.rebuild.staging import opened_by
from reprocessing.topics.wrong_records import (
    lowest,
    path_with,
    start_of,
    topics_written,
    written_after,
    wrong_from,
)
from streaming_jobs.ledger import LedgerEntry, Txn
from streaming_jobs.positions import TopicOffsets, WrittenRange, by_place, decode, ends_of
from streaming_jobs.preflight.take_snapshot import ledger_file
from streaming_jobs.sinks.tables import store_of
from streaming_jobs.sources.void_ranges import VoidRanges
from streaming_jobs.state import topic_records
from streaming_jobs.state.stream_record import Generation
from streaming_jobs.state.topic_records import VoidRange


def fence_topics(context: RecoveryContext) -> list[WrittenRange]:
    """Fence every topic of the stream; returns the ranges of a batch that only topics have."""
    position = Txn(context.plan.saw.generation, context.found("keep")["batch"])
    found: list[WrittenRange] = []
    for sink in context.stream.topic_sinks.values():
        found += context.written.fence(context.stream, sink, context.plan.generation, context.plan.id, position)
        context.crash_point("recover_fence_topic")
    return found


def settle(context: RecoveryContext) -> Mapping[str, Any]:
    """Wait until every topic stands still, and declare the wrong records void; nobody reads them from now on."""
    stream, plan = context.stream, context.plan
    in_flight = _ranges(context.found("fence").get("in_flight", ()))
    ledger = ledger_file(context.settings, stream.name)
    sinks = [sink.name for sink in stream.topic_sinks.values()]
    now = {name: context.written.topic_id(name) for name in sinks}
    firsts = written_after(ledger, stream, start_of(plan.base), now, _newest_batch(context))
    names = topics_written(stream, {**firsts, **plan.wrong_from, **{each.topic: {} for each in in_flight}})
    ends = {name: context.written.settled(name) for name in names}
    begins = wrong_from(stream, plan.base, ends, firsts, known=plan.wrong_from, in_flight=in_flight)
    before = lowest(in_flight)
    kept = {name: {p: before.get(name, {}).get(p, end) for p, end in each.items()} for name, each in ends.items()}
    groups = [
        list(group)
        for name in names
        if (wrong := {p: begin for p, begin in begins[name].items() if begin < ends[name][p]})
        for group in context.written.groups(name, wrong)
    ]
    ids = {name: context.written.topic_id(name) for name in names}
    for name in names:
        declare(context, name, ids[name], opened_by(plan), begins[name], ends[name], under_way=plan.id)
    return {"topics": ids, "begins": begins, "ends": ends, "kept": kept, "groups": groups}


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
    now, plan = time.time(), context.plan.id
    ranges = [
        VoidRange(p, begin, ends[p], plan, opened.number, now) for p, begin in sorted(begins.items()) if begin < ends[p]
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
    for topic, topic_id in (context.journal.done("settle") or {}).get("topics", {}).items():
        topic_records.declare_void(
            context.settings,
            topic,
            topic_id,
            writer=context.stream.name,
            path=path_with(context.record, opened_by(context.plan)),
        )


def mark_topics(context: RecoveryContext, at: Txn) -> list[WrittenRange]:
    """Say in every topic that it has the stream's batches up to a position; returns what only topics have."""
    if not context.stream.topic_sinks:
        return []
    position = Txn(context.plan.saw.generation, context.found("keep")["batch"])
    found: list[WrittenRange] = []
    for sink in context.stream.topic_sinks.values():
        found += context.written.mark(context.stream, sink, at, context.plan.id, position)
    return found


def continue_topics(context: RecoveryContext, at: Txn, opened: Generation) -> None:
    """Let the topics continue as they were before the plan: what was written since becomes void."""
    if not context.stream.topic_sinks:
        return
    before = lowest(mark_topics(context, at))
    settled = context.journal.done("settle")
    if settled is not None:
        before = decode(settled["kept"])
    declared = [sink.name for sink in context.stream.topic_sinks.values()]
    for topic in dict.fromkeys([*declared, *context.plan.wrong_from, *before]):
        begins = before.get(topic, {})
        ends = context.written.settled(topic) if begins else {}
        declare(context, topic, context.written.topic_id(topic), opened, begins, ends)
        context.crash_point("recover_continue_topic")


def void_for(context: RecoveryContext) -> dict[str, VoidRanges]:
    """By topic, the ranges that the replay of a stream must not read: those of the streams before it in the plan."""
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
    days = ledger_file(context.own, context.stream.name).days(context.stream.name)
    entries = (line.read().entry for day in days for line in day)
    beyond = lowest(each for entry in entries if not _within(entry, border) for each in entry.written)
    ends = {topic: context.written.settled(topic) for topic in context.found("settle")["topics"]}
    return {topic: {p: beyond.get(topic, {}).get(p, end) for p, end in each.items()} for topic, each in ends.items()}


def border_offsets(context: RecoveryContext) -> dict[str, Mapping[int, int]]:
    """The offsets at which rebuilt tables are compared with the published ones.

    They are those at which the published tables end. In a topic that another stream of the plan has appended to, it is
    where that stream's records end which come from the same source records.
    """
    border: dict[str, Mapping[int, int]] = dict(decode(context.found("keep")["position"]))
    for upstream in context.whole.upstream(context.stream.name):
        appended = (context.journal.journal.done("replay", upstream.stream) or {}).get("appended", {})
        border |= {topic: each for topic, each in decode(appended).items() if topic in border}
    return border


def _within(entry: LedgerEntry, border: TopicOffsets) -> bool:
    ends = by_place(border)
    return all(offset <= ends.get(place, offset) for place, offset in by_place(ends_of(entry.offsets)).items())


def _newest_batch(context: RecoveryContext) -> LedgerEntry | None:
    """The entry of the newest batch in the primary table, which the ledger may lack after a crash."""
    commits = store_of(context.stream.primary).commits(context.settings, context.stream.primary)
    entries = (commit.entry for commit in commits if commit.entry is not None)
    return next((entry for entry in entries if entry.stream == context.stream.name and entry.kind == "batch"), None)


def _ranges(values: Iterable[Sequence[Any]]) -> list[WrittenRange]:
    return [WrittenRange(*each) for each in values]


def stored(ranges: Iterable[WrittenRange]) -> list[list[Any]]:
    """Ranges as a journal stores them."""
    return [list(astuple(each)) for each in ranges]
