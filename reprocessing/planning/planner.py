"""From the requests for one or more streams to a plan: check each, choose the start of its replay, write the plan.

With a target ahead of the stream nothing is replayed: the records in between are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reprocessing.planning.conditions import UnknownColumn, broken
from reprocessing.planning.first_bad_row import refuse_same_code
from reprocessing.planning.history import generation_spans
from reprocessing.planning.offline import OF_THE_STREAM, only_the_broker
from reprocessing.planning.replay_start import replay_start
from reprocessing.planning.snapshot import PlanningSnapshot, refuse_fenced
from reprocessing.planning.targets import Resolved, Target, named_code, resolve
from reprocessing.planning.until import until_border, until_of
from reprocessing.plans.plan import NO_CHECKS, Base, Checks, RecoveryPlan, StreamPlan, Until
from reprocessing.plans.plan_file import next_id, save, sealed
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.graph.graph import Graph
from streaming_jobs.positions import TopicOffsets
from streaming_jobs.runtime.state_changes import differences
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import existing_table, open_tables
from streaming_jobs.state import savepoints
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.slice_requests import SliceRequests
from streaming_jobs.stream import Stream
from streaming_jobs.stream_graph import way
from streaming_jobs.table_sources.later_commits import replaced_since
from streaming_jobs.table_sources.table_topics import versions_of
from streaming_jobs.topology import Topology


@dataclass(frozen=True)
class Request:
    """The request for a recovery of one stream.

    `resolved` and `base`, if given, are used as they are. With `until` the recovery is bounded. With `same_code` the
    code that a target names as wrong may be the one that runs the replay.
    """

    snapshot: PlanningSnapshot
    target: Target
    checks: Checks = NO_CHECKS
    resolved: Resolved | None = None
    base: Savepoint | None = None
    discard_state: bool = False
    same_code: bool = False
    until: Target | None = None


def make_plan(settings: Settings, requests: Sequence[Request], *, undoes: str | None = None) -> RecoveryPlan:
    """The plan for these requests, each for another stream, in the order in which they are to be put right.

    It is written to disk, and named after the first stream. Raises UsageError or PreflightRefused with the ways out.
    """
    streams_named = [request.snapshot.stream.name for request in requests]
    if len(set(streams_named)) < len(streams_named):
        raise UsageError(f"a plan names each stream once, not {', '.join(streams_named)}", "name each stream once")
    _refuse_reader_and_writer(settings, [request.snapshot.stream for request in requests])
    drafts = [_draft(request, undoes) for request in requests]
    name = next_id(settings, drafts[0].stream)
    streams = tuple(
        replace(draft, id=name, staging=name if number == 0 else f"{name}.{draft.stream}")
        for number, draft in enumerate(drafts)
    )
    plan = sealed(RecoveryPlan(id=name, made_at=time.time(), streams=streams, undoes=undoes))
    save(settings, plan)
    return plan


def _refuse_reader_and_writer(settings: Settings, streams: Sequence[Stream]) -> None:
    """Raise UsageError if one of the streams reads what another one writes: every replay ends before any publish."""
    if len(streams) < 2:
        return
    every = {**Topology.load(settings.flows).streams, **{stream.name: stream for stream in streams}}
    for writer in streams:
        for reader in streams:
            if through := way(writer.name, reader.name, every.values()):
                raise UsageError(
                    f"stream {reader.name} reads what stream {writer.name} writes ({', '.join(through)}): one plan "
                    f"would rebuild {reader.name} from the rows that {writer.name} has now",
                    f"recover {writer.name} first, and {reader.name} by a plan of its own after it",
                )


def _draft(request: Request, undoes: str | None) -> StreamPlan:
    """The plan of one stream, without the name of the recovery."""
    snapshot, target, checks = request.snapshot, request.target, request.checks
    refuse_fenced(snapshot)
    saw = snapshot.world
    asked = [target, *([request.until] if request.until is not None else [])]
    if snapshot.unreachable is not None and any(each.kind not in OF_THE_STREAM for each in asked):
        raise only_the_broker(snapshot.unreachable, "where the topics begin and end")
    _refuse_other_topics(snapshot)
    _refuse_topic_sinks(snapshot)
    stateful = bool(snapshot.record.state_fingerprint)
    if request.discard_state and not stateful:
        raise UsageError(f"stream {snapshot.stream.name} keeps no state", "leave out --discard-state")
    remarks: list[str] = []
    if target.kind == "code":
        code = named_code(target.value, snapshot.record)
        did = f"is what {target} goes back before,"
        remarks = refuse_same_code(snapshot, code.version, did, same_code=request.same_code)
    resolved = request.resolved or resolve(target, snapshot.view())
    if resolved.ahead:  # suites are on by default, and judge rebuilt rows: there are none
        checks = replace(checks, suites=())
    if resolved.ahead and (request.discard_state or checks != NO_CHECKS):
        raise UsageError(
            "the target is ahead of the stream: nothing is replayed, so there is no state to discard and nothing to "
            "check",
            "leave --discard-state, --require and --max-changed out",
        )
    if not resolved.ahead:
        _refuse_append_only(snapshot)
    border = None if request.until is None else until_border(snapshot, request.until, resolved)
    remarks += _unknown_yet(snapshot, checks)
    start, notes, discards = _start(request, resolved)
    until: Until | None = None
    if request.until is not None and border is not None:
        until = until_of(snapshot, request.until, border, start)
        remarks += border.notes
    if start.savepoint is not None and not discards:
        _refuse_other_state(snapshot, start.savepoint, undoes)
    plan = StreamPlan(
        id="",
        stream=snapshot.stream.name,
        kind="skip" if resolved.ahead else "rewind",
        target=_words(target, resolved),
        wanted=resolved.wanted,
        notes=(*resolved.notes, *notes, *remarks, *snapshot.notes, *_reminders(snapshot, resolved, start, until)),
        saw=saw,
        base=start,
        stateful=stateful,
        rate=_rate(snapshot, start),
        record_bytes=None if resolved.ahead else _mean_size(snapshot, start),
        checks=checks,
        staging="",
        discards_state=discards,
        until=until,
    )
    if plan.discards_state and not plan.records:
        raise UsageError("the target is the topic's end: there is nothing to replay", "choose an earlier one")
    return plan


def _start(request: Request, resolved: Resolved) -> tuple[Base, list[str], bool]:
    """The replay's start, notes about it, and True if state is discarded."""
    snapshot = request.snapshot
    if resolved.ahead:
        here = Base(None, snapshot.record.generation, snapshot.world.batch, snapshot.history.position)
        return here, [], False
    base = request.base
    if request.target.kind == "savepoint" and base is None:
        base = next(s for s in snapshot.savepoints if s.txn == resolved.batch)
    return replay_start(snapshot, resolved, base, discard_state=request.discard_state)


