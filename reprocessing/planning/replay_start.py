"""The start of a replay.

It is the latest of: a savepoint at or before the target; the target's batch, while Spark's log and the table's log
still reach it (a savepoint of it is then taken at once, so that it exists when the plan is applied); the very start of
the stream, if the topics still have every record since. Without any of them the plan is refused, unless it may discard
the state.
"""

from __future__ import annotations

from collections.abc import Mapping

from reprocessing.planning.history import has_present_rows, in_lineage
from reprocessing.planning.snapshot import PlanningSnapshot
from reprocessing.planning.targets import Resolved
from reprocessing.plans.plan import Base
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import Archived, TopicOffsets, first_after
from streaming_jobs.sources.archived_ranges import gone
from streaming_jobs.state import savepoints
from streaming_jobs.state.checkpoint import cuttable
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.table_sources.versions import gone_words

Start = tuple[Base, list[str], bool]
"""The base, notes about it, and True if state is discarded."""


def replay_start(
    snapshot: PlanningSnapshot, resolved: Resolved, base: Savepoint | None, *, discard_state: bool
) -> Start:
    """The start of a replay for the target `resolved`, from `base` if given; raises UsageError with the ways out."""
    if base is None:
        return _base(snapshot, resolved, discard_state=discard_state)
    if gone := _lost(base.ends, snapshot):
        raise UsageError(f"savepoint {base.id} cannot be replayed from: {gone}", _ways_back(snapshot))
    start, notes = _from_savepoint(base, base.txn)
    generations = snapshot.record.generations
    if in_lineage(generations, base.txn) and not has_present_rows(generations, base.txn):
        notes.append(f"a bounded recovery has corrected rows of savepoint {base.id} since: they will be as they were")
    return start, notes, discard_state


def _base(snapshot: PlanningSnapshot, resolved: Resolved, *, discard_state: bool) -> Start:
    name, record = snapshot.stream.name, snapshot.record
    wanted = resolved.batch
    if wanted is not None:
        usable = [s for s in snapshot.savepoints if has_present_rows(record.generations, s.txn) and s.txn <= wanted]
        usable = [s for s in usable if not _lost(s.ends, snapshot)]
        if (not usable or usable[-1].txn < wanted) and (taken := taken_now(snapshot, wanted)) is not None:
            usable += [taken] if not _lost(taken.ends, snapshot) else []
        if usable:
            return *_from_savepoint(usable[-1], wanted), discard_state
    starts = record.starts
    gone = _lost(starts, snapshot)
    if not gone:
        notes = ["no savepoint is that old: everything is replayed from the stream's start"] if wanted else []
        return Base(None, record.generation, -1, starts), notes, False
    if discard_state:
        topics = {topic.name: topic for topic in snapshot.around.topics}
        begin = {
            name: {
                p: first_after(offset, p, topics[name].earliest, topics[name].continues) or offset
                for p, offset in each.items()
            }
            for name, each in resolved.wanted.items()
        }
        notes = [f"no savepoint is that old, and {gone}: the tables begin empty at the target"]
        if begin != resolved.wanted:
            notes.append("the target's own records are gone: it begins with the first that the topic still has")
        return Base(None, record.generation, -1, begin), notes, True
    raise UsageError(
        f"stream {name} cannot go back that far: no savepoint is as old as {wanted or 'its start'}, and {gone}",
        _ways_back(snapshot),
    )


def _ways_back(snapshot: PlanningSnapshot) -> str:
    """The oldest targets to which the stream can still return, in words."""
    ways = []
    generations, current = snapshot.record.generations, snapshot.record.generation
    for savepoint in snapshot.savepoints:
        if has_present_rows(generations, savepoint.txn) and not _lost(savepoint.ends, snapshot):
            ways.append(f"--savepoint {savepoint.id}")
            break
    cuts = cuttable(StreamFolder.of(snapshot.settings, snapshot.stream.name).checkpoint(current))
    for batch in snapshot.history.between(Txn(current, cuts.start - 1), Txn(current, cuts.stop - 2)):
        here = batch.txn.generation == current and batch.txn.batch in cuts
        if here and batch.versions and not _lost(batch.ends, snapshot):
            ways.append(f"--to-batch {batch.txn.batch}")
            break
    way = f"the oldest way back is {' or '.join(ways)}" if ways else "no way back is left"
    return way + (", or begin with empty state: --discard-state" if snapshot.record.state_fingerprint else "")


def _from_savepoint(savepoint: Savepoint, wanted: Txn) -> tuple[Base, list[str]]:
    notes = []
    if savepoint.txn < wanted:
        notes.append(f"the nearest savepoint before {wanted} is {savepoint.id}: the replay starts there")
    return Base(savepoint.id, savepoint.generation, savepoint.batch, savepoint.ends), notes


def taken_now(snapshot: PlanningSnapshot, wanted: Txn) -> Savepoint | None:
    """A savepoint of a batch, taken now; None if the logs no longer reach it."""
    checkpoint = StreamFolder.of(snapshot.settings, snapshot.stream.name).checkpoint(wanted.generation)
    if wanted.generation != snapshot.record.generation or wanted.batch not in cuttable(checkpoint):
        return None
    try:
        return savepoints.take(
            snapshot.settings, snapshot.stream, snapshot.record, wanted.batch, "recovery", "for a plan"
        )
    except PreflightRefused:  # a table's log no longer reaches back to it
        savepoints.drop(snapshot.settings, snapshot.stream, savepoints.name_of(wanted))
        return None


def _lost(ends: TopicOffsets, snapshot: PlanningSnapshot) -> str:
    topics = snapshot.around.topics
    earliest, continues = {t.name: t.earliest for t in topics}, {t.name: t.continues for t in topics}
    return lost(ends, earliest, {t.name: t.archived for t in topics}, continues)


def lost(
    begins: TopicOffsets,
    earliest: TopicOffsets,
    archived: Mapping[str, Archived | None],
    continues: TopicOffsets | None = None,
) -> str:
    """The first range that a replay from these offsets would miss, in words; empty if there is none."""
    tables = {name: each for name, each in (continues or {}).items() if each}
    for topic, firsts in earliest.items():
        for partition in firsts:
            begin = begins.get(topic, {}).get(partition)
            first = None if begin is None else first_after(begin, partition, firsts, tables.get(topic, {}))
            if begin is not None and first is not None:
                if topic in tables:
                    return gone_words(topic, begin, first)
                return gone(archived.get(topic), topic, partition, begin, first)
    return ""
