"""From a target to a plan: look at the world, choose where the replay starts, and write it all down.

The replay starts from the latest of: a savepoint at or before the target; the target's own batch, while Spark's log and
the table's log still reach it (a savepoint of it is then taken at once, so that it is there when the plan is applied);
the very start of the stream, if the topics still have every record since. None of these: the plan is refused, unless
it may discard the state. A target that is ahead of the stream replays nothing: what lies between is skipped.
"""

from __future__ import annotations

import time

from reprocessing.conditions import UnknownColumn, broken
from reprocessing.first_bad_row import refuse_same_code
from reprocessing.history import generation_spans, in_lineage
from reprocessing.offline import OF_THE_STREAM, only_the_broker
from reprocessing.plan import Base, Checks, Plan, next_id, save
from reprocessing.snapshot import PlanningSnapshot, refuse_fenced
from reprocessing.targets import Resolved, Target, named_code, resolve
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger import Txn
from streaming_jobs.positions import TopicOffsets
from streaming_jobs.runtime.state_changes import differences
from streaming_jobs.sinks.tables import existing_table, open_tables
from streaming_jobs.state import savepoints
from streaming_jobs.state.checkpoint_cut import cuttable
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_folder import StreamFolder


def make_plan(
    found: PlanningSnapshot,
    target: Target,
    checks: Checks,
    *,
    resolved: Resolved | None = None,
    base: Savepoint | None = None,
    undoes: str | None = None,
    discard_state: bool = False,
    same_code: bool = False,
) -> Plan:
    """The plan for a target, written to disk; raises UsageError or PreflightRefused with the ways out.

    `resolved` and `base`, if given, are taken instead of being worked out. With `same_code` the code that a target
    names as wrong may be the one that runs the replay.
    """
    refuse_fenced(found)
    world = found.world
    if found.unreachable is not None and target.kind not in OF_THE_STREAM:
        raise only_the_broker(found.unreachable, "where the topics begin and end")
    _refuse_other_topics(found)
    stateful = bool(found.record.state_fingerprint)
    if discard_state and not stateful:
        raise UsageError(f"stream {found.stream.name} keeps no state", "leave out --discard-state")
    said: list[str] = []
    if target.kind == "code":
        code = named_code(target.value, found.record)
        did = f"is what {target} goes back before,"
        said = refuse_same_code(found, code.version, did, same_code=same_code)
    resolved = resolved or resolve(target, found.view())
    if resolved.ahead and (discard_state or checks != Checks()):
        raise UsageError(
            "the target is ahead of the stream: nothing is replayed, so there is no state to discard and nothing to "
            "check",
            "leave --discard-state, --require and --max-changed out",
        )
    if not resolved.ahead:
        _refuse_append_only(found)
    said += _unknown_yet(found, checks)
    start, notes, discards = _start(found, target, resolved, base, discard_state=discard_state)
    if start.savepoint is not None and not discards:
        _refuse_other_state(found, start.savepoint, undoes)
    plan = Plan(
        id=next_id(found.settings, found.stream.name),
        stream=found.stream.name,
        made_at=time.time(),
        target=_words(target, resolved),
        wanted=resolved.wanted,
        notes=(*resolved.notes, *notes, *said, *found.notes, *_reminders(found, resolved, start)),
        saw=world,
        base=start,
        stateful=stateful,
        rate=_rate(found, start),
        record_bytes=None if resolved.ahead else _mean_size(found, start),
        checks=checks,
        undoes=undoes,
        skips=resolved.ahead,
        discards_state=discards,
    ).sealed()
    if plan.discards_state and not plan.records:
        raise UsageError("the target is the topic's end: there is nothing to replay", "choose an earlier one")
    save(found.settings, plan)
    return plan


def _words(target: Target, resolved: Resolved) -> str:
    """The target for people; one that names code also names the batch."""
    if target.kind != "code":
        return str(target)
    return f"batch {resolved.batch.batch if resolved.batch else -1}, before code {target.value}"


def _unknown_yet(found: PlanningSnapshot, checks: Checks) -> list[str]:
    """Report an invalid rule now, not after the replay; note a column that only the new code may add.

    Raises UsageError for any other rule that the table cannot answer.
    """
    notes = []
    last = found.history.last
    changed = last is None or last.code != found.world.code
    table = existing_table(found.settings, found.stream.primary, found.stream.name)
    for rule in checks.rules:
        try:
            broken(table.readable(), [rule])
        except UnknownColumn as error:
            if not changed:
                raise
            notes.append(
                f"the table has no column {error.column} yet: {rule} is asked of the rebuilt rows, and the replay ends "
                "at once if they have none either"
            )
    return notes