def _words(target: Target, resolved: Resolved) -> str:
    """The target in words; one that names code also names the batch."""
    if target.kind != "code":
        return str(target)
    return f"batch {resolved.batch.batch if resolved.batch else -1}, before code {target.value}"


def _unknown_yet(snapshot: PlanningSnapshot, checks: Checks) -> list[str]:
    """Report an invalid rule now, not after the replay; note a column that only the new code may add.

    Raises UsageError for any other rule that the table cannot answer.
    """
    notes = []
    last = snapshot.history.last
    changed = last is None or last.code != snapshot.world.code
    table = existing_table(snapshot.settings, snapshot.stream.primary, snapshot.stream.name)
    for rule in checks.rules:
        try:
            broken(table.readable(), [rule])
        except UnknownColumn as error:
            if not changed:
                raise
            notes.append(
                f"the table has no column {error.column} yet: {rule} is checked on the rebuilt rows, and the replay "
                "ends at once if they have none either"
            )
    return notes


def _refuse_append_only(snapshot: PlanningSnapshot) -> None:
    for table in open_tables(snapshot.settings, snapshot.stream).values():
        table.check_removable()


def _refuse_other_state(snapshot: PlanningSnapshot, savepoint: str, undoes: str | None) -> None:
    """Raise UsageError if the savepoint's state does not fit today's code, as far as that is known.

    It is known for the code that the stream ran last. Any other code is checked by the replay, before it publishes.
    """
    record = snapshot.record
    saved = next((s for s in savepoints.savepoints(snapshot.settings, record.stream) if s.id == savepoint), None)
    ran = record.code[-1] if record.code else None
    if saved is None or ran is None or ran.version != snapshot.world.code or saved.code == snapshot.world.code:
        return
    if words := differences(saved.state_fingerprint, record.state_fingerprint):
        ways = (
            f"deploy code {saved.code.hash} again, then: recourse recover undo {undoes}"
            if undoes
            else "rebuild the state: --to-batch -1; or begin with empty state: --discard-state"
        )
        raise UsageError(f"the state of savepoint {savepoint} was made by another aggregation: {words}", ways)


