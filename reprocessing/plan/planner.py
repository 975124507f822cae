"""From the requests for one or more streams to a plan: check each, choose the start of its replay, write the plan.

With a target ahead of the stream nothing is replayed: the records in between are skipped. The plan's notes name what
the replay does not repeat, and the streams that the plan leaves alone. The plan that takes a published one back
(`plan_undo`) is such a plan too, to the savepoints from before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from reprocessing.plan.affected_streams import (
    NO_CHOICE,
    Along,
    all_streams,
    changed_by,
    changed_versions,
    downstream,
    further_back,
    goes_back_to,
    refuse_in_first_batch,
    refuse_others,
    refuse_undeclared,
    still_void,
    through_tables,
)
from reprocessing.plan.conditions import UnknownColumn, broken
from reprocessing.plan.first_bad_row import refuse_same_code
from reprocessing.plan.journal import journal_of, next_step
from reprocessing.plan.notes import not_taken_along, reminders, same_deploy
from reprocessing.plan.plan import NO_CHECKS, Base, Checks, RecoveryPlan, StreamRecoveryPlan, Until, opened_by
from reprocessing.plan.plan_file import next_id, save, sealed
from reprocessing.plan.registry import append_rate, prune_plans, refuse_if_held, undone_by
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
from streaming_jobs.catalog.topology import path_between
from streaming_jobs.declare.postgres_table import PUT_RIGHT
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.positions import TopicOffsets, decode, offsets_between
from streaming_jobs.runtime.state_changes import differences
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.tables import existing_table
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.state import savepoints, stream_record
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import instant_words


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
    """The plan for these requests, each for another stream, and for the streams that read their topics and tables.

    The order is that in which they are recovered. The plan is written to disk, and named after the first stream.
    `checks_of` gives the checks of downstream streams, `along` says what else to do with them. Raises
    UsageError or PreflightRefused, with ways out.
    """
    asked = [request.snapshot.stream for request in requests]
    if len({stream.name for stream in asked}) < len(asked):
        named = ", ".join(stream.name for stream in asked)
        raise UsageError(f"a plan names each stream once, not {named}", "name each stream once")
    _refuse_look_ups(settings, asked)
    drafts, left = _drafts(settings, requests, undoes, checks_of, along)
    notes = [*map(_left_words, left), *not_taken_along(settings, asked, {*left, *(d.stream for d in drafts)})]
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
    """The plans of the streams, readers after their writers; and the streams that are left out."""
    asked = {request.snapshot.stream.name: request for request in requests}
    streams = all_streams(settings, [request.snapshot.stream for request in requests])
    along = downstream(streams, asked)
    drafts: dict[str, StreamRecoveryPlan] = {}
    changed: dict[str, dict[int, int]] = {}
    versions: dict[str, int] = {}
    left: list[str] = []
    choice.check([name for name in along if name not in asked])
    committed = CommittedOffsets(settings)
    for name in along:
        changes = {topic.name: changed[topic.name] for topic in streams[name].topics if topic.name in changed}
        changes |= {
            table.name: {0: versions[table.name]} for table in streams[name].tables_read if table.name in versions
        }
        if name in asked:
            request = asked[name]
            of_one = undoes is None and request.target.kind != "savepoint"  # one that has a name is of several
            if of_one and changes:
                raise UsageError(
                    f"stream {name} reads what another stream of the plan writes, so it is taken along",
                    f"leave {name} out: it goes back to its last batch before the first record that changes",
                )
        else:
            if not changes:
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
            request = _taken_along(snapshot, changes, checks_of, choice)
        draft = _draft if name in asked else _draft_along
        drafts[name] = draft(request, undoes, drafts, committed)
        anew = changed_versions(settings, drafts[name], streams)
        drafts[name] = replace(drafts[name], wrong_versions=anew)
        versions |= anew
        if drafts[name].wrong_from:
            changed |= changed_by(settings, drafts[name], opened_by(drafts[name]))
    refuse_others(settings, streams, changed, {*drafts, *left})
    refuse_undeclared(settings, {*streams, *drafts}, changed, requests[0].snapshot.topics)
    read = {table.name for name in drafts for table in streams[name].tables_read}
    drafts = {
        name: replace(draft, wrong_versions={t: v for t, v in draft.wrong_versions.items() if t in read})
        for name, draft in drafts.items()
    }
    if not changed and not any(draft.wrong_versions for draft in drafts.values()):  # nothing is between them
        return [drafts[name] for name in asked], tuple(left)
    for name in drafts:
        if found := sorted({lookup.place for lookup in streams[name].lookups.values()}.intersection(versions)):
            raise UsageError(
                f"stream {name} reads what the streams to recover write, and looks up their table {found[0]} as it was",
                f"leave it as it is: --leave {name}; after the recovery, {commands.plan(name, to_batch=-1)}",
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
    """The request for a stream that reads topics and tables which change from these offsets on."""
    name, checks = snapshot.stream.name, checks_of(snapshot.stream)
    if name in choice.rebuild:
        return RecoveryRequest(snapshot, Target("batch", "-1"), checks)
    target, resolved = goes_back_to(snapshot, changed)
    return RecoveryRequest(snapshot, target, checks, resolved=resolved, discard_state=name in choice.discard_state)


def _refuse_look_ups(settings: Settings, streams: Sequence[Stream]) -> None:
    """Raise UsageError if one of the streams looks up a table of another one: every replay ends before any publish."""
    if len(streams) < 2:
        return
    every = all_streams(settings, streams)
    for writer in streams:
        for reader in streams:
            looks_up = set(through_tables(every, [writer.name])) - set(downstream(every, [writer.name]))
            if reader.name not in looks_up:
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
    reminded = reminders(snapshot, resolved, start, until, {t for each in before.values() for t in each.wrong_versions})
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
        append_rate=append_rate(snapshot.settings, snapshot.stream.name) if written.wrong_from else None,
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