def _refuse_append_only(found: PlanningSnapshot) -> None:
    for table in open_tables(found.settings, found.stream).values():
        table.check_removable()


def _refuse_other_state(found: PlanningSnapshot, savepoint: str, undoes: str | None) -> None:
    """Raise UsageError where the savepoint's state does not fit the code of today, as far as that is known.

    It is known for the code that the stream ran last. For any other code the replay finds out, before it publishes.
    """
    record = found.record
    kept = next((s for s in savepoints.savepoints(found.settings, record.stream) if s.id == savepoint), None)
    ran = record.code[-1] if record.code else None
    if kept is None or ran is None or ran.version != found.world.code or kept.code == found.world.code:
        return
    if words := differences(kept.state_fingerprint, record.state_fingerprint):
        ways = (
            f"deploy code {kept.code.hash} again, then: recourse recover undo {undoes}"
            if undoes
            else "rebuild the state: --to-batch -1; or begin with empty state: --discard-state"
        )
        raise UsageError(f"the state of savepoint {savepoint} was made by another aggregation: {words}", ways)


def _refuse_other_topics(found: PlanningSnapshot) -> None:
    for topic in found.around.topics:
        bound = found.record.topic(topic.name)
        if topic.topic_id is None or (bound is not None and bound.topic_id != topic.topic_id):
            raise PreflightRefused(
                f"topic {topic.name} was deleted{' and made anew' if topic.topic_id else ''}: what it held before "
                "cannot be read again",
                "nothing can be replayed from it; start the stream over",
            )
    if {topic.name for topic in found.record.topics} != {topic.name for topic in found.around.topics}:
        raise PreflightRefused(
            f"stream {found.stream.name} reads other topics than it did", "declare the topics it began with again"
        )


def _start(
    found: PlanningSnapshot, target: Target, resolved: Resolved, base: Savepoint | None, *, discard_state: bool
) -> tuple[Base, list[str], bool]:
    """What the replay starts from, what is to be said about that, and whether state is discarded."""
    if resolved.ahead:
        return Base(None, found.record.generation, found.world.batch, found.history.position), [], False
    if target.kind == "savepoint" and base is None:
        base = next(s for s in found.savepoints if s.txn == resolved.batch)
    if base is None:
        return _base(found, resolved, discard_state=discard_state)
    if gone := _lost(base.ends, found):
        raise UsageError(f"savepoint {base.id} cannot be replayed from: {gone}", _ways_back(found))
    return *_from_savepoint(base, base.txn), discard_state


def _reminders(found: PlanningSnapshot, resolved: Resolved, start: Base) -> list[str]:
    """What people have decided since, which the replay does not know of."""
    if resolved.ahead:
        return []
    lives = {number for number, _, _ in generation_spans(found.record.generations)}
    read_now = [
        {**void, "from": max(void["from"], begin)}
        for void in found.record.void_ranges
        if (begin := start.ends.get(void["topic"], {}).get(void["partition"], void["from"])) < void["to"]
        and void.get("generation", found.record.generation) in lives
    ]
    return [
        *(
            f"{v['topic']} partition {v['partition']}: {v['from']} to {v['to'] - 1} are read; {v['plan']} skipped them"
            for v in read_now
        ),
        *(
            f"version {a.version} of table {a.table} was accepted ({a.why}): the replay does not repeat it"
            for a in found.record.accepted
        ),
    ]


def _rate(found: PlanningSnapshot, base: Base) -> float | None:
    """Records a second that a replay from there can be expected to make; None when the ledger does not say."""
    pace = found.history.pace()
    latest = {(t.name, p): end for t in found.around.topics for p, end in t.latest.items()}
    records = sum(max(end - base.ends.get(t, {}).get(p, 0), 0) for (t, p), end in latest.items())
    largest = found.settings.for_stream(found.stream.name).max_offsets_per_trigger
    return round(pace.rate(records, largest), 1) if pace is not None and records else None


