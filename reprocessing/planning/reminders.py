"""Notes of a plan about what the replay does not repeat, and about the streams that it leaves alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reprocessing.planning.downstream import all_streams, through_tables
from reprocessing.planning.history import generation_spans
from reprocessing.planning.instants import instant_words
from reprocessing.planning.snapshot import PlanningSnapshot
from reprocessing.planning.targets import Resolved
from reprocessing.planning.wrong_records import start_of
from reprocessing.plans.plan import Base, StreamPlan, Until
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.ledger.positions import TopicOffsets
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.slice_requests import SliceRequests
from streaming_jobs.state.stream_record import CodeSince
from streaming_jobs.table_sources.topics import versions_of
from streaming_jobs.table_sources.versions import replaced_since
from streaming_jobs.text import commands

_ONE_DEPLOY = 900.0
"""Seconds within which a deploy restarts the sessions of several streams."""


def reminders(snapshot: PlanningSnapshot, resolved: Resolved, start: Base, until: Until | None) -> list[str]:
    """Notes about decisions of people since, which the replay does not repeat: skipped ranges, accepted commits."""
    if resolved.ahead:
        return []
    generations = {number for number, _, _ in generation_spans(snapshot.record.generations)}
    read_now = []
    for void in snapshot.record.void_ranges:
        begin, end = max(void["from"], _at(start.ends, void, void["from"])), void["to"]
        if until is not None:
            end = min(end, _at(until.ends, void, 0))
        if begin < end and void.get("generation", snapshot.record.generation) in generations:
            read_now.append({**void, "from": begin, "to": end})
    return [
        *(
            f"{v['topic']} partition {v['partition']}: {v['from']} to {v['to'] - 1} are read; {v['plan']} skipped them"
            for v in read_now
        ),
        *(
            f"version {a.version} of table {a.table} was accepted ({a.why}): the replay does not repeat it"
            for a in snapshot.record.accepted
        ),
        *(
            f"topic {topic.name} is compacted: the replay reads what its cleaner has left. Records that a later one of "
            "their key has replaced are gone, so the rows may differ from those of the first run also where they "
            "were right"
            for topic in snapshot.around.topics
            if topic.compacted and not topic.archived
        ),
        *_downstream(snapshot),
        *_replaced_slices(snapshot, start),
        *_replaced_rows(snapshot, start),
    ]


def same_deploy(settings: Settings, plans: Sequence[StreamPlan]) -> Iterator[str]:
    """Notes about streams beside the plan that got new code when a stream of the plan got code which it replays."""
    named = {plan.stream for plan in plans}
    changed = [
        (plan.stream, code)
        for plan in plans
        if not plan.skips
        for code in _new_code(settings, plan.stream)
        if code.since > start_of(plan.base)
    ]
    for name in Topology.load(settings.flows).streams if changed else ():
        near = [
            (stream, code, mine)
            for code in (_new_code(settings, name) if name not in named else ())
            for stream, mine in changed
            if abs(code.at - mine.at) <= _ONE_DEPLOY
        ]
        if near:
            stream, code, mine = near[-1]
            yield (
                f"stream {name}, which is not in the plan, got new code ({code.hash}) when {stream} did, on "
                f"{instant_words(mine.at)}: if that is wrong too, plan for it as well: "
                f"{commands.plan(name, before_code=code.hash)}"
            )


def _new_code(settings: Settings, stream: str) -> list[CodeSince]:
    """The versions of a stream's function after its first one; a new version of the package alone is none."""
    record = stream_record.load(settings, stream)
    codes = record.code if record is not None else ()
    return [code for before, code in itertools.pairwise(codes) if not before.version.same_code(code.version)]


def _downstream(snapshot: PlanningSnapshot) -> list[str]:
    """A note that names the streams which read this one's tables, directly or through others."""
    others = through_tables(all_streams(snapshot.settings, [snapshot.stream]), [snapshot.stream.name])
    words = f"streams that read its tables, directly or through others: {', '.join(others)}. They do not get the "
    return [f"{words}corrected rows; recover them afterwards, in this order"] if others else []


def _at(ends: TopicOffsets, void: Mapping[str, Any], otherwise: int) -> int:
    return ends.get(void["topic"], {}).get(void["partition"], otherwise)


def _replaced_rows(snapshot: PlanningSnapshot, start: Base) -> list[str]:
    """Notes about commits that replaced rows of tables which the stream reads: the replay reads them as they were."""
    notes = []
    for table in snapshot.stream.tables_read:
        if begin := start.ends.get(table.name, {}).get(0, 0):
            versions = versions_of(snapshot.settings, snapshot.stream, table.name)
            notes += [
                f"{who} replaced rows of table {table.name} in version {version}: those from before it are read "
                "as they were then; to read the corrected ones: --to-batch -1"
                for version, who in replaced_since(versions.table, versions.writer, begin)
            ]
    return notes


def _replaced_slices(snapshot: PlanningSnapshot, start: Base) -> list[str]:
    """Notes about rebuilt slices that the base does not have: rows from before the base are as they were then."""
    base = next((each for each in snapshot.savepoints if each.id == start.savepoint), None)
    if base is None:  # every row is made anew
        return []
    versions = {table.name: table.version for table in base.tables}
    return [
        f"slice {each.summary.get('slice', each.id)} of table {each.table} was rebuilt after the replay's start: rows "
        "from before that start will be as they were then; rebuild it again afterwards"
        for each in SliceRequests.of(snapshot.settings, snapshot.stream.name).history()
        if each.version is not None and each.version > versions.get(each.table, -1)
    ]
