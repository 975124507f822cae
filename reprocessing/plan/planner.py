"""From the requests for one or more streams to a plan: check each, choose the start of its replay, write the plan.

With a target ahead of the stream nothing is replayed: the records in between are skipped. The plan's notes name what
the replay does not repeat, and the streams that the plan leaves alone. The plan that takes a published one back
(`plan_undo`) is such a plan too, to the savepoints from before it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reprocessing.plan.affected_streams import (
    NO_CHOICE,
    Along,
    all_streams,
    changed_by,
    further_back,
    goes_back_to,
    refuse_in_first_batch,
    refuse_others,
    refuse_undeclared,
    still_void,
    through_tables,
    through_topics,
)
from reprocessing.plan.conditions import UnknownColumn, broken
from reprocessing.plan.first_bad_row import refuse_same_code
from reprocessing.plan.history import generation_spans
from reprocessing.plan.journal import journal_of, next_step
from reprocessing.plan.lookups import looked_up
from reprocessing.plan.plan import NO_CHECKS, Base, Checks, RecoveryPlan, StreamRecoveryPlan, Until, opened_by
from reprocessing.plan.plan_file import next_id, save, sealed
from reprocessing.plan.registry import prune_plans, refuse_if_held, undone_by
from reprocessing.plan.replay_range import replay_start, until_border, until_of
from reprocessing.plan.snapshot import (
    OF_THE_STREAM,
    PlanningSnapshot,
    only_the_broker,
    planning_snapshot,
)
from reprocessing.plan.targets import Resolved, Target, named_code, resolve
from reprocessing.plan.void_records import (
    NOTHING_WRITTEN,
    CommittedOffsets,
    check_topic_sinks,
    written_topics,
)
from streaming_jobs.catalog.topology import Topology, path_between
from streaming_jobs.declare.postgres_table import PUT_RIGHT
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.positions import TopicOffsets, decode, offsets_between
from streaming_jobs.runtime.spark_plan import has_wall_clock
from streaming_jobs.runtime.state_changes import differences
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import existing_table
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.redrive_requests import RedriveRequests
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.slice_requests import SliceRequests
from streaming_jobs.state.stream_record import CodeSince
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.table_sources.topics import versions_of
from streaming_jobs.table_sources.versions import replaced_since
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted, instant_words

_WALL_CLOCK = "the replay has timers of the wall clock at other times, so rows may differ without a bug"
_ONE_DEPLOY = 900.0
"""Seconds within which a deploy restarts the sessions of several streams."""


@dataclass(frozen=True)
class RecoveryRequest:
    """The request for a recovery of one stream.

    `resolved` and `base`, if given, are used as they are. With `until` the recovery is bounded. With `same_code` the
    code that a target names as wrong may be the one that runs the replay. `wrong_from` are offsets of topics that the
    stream writes, from which on they are wrong in any case.
    """

    snapshot: PlanningSnapshot
    target: Target
    checks: Checks = NO_CHECKS
    resolved: Resolved | None = None
    base: Savepoint | None = None
    discard_state: bool = False
    same_code: bool = False
    until: Target | None = None
    wrong_from: TopicOffsets | None = None


def make_plan(
    settings: Settings,
    requests: Sequence[RecoveryRequest],
    *,
    undoes: str | None = None,
    checks_of: Callable[[Stream], Checks] = lambda _: NO_CHECKS,
    along: Along = NO_CHOICE,
) -> RecoveryPlan:
    """The plan for these requests, each for another stream, and for the streams that read their topics.

    The order is that in which they are recovered. The plan is written to disk, and named after the first stream.
    `checks_of` gives the checks of downstream streams, `along` says what else to do with them. Raises
    UsageError or PreflightRefused, with ways out.
    """
    streams_named = [request.snapshot.stream.name for request in requests]
    if len(set(streams_named)) < len(streams_named):
        raise UsageError(f"a plan names each stream once, not {', '.join(streams_named)}", "name each stream once")
    _refuse_reader_and_writer(settings, [request.snapshot.stream for request in requests])
    drafts, left = _drafts(settings, requests, undoes, checks_of, along)
    notes = [_left_words(name) for name in left]
    if undoes is None:
        notes += same_deploy(settings, drafts)
    drafts[0] = replace(drafts[0], notes=(*drafts[0].notes, *notes))
    name = next_id(settings, drafts[0].stream)
    streams = tuple(
        replace(draft, id=name, staging=name if number == 0 else f"{name}.{draft.stream}")
        for number, draft in enumerate(drafts)
    )
    plan = sealed(RecoveryPlan(id=name, made_at=time.time(), streams=streams, undoes=undoes, left=left))
    save(settings, plan)
    prune_plans(settings)
    return plan


def _left_words(name: str) -> str:
    return (
        f"stream {name} is left as it is: it keeps what it made of the wrong records, and reads the corrected ones too"
    )


def _drafts(
    settings: Settings,
    requests: Sequence[RecoveryRequest],
    undoes: str | None,
    checks_of: Callable[[Stream], Checks],
    choice: Along,
) -> tuple[list[StreamRecoveryPlan], tuple[str, ...]]:
    """The plans of the streams, readers of topics after their writers; and the streams that are left out."""
    asked = {request.snapshot.stream.name: request for request in requests}
    streams = all_streams(settings, [request.snapshot.stream for request in requests])
    along = through_topics(streams, asked)
    drafts: dict[str, StreamRecoveryPlan] = {}
    changed: dict[str, dict[int, int]] = {}
    left: list[str] = []
    choice.check([name for name in along if name not in asked])
    committed = CommittedOffsets(settings)
    for name in along:
        if name in asked:
            request = asked[name]
            of_one = undoes is None and request.target.kind != "savepoint"  # one that has a name is of several
            if of_one and {topic.name for topic in streams[name].topics}.intersection(changed):
                raise UsageError(
                    f"stream {name} reads what another stream of the plan writes, so it is taken along",
                    f"leave {name} out: it goes back to its last batch before the first record that changes",
                )
        else:
            topics = {source.name for source in streams[name].topics}
            if not topics.intersection(changed):
                continue
            if stream_record.load(settings, name) is None:  # it begins after the recovery, and reads no void range
                refuse_in_first_batch(settings, streams[name])
                continue
            snapshot = planning_snapshot(settings, streams[name], requests[0].snapshot.topics)
            if snapshot.history.last is None:  # nothing of it is wrong, unless it is at its first batch
                refuse_in_first_batch(settings, streams[name])
                continue
            if name in choice.leave:
                left.append(name)
                continue
            request = _taken_along(snapshot, {t: o for t, o in changed.items() if t in topics}, checks_of, choice)
        drafts[name] = (
            _draft(request, undoes, drafts, committed)
            if name in asked
            else _draft_along(request, undoes, drafts, committed)
        )
        if drafts[name].wrong_from:
            changed |= changed_by(settings, drafts[name], opened_by(drafts[name]))
    refuse_others(settings, streams, changed, {*drafts, *left})
    refuse_undeclared(settings, {*streams, *drafts}, changed, requests[0].snapshot.topics)
    if not changed:  # nothing is between them
        return [drafts[name] for name in asked], ()
    by_table = sorted(set(through_tables(streams, asked)).intersection(drafts))
    if by_table:
        raise UsageError(
            f"stream {by_table[0]} reads a table and a topic of the streams to recover, directly or through others",
            "let it read one of them",
        )
    return list(drafts.values()), tuple(left)


def _draft_along(
    request: RecoveryRequest, undoes: str | None, before: Mapping[str, StreamRecoveryPlan], committed: CommittedOffsets
) -> StreamRecoveryPlan:
    """The plan of a downstream stream; the UsageError that it raises names the options for the stream."""
    try:
        return _draft(request, undoes, before, committed)
    except UsageError as error:
        name = request.snapshot.stream.name
        if isinstance(error, NotRebuilt):
            raise NotRebuilt(
                f"the plan takes stream {name} along, and cannot: {error.found}",
                f"leave it as it is, wrong: --leave {name}; after the recovery, {error.next_step}",
            ) from error
        raise UsageError(
            f"the plan takes stream {name} along, and cannot: {error.found}",
            f"let it read everything anew: --rebuild {name}; or begin with empty state: --discard-state-of {name}; "
            f"or leave it as it is, wrong: --leave {name}",
        ) from error


def _taken_along(
    snapshot: PlanningSnapshot, changed: TopicOffsets, checks_of: Callable[[Stream], Checks], choice: Along
) -> RecoveryRequest:
    """The request for a stream that reads topics which change from these offsets on."""
    name, checks = snapshot.stream.name, checks_of(snapshot.stream)
    if name in choice.rebuild:
        return RecoveryRequest(snapshot, Target("batch", "-1"), checks)
    target, resolved = goes_back_to(snapshot, changed)
    return RecoveryRequest(snapshot, target, checks, resolved=resolved, discard_state=name in choice.discard_state)


def _refuse_reader_and_writer(settings: Settings, streams: Sequence[Stream]) -> None:
    """Raise UsageError if one of the streams reads a table of another one: every replay ends before any publish."""
    if len(streams) < 2:
        return
    every = all_streams(settings, streams)
    for writer in streams:
        for reader in streams:
            if reader.name not in through_tables(every, [writer.name]):
                continue
            if through := path_between(writer.name, reader.name, every.values()):
                raise UsageError(
                    f"stream {reader.name} reads what stream {writer.name} writes ({', '.join(through)}): one plan "
                    f"would rebuild {reader.name} from the rows that {writer.name} has now",
                    f"recover {writer.name} first, and {reader.name} by a plan of its own after it",
                )


def _draft(
    request: RecoveryRequest, undoes: str | None, before: Mapping[str, StreamRecoveryPlan], committed: CommittedOffsets
) -> StreamRecoveryPlan:
    """The plan of one stream, without the name of the recovery; `before` are those recovered before it."""
    snapshot, target, checks = request.snapshot, request.target, request.checks
    snapshot.refuse_under_way()
    saw = snapshot.planned_against
    asked = [target, *([request.until] if request.until is not None else [])]
    if snapshot.unreachable is not None and any(each.kind not in OF_THE_STREAM for each in asked):
        raise only_the_broker(snapshot.unreachable, "where the topics begin and end")
    _refuse_other_topics(snapshot)
    check_topic_sinks(snapshot, bounded=request.until is not None)
    stateful = bool(snapshot.record.state_fingerprint)
    if request.discard_state and not stateful:
        raise UsageError(f"stream {snapshot.stream.name} keeps no state", "leave out --discard-state")
    remarks: list[str] = []
    if target.kind == "code":
        code = named_code(target.value, snapshot.record)
        did = f"is what {target} goes back before,"
        remarks = refuse_same_code(snapshot, code.version, did, same_code=request.same_code)
    resolved = request.resolved or resolve(target, snapshot.view())
    if request.base is None and (moved := further_back(snapshot, target, resolved, before)) is not None:
        target, resolved = moved
        request = replace(request, target=target)
    if resolved.ahead:  # suites are on by default, and judge rebuilt rows: there are none
        checks = replace(checks, suites=())
    if resolved.ahead and (request.discard_state or checks != NO_CHECKS):
        raise UsageError(
            "the target is ahead of the stream: nothing is replayed, so there is no state to discard and nothing to "
            "check",
            "leave --discard-state, --require and --max-changed out",
        )
    if not resolved.ahead:
        _refuse_postgres(snapshot.stream)
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
    written = NOTHING_WRITTEN
    if not resolved.ahead:
        written = written_topics(snapshot, start, request.wrong_from, committed, discards=discards)
    reminded = reminders(snapshot, resolved, start, until)
    plan = StreamRecoveryPlan(
        id="",
        stream=snapshot.stream.name,
        kind="skip" if resolved.ahead else "rewind",
        target=_words(target, resolved),
        wanted=resolved.wanted,
        notes=(*resolved.notes, *notes, *remarks, *snapshot.notes, *reminded, *written.notes),
        saw=saw,
        base=start,
        stateful=stateful,
        rate=_rate(snapshot, start),
        record_bytes=None if resolved.ahead else _mean_size(snapshot, start),
        checks=checks,
        staging="",
        discards_state=discards,
        until=until,
        wrong_from=written.wrong_from,
        ends_written=written.ends,
    )
    plan = replace(plan, void=_void(snapshot, plan, before))
    if plan.discards_state and all(begin >= end for _, _, begin, end in plan.ranges()):
        raise UsageError("the target is the topic's end: there is nothing to replay", "choose an earlier one")
    return plan


def _void(snapshot: PlanningSnapshot, plan: StreamRecoveryPlan, before: Mapping[str, StreamRecoveryPlan]) -> int:
    """How many of the offsets to replay are void and stay void, without offsets that the plan declares void."""
    archives, found = Archives(snapshot.settings), 0
    for topic in (topic for topic in plan.saw.topics if not topic.continues):
        spans = {p: (begin, end) for name, p, begin, end in plan.ranges() if name == topic.name}
        today = archives.void_of(snapshot.stream, topic.name, topic.topic_id)
        found += still_void(snapshot, topic, today, before).count(spans)
    return found


def _start(request: RecoveryRequest, resolved: Resolved) -> tuple[Base, list[str], bool]:
    """The replay's start, notes about it, and True if state is discarded."""
    snapshot = request.snapshot
    if resolved.ahead:
        here = Base(None, snapshot.record.generation, snapshot.planned_against.batch, snapshot.history.position)
        return here, [], False
    base = request.base
    if request.target.kind == "savepoint" and base is None:
        base = next(s for s in snapshot.savepoints if s.txn == resolved.batch)
    return replay_start(snapshot, resolved, base, discard_state=request.discard_state)