def _mean_size(found: PlanningSnapshot, base: Base) -> float | None:
    """Bytes of an average record at the replay's beginning, over the topics."""
    sizes = []
    for topic in found.around.topics:
        begins = {p: max(base.ends.get(topic.name, {}).get(p, 0), first) for p, first in topic.earliest.items()}
        begins = {p: offset for p, offset in begins.items() if offset < topic.latest.get(p, 0)}
        if begins and (size := found.topics.mean_size(topic.name, begins)) is not None:
            sizes.append(size)
    return round(sum(sizes) / len(sizes), 1) if sizes else None


def _base(found: PlanningSnapshot, resolved: Resolved, *, discard_state: bool) -> tuple[Base, list[str], bool]:
    name, record = found.stream.name, found.record
    wanted = resolved.batch
    if wanted is not None:
        kept = [s for s in found.savepoints if in_lineage(record.generations, s.txn) and s.txn <= wanted]
        kept = [s for s in kept if not _lost(s.ends, found)]
        if (not kept or kept[-1].txn < wanted) and (taken := _take(found, wanted)) is not None:
            kept += [taken] if not _lost(taken.ends, found) else []
        if kept:
            return *_from_savepoint(kept[-1], wanted), discard_state
    starts = record.starts
    gone = _lost(starts, found)
    if not gone:
        notes = ["no savepoint is that old: everything is replayed from the stream's start"] if wanted else []
        return Base(None, record.generation, -1, starts), notes, False
    if discard_state:
        first = {topic.name: topic.earliest for topic in found.around.topics}
        begin = {
            topic: {p: max(offset, first[topic].get(p, 0)) for p, offset in each.items()}
            for topic, each in resolved.wanted.items()
        }
        notes = [f"no savepoint is that old, and {gone}: the tables begin empty at the target"]
        if begin != resolved.wanted:
            notes.append("the target's own records are gone: it begins with the first that the topic still has")
        return Base(None, record.generation, -1, begin), notes, True
    raise UsageError(
        f"stream {name} cannot go back that far: no savepoint is as old as {wanted or 'its start'}, and {gone}",
        _ways_back(found),
    )


def _ways_back(found: PlanningSnapshot) -> str:
    """The oldest moments that can still be gone back to, in words."""
    lives = found.record.generations
    oldest = next((s.id for s in found.savepoints if in_lineage(lives, s.txn) and not _lost(s.ends, found)), None)
    here = StreamFolder.of(found.settings, found.stream.name).checkpoint(lives[-1].number)
    cuts = cuttable(here)
    batch = next(
        (
            b.txn.batch
            for b in found.history.between(Txn(lives[-1].number, cuts.start - 1), Txn(lives[-1].number, cuts.stop - 2))
            if b.txn.generation == lives[-1].number and b.txn.batch in cuts and b.versions and not _lost(b.ends, found)
        ),
        None,
    )
    ways = [f"--savepoint {oldest}"] if oldest else []
    ways += [f"--to-batch {batch}"] if batch is not None else []
    way = f"the oldest way back is {' or '.join(ways)}" if ways else "no way back is left"
    return way + (", or begin with empty state: --discard-state" if found.record.state_fingerprint else "")


def _from_savepoint(savepoint: Savepoint, wanted: Txn) -> tuple[Base, list[str]]:
    notes = []
    if savepoint.txn < wanted:
        notes.append(f"the nearest savepoint before {wanted} is {savepoint.id}: the replay starts there")
    return Base(savepoint.id, savepoint.generation, savepoint.batch, savepoint.ends), notes


def _take(found: PlanningSnapshot, wanted: Txn) -> Savepoint | None:
    """A savepoint of the target's own batch, if the logs still show that moment."""
    checkpoint = StreamFolder.of(found.settings, found.stream.name).checkpoint(wanted.generation)
    if wanted.generation != found.record.generation or wanted.batch not in cuttable(checkpoint):
        return None
    try:
        return savepoints.take(found.settings, found.stream, found.record, wanted.batch, "recovery", "for a plan")
    except PreflightRefused:  # a table's log no longer reaches back to it
        savepoints.drop(found.settings, found.stream, savepoints.name_of(wanted))
        return None


def _lost(ends: TopicOffsets, found: PlanningSnapshot) -> str:
    """What a replay from these offsets would miss, in words; empty if nothing."""
    for topic in found.around.topics:
        for partition, first in topic.earliest.items():
            begin = ends.get(topic.name, {}).get(partition)
            if begin is not None and begin < first:
                return f"offsets {begin} to {first - 1} of topic {topic.name}, partition {partition}, are gone"
    return ""
