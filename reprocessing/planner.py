"""From a target to a plan: look at the world, choose where the replay starts, and write it all down.

The replay starts from the latest of: a savepoint at or before the target; the target's own batch, while Spark's log and
the table's log still reach it (a savepoint of it is then taken at once, so that it is there when the plan is applied);
the very start of the stream, if the topics still have every record since. None of these: the plan is refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from reprocessing.audit import broken
from reprocessing.history import Batch, History, Offsets, on_path, path
from reprocessing.plan import Base, Checks, Plan, SawTable, SawTopic, World, next_id, save
from reprocessing.targets import Resolved, Target, View, resolve
from streaming_jobs import generation as generations
from streaming_jobs import savepoints
from streaming_jobs.checkpoint_cut import cuttable
from streaming_jobs.code_version import code_version
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.generation import StreamRecord
from streaming_jobs.ledger import LedgerEntry, Txn
from streaming_jobs.preflight import TopicWorld
from streaming_jobs.preflight import World as Surroundings
from streaming_jobs.savepoints import Savepoint
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta import open_sink
from streaming_jobs.sources.topics import Topics
from streaming_jobs.stream import Stream
from streaming_jobs.world import all_tables, gather, ledger_file


@dataclass(frozen=True)
class Situation:
    """A stream as planning finds it."""

    settings: Settings
    stream: Stream
    topics: Topics
    record: StreamRecord
    around: Surroundings
    history: History
    savepoints: Sequence[Savepoint]

    @property
    def world(self) -> World:
        """What a plan keeps of it; raises UsageError where there is nothing to put right."""
        if not self.history.batches:
            raise UsageError(f"stream {self.stream.name} has not run a batch yet", "there is nothing to put right")
        last = self.history.batches[-1].txn
        code = code_version(self.stream, self.settings.flows)
        return World(
            generation=self.record.generation,
            batch=last.batch,
            code=(code.hash, code.package),
            tables=tuple(self._tables()),
            topics=tuple(_saw(topic) for topic in self.around.topics),
        )

    def view(self) -> View:
        """What resolving a target looks at."""
        return View(
            record=self.record,
            history=self.history,
            topics=self.around.topics,
            savepoints=self.savepoints,
            for_time=self.topics.offsets_for_time,
            now=time.time(),
        )

    def _tables(self) -> list[SawTable]:
        found = []
        for declared, role in all_tables(self.stream):
            sink = open_sink(self.settings, declared, self.stream.name)
            if sink is None:
                raise PreflightRefused(f"table {declared.name} is gone", "put it back from a copy")
            if not sink.direct:
                raise UsageError(
                    f"table {declared.name} has constraints or features that a publish in one commit cannot keep",
                    "a recovery of such a table is not offered; see docs/recover.md",
                )
            sizes = sink.handle.get_add_actions()["size_bytes"].to_pylist()
            found.append(
                SawTable(
                    name=declared.name,
                    role=role,
                    table_id=sink.table_id,
                    version=sink.handle.version(),
                    files=len(sizes),
                    size=sum(sizes),
                    mode=declared.mode,
                )
            )
        return found


def look(settings: Settings, stream: Stream, topics: Topics) -> Situation:
    """Gather everything; raises UsageError for a stream that has never run. Takes no lease and changes nothing."""
    record = generations.load(settings, stream.name)
    if record is None:
        raise UsageError(f"stream {stream.name} has never run", "there is nothing to put right")
    around = gather(settings, stream, topics)
    history = path(record.generations, ledger_file(settings, stream.name).lines(stream.name))
    entry = next(t.entry for t in around.tables if t.role == "primary")
    if entry is not None and entry.kind == "batch" and history.find(entry.txn) is None and entry.batch >= 0:
        history = History((*history.batches, _batch(entry)))
    return Situation(settings, stream, topics, record, around, history, savepoints.savepoints(settings, stream.name))


def make_plan(
    found: Situation,
    target: Target,
    checks: Checks,
    *,
    resolved: Resolved | None = None,
    base: Savepoint | None = None,
    undoes: str | None = None,
) -> Plan:
    """The plan for a target, written to disk; raises UsageError or PreflightRefused with the ways out.

    `resolved` and `base`, if given, are taken instead of being worked out.
    """
    refuse_fenced(found)
    world = found.world
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
    resolved = resolved or resolve(target, found.view())
    broken(found.settings.tables / found.stream.primary.name, checks.rules)  # a rule that cannot be asked is told now
    if target.kind == "savepoint" and base is None:
        base = next(s for s in found.savepoints if s.txn == resolved.batch)
        if gone := _lost(base.ends, found):
            raise UsageError(f"savepoint {base.id} cannot be replayed from: {gone}", "choose a later one")
    start, notes = _from_savepoint(base, base.txn) if base else _base(found, resolved)
    notes += [
        f"version {a.version} of table {a.table} was accepted ({a.why}): the replay does not repeat it"
        for a in found.record.accepted
    ]
    plan = Plan(
        id=next_id(found.settings, found.stream.name),
        stream=found.stream.name,
        made_at=time.time(),
        target=str(target),
        wanted=resolved.wanted,
        notes=(*resolved.notes, *notes),
        saw=world,
        base=start,
        stateful=bool(found.record.state_fingerprint),
        rate=found.history.rate(),
        checks=checks,
        undoes=undoes,
    ).sealed()
    save(found.settings, plan)
    return plan


def refuse_fenced(found: Situation) -> None:
    """Raise PreflightRefused when another recovery has fenced a table and is not over."""
    for table in found.around.tables:
        if table.entry is not None and (
            table.entry.kind == "fence"
            or (table.entry.kind == "publish" and table.entry.generation > found.record.generation)
        ):
            raise PreflightRefused(
                f"the recovery plan {table.entry.plan} of table {table.name} is under way",
                f"finish it: recourse recover resume {table.entry.plan}, or abort {table.entry.plan}",
            )


def _base(found: Situation, resolved: Resolved) -> tuple[Base, list[str]]:
    name, record = found.stream.name, found.record
    wanted = resolved.batch
    if wanted is not None:
        kept = [s for s in found.savepoints if on_path(record.generations, s.txn) and s.txn <= wanted]
        kept = [s for s in kept if not _lost(s.ends, found)]
        if (not kept or kept[-1].txn < wanted) and (taken := _take(found, wanted)) is not None:
            kept.append(taken)
        if kept:
            return _from_savepoint(kept[-1], wanted)
    starts = {t.name: {int(p): o for p, o in t.start.items()} for t in record.topics}
    gone = _lost(starts, found)
    if not gone:
        notes = ["no savepoint is that old: everything is replayed from the stream's start"] if wanted else []
        return Base(None, record.generation, -1, starts), notes
    oldest = next((s.id for s in found.savepoints if on_path(record.generations, s.txn)), None)
    raise UsageError(
        f"stream {name} cannot go back that far: no savepoint is as old as {wanted or 'its start'}, and {gone}",
        f"the oldest way back is --savepoint {oldest}" if oldest else "there is no savepoint; nothing can be restored",
    )


def _from_savepoint(savepoint: Savepoint, wanted: Txn) -> tuple[Base, list[str]]:
    notes = []
    if savepoint.txn < wanted:
        notes.append(f"the nearest savepoint before {wanted} is {savepoint.id}: the replay starts there")
    return Base(savepoint.id, savepoint.generation, savepoint.batch, savepoint.ends), notes


def _take(found: Situation, wanted: Txn) -> Savepoint | None:
    """A savepoint of the target's own batch, if the logs still show that moment."""
    checkpoint = generations.checkpoint(found.settings, found.stream.name, wanted.generation)
    if wanted.generation != found.record.generation or wanted.batch not in cuttable(checkpoint):
        return None
    try:
        return savepoints.take(found.settings, found.record, wanted.batch, "recovery", "for a plan")
    except PreflightRefused:  # a table's log no longer reaches back to it
        savepoints.drop(found.settings, found.stream.name, savepoints.name_of(wanted))
        return None


def _lost(ends: Offsets, found: Situation) -> str:
    """What a replay from these offsets would miss, in words; empty if nothing."""
    for topic in found.around.topics:
        for partition, first in topic.earliest.items():
            begin = ends.get(topic.name, {}).get(partition)
            if begin is not None and begin < first:
                return f"offsets {begin} to {first - 1} of topic {topic.name}, partition {partition}, are gone"
    return ""


def _saw(topic: TopicWorld) -> SawTopic:
    return SawTopic(topic.name, topic.topic_id or "", dict(topic.earliest), dict(topic.latest))


def _batch(entry: LedgerEntry) -> Batch:
    return Batch(
        txn=entry.txn,
        at=time.time(),
        starts={r.topic: dict(r.start) for r in entry.offsets},
        ends={r.topic: dict(r.end) for r in entry.offsets},
        code=entry.code,
        versions={},
        records=sum(r.records for r in entry.offsets),
    )