def _words(target: Target, resolved: Resolved) -> str:
    """The target as text; a target that names code also names the batch."""
    if target.kind != "code":
        return str(target)
    return f"batch {resolved.batch.batch if resolved.batch else -1}, before code {target.value}"


def _unknown_yet(snapshot: PlanningSnapshot, checks: Checks) -> list[str]:
    """Report an invalid rule now, not after the replay; note a column that only the new code may add.

    Raises UsageError for any other rule that the table cannot answer.
    """
    notes = []
    last = snapshot.history.last
    changed = last is None or not last.code.same_version(snapshot.planned_against.code)
    for rule in checks.rules:
        table = existing_table(snapshot.settings, snapshot.stream.primary, snapshot.stream.name)
        try:
            broken(table.readable(), rule)
        except UnknownColumn as error:
            if not changed:
                raise
            notes.append(
                f"the table has no column {error.column} yet: {rule} is checked on the rebuilt rows, and the replay "
                "ends at once if they have none either"
            )
    return notes


class NotRebuilt(UsageError):
    """The plan takes back a stream that writes a table of PostgreSQL, and a recovery does not rebuild such tables.

    Let a new stream write the right rows to a new table, beside the old one, and switch the readers over in one
    transaction: docs/postgres_sink.md has the statements, and how to take it back.
    """

    code = "REC-043"


