"""What the notes of a plan say: what its replay does not repeat, and which streams the plan leaves out."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from reprocessing.plan.affected_streams import all_streams, through_tables
from reprocessing.plan.history import generation_spans
from reprocessing.plan.lookups import looked_up
from reprocessing.plan.plan import Base, StreamRecoveryPlan, Until
from reprocessing.plan.snapshot import PlanningSnapshot
from reprocessing.plan.targets import Resolved
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.ledger.positions import TopicOffsets
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.runtime.spark_plan import has_wall_clock
from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_record
from streaming_jobs.state.redrive_requests import RedriveRequests
from streaming_jobs.state.slice_requests import SliceRequests
from streaming_jobs.state.stream_record import CodeSince
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.topics import versions_of
from streaming_jobs.table_sources.versions import replaced_since
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted, instant_words

_WALL_CLOCK = "the replay has timers of the wall clock at other times, so rows may differ without a bug"
_ONE_DEPLOY = 900.0
"""Seconds within which a deploy restarts the sessions of several streams."""


def reminders(
    snapshot: PlanningSnapshot, resolved: Resolved, start: Base, until: Until | None, rebuilt: Collection[str] = ()
) -> list[str]:
    """Notes about decisions of people since, which the replay does not repeat: skipped ranges, accepted commits.

    `rebuilt` are tables that the plan rebuilds before the stream reads them.
    """
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
            for topic in snapshot.preflight.topics
            if topic.compacted and not topic.archived
        ),
        *([_WALL_CLOCK] if has_wall_clock(snapshot.record.state_fingerprint) else ()),
        *_replaced_slices(snapshot, start),
        *_replaced_rows(snapshot, start, rebuilt),
        *looked_up(snapshot.settings, snapshot.stream, snapshot.record.generations, start),
    ]


def same_deploy(settings: Settings, plans: Sequence[StreamRecoveryPlan]) -> Iterator[str]:
    """Notes about streams beside the plan that got new code when a stream of the plan got code which it replays."""
    named = {plan.stream for plan in plans}
    changed = [
        (plan.stream, code)
        for plan in plans
        if not plan.skips
        for code in _new_code(settings, plan.stream)
        if code.since > plan.base.after
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


def not_taken_along(settings: Settings, rewound: Sequence[Stream], planned: Collection[str]) -> Iterator[str]:
    """A note that names the streams which read tables of those to recover, and are not in the plan.

    They look a table up, have not begun, or read tables of which a plan corrects only a range.
    """
    others = [
        name
        for name in through_tables(all_streams(settings, rewound), [stream.name for stream in rewound])
        if name not in planned and ledger_file(settings, name).newest(name) is not None
    ]
    if others:
        words = f"streams that read or look up its tables, directly or through others: {', '.join(others)}. They do "
        yield f"{words}not get the corrected rows; recover them afterwards, in this order"


def _at(ends: TopicOffsets, void: Mapping[str, Any], otherwise: int) -> int:
    return ends.get(void["topic"], {}).get(void["partition"], otherwise)


def _replaced_rows(snapshot: PlanningSnapshot, start: Base, rebuilt: Collection[str]) -> list[str]:
    """Notes about commits that replaced rows of tables which the stream reads: the replay reads them as they were."""
    notes = []
    for table in (each for each in snapshot.stream.tables_read if each.name not in rebuilt):
        if begin := start.ends.get(table.name, {}).get(0, 0):
            versions = versions_of(snapshot.settings, snapshot.stream, table.name)
            notes += [
                f"{who} replaced rows of table {table.name} in version {version}: those from before it are read "
                "as they were then; to read the corrected ones: --to-batch -1"
                for version, who in replaced_since(versions.table, versions.writer, begin)
            ]
    return notes


def _replaced_slices(snapshot: PlanningSnapshot, start: Base) -> list[str]:
    """Notes about slices and redrives that the base does not have: rows from before it are as they were then."""
    base = next((each for each in snapshot.savepoints if each.id == start.savepoint), None)
    if base is None:  # every row is rebuilt
        return []
    versions = {table.name: table.version for table in base.tables}
    return [
        f"slice {each.summary.get('slice', each.id)} of table {each.table} was rebuilt after the replay's start: rows "
        "from before that start will be as they were then; rebuild it again afterwards"
        for each in SliceRequests.of(snapshot.settings, snapshot.stream.name).history()
        if each.version is not None and each.version > versions.get(each.table, -1)
    ] + [
        f"{counted(len(each.redriven), 'record')} of table {each.table} were redriven after the replay's start: those "
        f"from before it will be set aside again; redrive them afterwards: {commands.redrive(each.stream)}"
        for each in RedriveRequests.of(snapshot.settings, snapshot.stream.name).history()
        if any(p.version is not None and p.version > versions.get(p.table, -1) for p in each.parts)
    ]