def _refuse_topic_sinks(snapshot: PlanningSnapshot) -> None:
    if sinks := snapshot.stream.topic_sinks.values():
        raise UsageError(
            f"stream {snapshot.stream.name} writes topic {', '.join(sink.name for sink in sinks)}, and a recovery "
            "takes no record of a topic back",
            "declare a new stream with the corrected function and a topic of its own",
        )


def _refuse_other_topics(snapshot: PlanningSnapshot) -> None:
    for topic in snapshot.around.topics:
        bound = snapshot.record.topic(topic.name)
        if topic.topic_id is None or (bound is not None and bound.topic_id != topic.topic_id):
            raise PreflightRefused(
                f"topic {topic.name} was deleted{' and made anew' if topic.topic_id else ''}: what it held before "
                "cannot be read again",
                "nothing can be replayed from it; start the stream over",
            )
    if {topic.name for topic in snapshot.record.topics} != {topic.name for topic in snapshot.around.topics}:
        raise PreflightRefused(
            f"stream {snapshot.stream.name} reads other topics than it did", "declare the topics it began with again"
        )


def _reminders(snapshot: PlanningSnapshot, resolved: Resolved, start: Base, until: Until | None) -> list[str]:
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
        *_downstream(snapshot),
        *_replaced_slices(snapshot, start),
        *_replaced_rows(snapshot, start),
    ]


def _downstream(snapshot: PlanningSnapshot) -> list[str]:
    """A note that names the streams which read this one's tables, directly or through others."""
    graph, own = Graph.of(Topology.load(snapshot.settings.flows).streams.values()), snapshot.stream.name
    others = [name for name in graph.downstream([own]) if name != own]
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


def _rate(snapshot: PlanningSnapshot, base: Base) -> float | None:
    """Expected records per second of a replay from `base`; None if the ledger does not show it."""
    pace = snapshot.history.pace()
    latest = {(t.name, p): end for t in snapshot.around.topics for p, end in t.latest.items()}
    records = sum(max(end - base.ends.get(t, {}).get(p, 0), 0) for (t, p), end in latest.items())
    largest = snapshot.settings.for_stream(snapshot.stream.name).max_offsets_per_trigger
    return round(pace.rate(records, largest), 1) if pace is not None and records else None


def _mean_size(snapshot: PlanningSnapshot, base: Base) -> float | None:
    """Mean size of a record in bytes at the beginning of the replay, over the topics."""
    sizes = []
    for topic in snapshot.around.topics:
        begins = {p: max(base.ends.get(topic.name, {}).get(p, 0), first) for p, first in topic.earliest.items()}
        begins = {p: offset for p, offset in begins.items() if offset < topic.latest.get(p, 0)}
        if begins and (size := snapshot.topics.mean_size(topic.name, begins)) is not None:
            sizes.append(size)
    return round(sum(sizes) / len(sizes), 1) if sizes else None