def _refuse_postgres(stream: Stream) -> None:
    if stream.postgres_tables:
        names = ", ".join(table.name for table in stream.postgres_tables.values())
        raise NotRebuilt(
            f"stream {stream.name} writes the PostgreSQL table {names}, which a recovery does not rebuild",
            PUT_RIGHT,
        )


def _refuse_append_only(snapshot: PlanningSnapshot) -> None:
    for table in snapshot.tables.values():
        table.check_removable()


def _refuse_other_state(snapshot: PlanningSnapshot, savepoint: str, undoes: str | None) -> None:
    """Raise UsageError if the savepoint's state does not fit today's code, as far as that is known.

    It is known for the code that the stream ran last. Any other code is checked by the replay, before it publishes.
    """
    record = snapshot.record
    saved = next((s for s in savepoints.savepoints(snapshot.settings, record.stream) if s.id == savepoint), None)
    ran = record.code[-1] if record.code else None
    today = snapshot.planned_against.code
    if saved is None or ran is None or not ran.version.same_version(today) or saved.code.same_version(today):
        return
    if words := differences(saved.state_fingerprint, record.state_fingerprint):
        ways = (
            f"deploy code {saved.code.hash} again, then: {commands.undo(undoes)}"
            if undoes
            else "rebuild the state: --to-batch -1; or begin with empty state: --discard-state"
        )
        raise UsageError(f"the state of savepoint {savepoint} was made by another aggregation: {words}", ways)


def _refuse_other_topics(snapshot: PlanningSnapshot) -> None:
    for topic in snapshot.preflight.topics:
        bound = snapshot.record.topic(topic.name)
        if topic.topic_id is None or (bound is not None and bound.topic_id != topic.topic_id):
            raise PreflightRefused(
                f"topic {topic.name} was deleted{' and made anew' if topic.topic_id else ''}: what it held before "
                "cannot be read again",
                "nothing can be replayed from it; start the stream over",
            )
    if {topic.name for topic in snapshot.record.topics} != {topic.name for topic in snapshot.preflight.topics}:
        raise PreflightRefused(
            f"stream {snapshot.stream.name} reads other topics than it did", "declare the topics it began with again"
        )


def _rate(snapshot: PlanningSnapshot, base: Base) -> float | None:
    """Expected records per second of a replay from `base`; None if the ledger does not show it."""
    pace = snapshot.history.pace()
    records = offsets_between(base.ends, {topic.name: topic.latest for topic in snapshot.preflight.topics})
    largest = snapshot.settings.for_stream(snapshot.stream.name).max_offsets_per_trigger
    return round(pace.rate(records, largest), 1) if pace is not None and records else None


def _mean_size(snapshot: PlanningSnapshot, base: Base) -> float | None:
    """Mean size of a record in bytes at the beginning of the replay, over the topics."""
    sizes = []
    for topic in snapshot.preflight.topics:
        begins = {p: max(base.ends.get(topic.name, {}).get(p, 0), first) for p, first in topic.earliest.items()}
        begins = {p: offset for p, offset in begins.items() if offset < topic.latest.get(p, 0)}
        if begins and (size := snapshot.topics.mean_size(topic.name, begins)) is not None:
            sizes.append(size)
    return round(sum(sizes) / len(sizes), 1) if sizes else None


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
            for topic in snapshot.preflight.topics
            if topic.compacted and not topic.archived
        ),
        *([_WALL_CLOCK] if has_wall_clock(snapshot.record.state_fingerprint) else ()),
        *_downstream(snapshot),
        *_replaced_slices(snapshot, start),
        *_replaced_rows(snapshot, start),
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
        f"{counted(len(each.records), 'record')} of table {each.table} were redriven after the replay's start: those "
        f"from before it will be set aside again; redrive them afterwards: {commands.redrive(each.stream)}"
        for each in RedriveRequests.of(snapshot.settings, snapshot.stream.name).history()
        if any(p.version is not None and p.version > versions.get(p.table, -1) for p in each.parts)
    ]


def plan_undo(
    settings: Settings, streams: Mapping[str, Stream], topics: TopicReader, plan: RecoveryPlan
) -> RecoveryPlan:
    """The plan that takes a published one back: to the savepoints from before it, then a replay of the records since.

    Raises UsageError if it was not published, was undone already, or a savepoint is gone.
    """
    journal = journal_of(settings, plan.id)
    if journal.outcome != "published":
        refuse_if_held(settings, plan)
        raise UsageError(f"plan {plan.id} is {journal.outcome}, not published", next_step(plan.id, journal.outcome))
    if (undo := undone_by(settings, plan)) is not None:
        raise UsageError(f"plan {plan.id} was undone by {undo} already", f"to have it again: {commands.undo(undo)}")
    requests = []
    for name in plan.names:
        before = _savepoint_before(settings, plan, name)
        snapshot = planning_snapshot(settings, streams[name], topics)
        _refuse_later(snapshot, plan)
        back_to = Resolved(before.txn, before.ends, (f"everything as it was on {instant_words(before.taken_at)}",))
        target = Target("savepoint", f"from before {plan.id}")
        voided = journal.done("void_records", name)
        wrong_from = None if voided is None else decode(voided["kept"])
        requests.append(RecoveryRequest(snapshot, target, resolved=back_to, base=before, wrong_from=wrong_from))
    return make_plan(settings, requests, undoes=plan.id, along=Along(leave=frozenset(plan.left)))


def _savepoint_before(settings: Settings, plan: RecoveryPlan, stream: str) -> Savepoint:
    findings = journal_of(settings, plan.id).done("take_savepoint", stream)
    before = savepoints.find(settings, stream, findings["savepoint"]) if findings else None
    if before is None:
        raise UsageError(f"the savepoint from before plan {plan.id} was dropped", "it can no longer be undone")
    return before


def _refuse_later(snapshot: PlanningSnapshot, plan: RecoveryPlan) -> None:
    """Raise UsageError if a later recovery has opened a generation; one that was aborted does not count."""
    generations = {each.number: each for each in snapshot.record.generations}
    number: int | None = snapshot.record.generation
    while number is not None and generations[number].aborts:
        number = generations[number].from_generation
    opened = plan.of(snapshot.stream.name).generation
    if number != opened:
        raise UsageError(
            f"stream {snapshot.stream.name} is in generation {snapshot.record.generation}; plan {plan.id} opened "
            f"{opened}",
            "undo the later recovery first",
        )
