"""Adoption: a stream of Recourse goes on where another job has stopped, in the job's own table.

Up to three writes, in this order; each can be killed and done again:

1. for a job with state that fits (`carried_state.py`): a copy of its checkpoint as it was after its last batch;
2. the stream's record: its topics begin where the job's last batch ended, and the job's commits are accepted;
3. one commit to the table without rows: the table belongs to the stream, at generation 1 before batch 0, or, with
   state, after the job's last batch.

Until the last one preflight refuses each start, because the table is not the stream's. The job's checkpoint is only
read, so the job itself can go on from it as long as the stream has written no batch. Until then an undo takes the
writes back, the last one first, by a commit that gives the table the properties from before the adoption.

The stream begins at the end of the job's last batch. So a plan is refused if checkpoint or log say that the table ends
elsewhere, and an adoption if the job has moved either of the two since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deltalake.exceptions import CommitFailedError, DeltaError

from streaming_jobs.declare.table import emits
from streaming_jobs.errors import CommitImpossible, CommitRefused, UsageError
from streaming_jobs.inspection.checkpoint_history import CheckpointHistory
from streaming_jobs.inspection.findings import numbers_words
from streaming_jobs.inspection.inspection import Inspection, inspect
from streaming_jobs.inspection.judgement import JudgedTable
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange, TopicOffsets
from streaming_jobs.platform.delta_log import versions_in_log
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.log import STREAM_PROPERTY, moving, noted, walk
from streaming_jobs.sinks.delta.sink import DeltaSink, open_sink
from streaming_jobs.sinks.tables import open_tables
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.state import stream_record
from streaming_jobs.state.checkpoint import Checkpoint, copied, cut
from streaming_jobs.state.lease import take
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import ADOPTED, Accepted, BoundTopic, Generation, StreamRecord
from streaming_jobs.storage.locations import Location, remove_tree
from streaming_jobs.stream import DeltaTable, Stream
from streaming_jobs.text import commands

_DOUBTS_SHOWN = 3
_ONLY_CHANGES_ROWS = ("delete", "update", "restore")
"""Operations of other programs that add no records, as reasons of findings."""
NewestEntries = tuple[int | None, int | None]
"""The last planned and the last committed batch of a checkpoint, by the names of its files."""


@dataclass(frozen=True)
class CarriedState:
    """State that fits: so many `keys` were compared after `batch`; the fingerprint is that of the stream's state."""

    batch: int
    keys: int
    fingerprint: Mapping[str, str] = field(default_factory=dict)


TryState = Callable[[CheckpointHistory, int], CarriedState]
"""Tries the state after a batch of the job; raises UsageError if it does not fit."""


@dataclass(frozen=True)
class AdoptionPlan:
    """What an adoption writes: where the stream begins, and the versions of the table that it accepts.

    `batch` is the job's last one, after which the stream goes on. `version` and `newest` are those of table and
    checkpoint when they were read. `recorded`: the record is there, by an adoption that was killed. `inspection` is
    that of the job. `state` is None for a job without state.
    """

    stream: str
    table: str
    location: str
    checkpoint: Location
    query_id: str
    batch: int
    starts: TopicOffsets
    topic_ids: Mapping[str, str]
    version: int
    newest: NewestEntries
    accepted: tuple[int, ...]
    inspection: Inspection
    recorded: bool = False
    state: CarriedState | None = None

    @property
    def reason(self) -> str:
        """The words of the record and of the commit, by which an adoption is known again."""
        return f"{ADOPTED} {self.query_id} after batch {self.batch}"

    @property
    def position(self) -> Txn:
        """The stream's position in the table: batch numbers go on where the checkpoint does."""
        return Txn(1, self.batch if self.state else -1)

    def as_json(self) -> dict[str, Any]:
        names = ("stream", "table", "location", "query_id", "batch", "starts", "version", "recorded")
        return {
            **{name: getattr(self, name) for name in names},
            "checkpoint": str(self.checkpoint),
            "accepted": list(self.accepted),
            "state": None if self.state is None else {"batch": self.state.batch, "keys": self.state.keys},
            "inspection": self.inspection.as_json(),
        }


def plan_adoption(
    settings: Settings,
    stream: Stream,
    checkpoint: Location,
    topics: TopicReader,
    try_state: TryState,
    *,
    after: int | None = None,
    despite_findings: bool = False,
) -> AdoptionPlan:
    """Plan the adoption of the job with this checkpoint; writes nothing. `try_state` is called for a job with state.

    `after` is the batch after which the stream goes on, for a job whose last batch was planned and not committed.
    `despite_findings`: also where the findings put in doubt that the table ends there. Raises UsageError for a job or a
    stream that does not fit.
    """
    declared = _only_table(stream)
    location = settings.tables / declared.name
    version = max(versions_in_log(location), default=0)  # before the checkpoint: the job may still run
    found = inspect([checkpoint], [location])
    newest = _newest(checkpoint)
    history, judged = found.checkpoints[0], found.tables[0]
    sink = _owned(settings, declared, stream.name)
    if newest != (history.last_planned, history.last_committed):
        raise UsageError(
            f"the newest entries of {checkpoint} cannot be used: "
            + ("; ".join(history.trouble) or "they changed while they were read"),
            "stop the job, or put a damaged checkpoint back from its newest copy; then plan the adoption again",
        )
    if not history.batches:
        raise UsageError(f"{checkpoint} has no batch", "declare a new stream: there is nothing to take over")
    if history.query_id is None:
        raise UsageError(
            f"{checkpoint} has no query id: {'; '.join(history.trouble)}",
            "put the file metadata back from a copy of the checkpoint",
        )
    wanted, read = {topic.name for topic in stream.topics}, set(history.in_order[-1].end)
    if set(history.sources) != {"kafka"} or read != wanted:
        others = sorted(set(history.sources) - {"kafka"})
        raise UsageError(
            f"the job reads {', '.join([*sorted(read), *(f'a source of kind {kind}' for kind in others)])}, stream "
            f"{stream.name} reads {', '.join(sorted(wanted))}",
            "declare the stream with the job's topics",
        )
    batch = _last_batch(judged, after)
    starts = {topic: dict(each) for topic, each in history.batches[batch].end.items()}
    if max(judged.history.commits) != version:
        raise UsageError(
            f"table {declared.name} was at version {version} before the checkpoint was read, and is at "
            f"{max(judged.history.commits)}: the job still runs",
            "stop the job, then plan the adoption again",
        )
    changed = tuple(commit.version for commit in judged.history.commits.values() if commit.changes_data)
    plan = AdoptionPlan(
        stream=stream.name,
        table=declared.name,
        location=str(location),
        checkpoint=checkpoint,
        query_id=history.query_id,
        batch=batch,
        starts=starts,
        topic_ids=_topic_ids(topics, starts),
        version=version,
        newest=newest,
        accepted=changed,
        inspection=found,
    )
    plan = replace(plan, recorded=_is_of(_earlier(settings, plan), plan))
    done = plan.recorded and sink.owner == stream.name
    if not done and not despite_findings and (doubts := list(_doubts(judged, batch))):
        more = f"; and {len(doubts) - _DOUBTS_SHOWN} more" if len(doubts) > _DOUBTS_SHOWN else ""
        raise UsageError(
            f"table {declared.name} may not end where batch {batch} does: {'; '.join(doubts[:_DOUBTS_SHOWN])}{more}",
            "inspect the job, and repair table or checkpoint; or say --despite-findings, if the offsets after batch "
            f"{batch} are the right ones all the same",
        )
    if history.stateful and not done:
        writes = [commit for write in judged.attribution.of(history).get(batch, ()) for commit in write.commits]
        if emits(declared) == "close" and any(commit.upserts or commit.replaces_all for commit in writes):
            raise UsageError(
                f"the job replaces results that it has written before, and stream {stream.name} would append them",
                "declare the table with keys and emit='update'",
            )
        plan = replace(plan, state=try_state(history, batch))
    return plan


def adopt(settings: Settings, stream: Stream, plan: AdoptionPlan) -> bool:
    """Carry a plan out; False if that was done before.

    Raises LeaseBusy, UsageError, CommitRefused and CommitImpossible.
    """
    with take(settings, stream.name, purpose="adopt", wait=2.0):
        earlier = _earlier(settings, plan)
        recorded = _is_of(earlier, plan)
        sink = _owned(settings, _only_table(stream), stream.name)
        if recorded and sink.owner == stream.name and sink.position is not None:
            return False
        if recorded and sink.position is not None and sink.position > plan.position:
            raise UsageError(f"stream {stream.name} has run before", "adopt the job by a new stream")
        if sink.version != plan.version:
            raise CommitRefused(
                f"table {plan.table} is at version {sink.version} and was at {plan.version}: the job still runs",
                "stop the job, then plan the adoption again",
            )
        if _newest(plan.checkpoint) != plan.newest:
            raise CommitRefused(
                f"checkpoint {plan.checkpoint} has other newest entries than in the plan: the job still runs",
                "stop the job, then plan the adoption again",
            )
        folder = StreamFolder.of(settings, stream.name).make()
        _carry_over(plan, folder)
        stream_record.save(settings, _record(plan, earlier))
        _take_over(sink, plan)
    return True


@dataclass(frozen=True)
class AdoptionUndo:
    """What an undo takes back. `version` is the table's newest one; `before` is the last one before the adoption.

    `before` is None if the table no longer belongs to the stream: by an undo that was killed, or as the adoption was.
    """

    stream: str
    table: str
    location: str
    version: int
    before: int | None
    reason: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_undo(settings: Settings, stream: Stream) -> AdoptionUndo:
    """Plan to take an adoption back; writes nothing.

    Raises UsageError if there is none, or if the stream, or another program, has changed rows since.
    """
    record = stream_record.load(settings, stream.name)
    if record is None or not record.adopted:
        raise UsageError(
            f"stream {stream.name} has no adoption: it has adopted nothing, or that was undone",
            "there is nothing to undo",
        )
    declared = _only_table(stream)
    sink = _owned(settings, declared, stream.name)
    begun = Txn(1, record.generations[0].from_batch)
    at = max((t.position for t in open_tables(settings, stream).values() if t.position is not None), default=begun)
    if (sink.owner is not None or record.tables) and at > begun:
        raise UsageError(
            f"stream {stream.name} has committed since its adoption ({at}), and its records would be in no other job",
            f"let it go on, or go back to a savepoint of the stream (`{commands.savepoints(stream.name)}`)",
        )
    reason = record.generations[0].reason
    before = None if sink.owner is None else _before(sink, reason)
    return AdoptionUndo(stream.name, declared.name, str(sink.path), sink.version, before, reason)


def undo(settings: Settings, stream: Stream, plan: AdoptionUndo) -> None:
    """Take an adoption back; if that is killed, a further undo finishes it.

    Raises LeaseBusy, UsageError, CommitRefused and CommitImpossible.
    """
    with take(settings, stream.name, purpose="undo of an adoption", wait=2.0):
        if plan_undo(settings, stream) != plan:
            raise CommitRefused(f"stream {plan.stream} or its table has changed since the plan", "plan the undo again")
        if plan.before is not None:
            _give_back(_owned(settings, _only_table(stream), stream.name), plan, plan.before)
        folder = StreamFolder.of(settings, stream.name)
        remove_tree(folder.checkpoint(1).folder)
        remove_tree(folder.savepoints)
        folder.record.delete()


def _before(sink: DeltaSink, reason: str) -> int:
    """The table's last version before its adoption; raises UsageError if rows have changed since."""
    unset = f"ALTER TABLE delta.`{sink.path}` UNSET TBLPROPERTIES ('{STREAM_PROPERTY}'), then undo again"
    for commit in walk(sink.path, sink.version):
        if commit.changes_data:
            raise UsageError(
                f"version {commit.version} ({commit.operation}) of table {sink.name} has changed rows in the meantime",
                f"if the job goes on, adopt it again where it stops; to take the stream's name off the table: {unset}",
            )
        if commit.entry is not None and commit.entry.kind == "publish" and commit.entry.note == reason:
            return commit.version - 1
    raise UsageError(f"the log of table {sink.name} no longer has the commit of the adoption", unset)


def _give_back(sink: DeltaSink, plan: AdoptionUndo, before: int) -> None:
    """A commit with the properties of then; the rows are the same, so it adds no file and removes none."""
    entry = LedgerEntry("schema", plan.stream, plan.table, 1, -1, note=f"undo: {plan.reason}")
    with _committing(plan.table):
        sink.handle.restore(before, commit_properties=noted(entry, retries=0))
    sink.update()
    sink.sync()


@contextmanager
def _committing(table: str) -> Iterator[None]:
    try:
        yield
    except CommitFailedError as error:
        raise CommitRefused(f"another commit to table {table} came first: {error}", "plan it again") from error
    except DeltaError as error:
        raise CommitImpossible(
            f"the properties of table {table} cannot be set: {str(error)[:300]}",
            "remove the feature, or use a new table",
        ) from error


def _carry_over(plan: AdoptionPlan, folder: StreamFolder) -> None:
    """The job's checkpoint after its last batch as the stream's; one of an earlier attempt may be of another batch."""
    target = folder.checkpoint(1).folder
    remove_tree(target)
    if plan.state is not None:
        cut(Checkpoint(plan.checkpoint), plan.batch, target, copied)


def _only_table(stream: Stream) -> DeltaTable:
    tables = list(stream.sinks.values())
    external = stream.topic_sinks or stream.postgres_tables
    if len(tables) != 1 or external or stream.tables_read or not isinstance(tables[0], DeltaTable):
        raise UsageError(
            f"stream {stream.name} is not one from topics to one Delta table", "adopt one table by one stream"
        )
    if stream.lookups:
        raise UsageError(
            f"stream {stream.name} looks up a table, and the job's batches do not say at which versions",
            "adopt the table by a stream without lookups, and add them afterwards",
        )
    if tables[0].order_by or tables[0].deletes is not None:
        raise UsageError(
            f"table {tables[0].name} is declared with order_by, and the rows of the job have no order",
            "declare it with keys alone: the newest batch then wins",
        )
    return tables[0]


def _owned(settings: Settings, declared: DeltaTable, stream: str) -> DeltaSink:
    """The table; raises UsageError if it is another stream's, or gone."""
    sink = open_sink(settings, declared, stream)
    if sink is None:
        raise UsageError(f"table {declared.name} is gone", "plan the adoption again")
    if sink.owner not in (None, stream):
        raise UsageError(
            f"table {declared.name} belongs to stream {sink.owner}", "adopt the table of a job that is none of Recourse"
        )
    return sink


def _newest(checkpoint: Location) -> NewestEntries:
    return Checkpoint(checkpoint).last_planned, Checkpoint(checkpoint).last_committed


def _doubts(judged: JudgedTable, batch: int) -> Iterator[str]:
    """What speaks against a table that ends where the batch does; rows that are no longer in the table do not."""
    [history] = judged.checkpoints
    attribution, alive = judged.attribution, judged.history.alive
    if attribution.how(history) is None:
        yield f"no commit in its log is of checkpoint {history.name}"
    last = max((v for writes in attribution.of(history).values() for w in writes for v in w.versions), default=-1)
    for each in judged.findings:
        if each.reason in ("will_repeat", "will_skip"):  # --after-batch decided about this batch
            doubted = each.reason == "will_skip" and batch in each.batches
        elif each.kind == "foreign":
            doubted = each.reason not in _ONLY_CHANGES_ROWS and each.versions[-1] > last
            doubted = doubted and any(map(alive, each.versions))
        elif each.reason in ("ahead", "other_query", "earlier_life"):
            doubted = any(map(alive, each.versions))
        else:
            doubted = each.reason == "checkpoint" or each.kind in ("will_lose", "will_double")
        if doubted:
            yield each.words
    by_recourse = [write for write in attribution.writes if write.checkpoint is not history]
    if later := [v for write in by_recourse for v in write.versions if v > last and alive(v)]:
        yield f"Recourse wrote {numbers_words(later, 'version')}"


def _last_batch(judged: JudgedTable, after: int | None) -> int:
    """The batch whose end is the first offset that the stream reads."""
    [history] = judged.checkpoints
    planned, committed = history.last_planned, history.last_committed
    assert planned is not None
    if after is not None:
        if after not in (planned, committed):
            names = planned if committed in (None, planned) else f"{committed} or {planned}"
            raise UsageError(f"batch {after} is not the job's last one", f"name batch {names}")
        return after
    if committed == planned:
        return planned
    written = any(judged.history.alive(v) for w in judged.attribution.of(history).get(planned, ()) for v in w.versions)
    found = "in the table" if written else "not in the table, by the log"
    if written:
        choice = f"or choose: --after-batch {planned}, which keeps these rows"
    elif committed is not None:
        choice = f"or choose: --after-batch {committed}, which reads the batch again"
    else:
        choice = "or declare a new stream with a table of its own, as the job has written nothing"
    raise UsageError(
        f"batch {planned} of the job was planned and not committed; its rows are {found}",
        f"let the job finish the batch; {choice}",
    )


def _topic_ids(topics: TopicReader, starts: TopicOffsets) -> dict[str, str]:
    """The ids of the topics; raises UsageError if one lacks records that the stream would read first."""
    ids: dict[str, str] = {}
    for name, each in starts.items():
        info = topics.describe(name)
        if info is None:
            raise UsageError(f"topic {name} does not exist", "check kafka.bootstrap_servers")
        bounds = topics.offsets(name)
        for partition, offset in each.items():
            earliest, latest = bounds.earliest.get(partition, 0), bounds.latest.get(partition, -1)
            if not earliest <= offset <= latest:
                raise UsageError(
                    f"topic {name} has offsets {earliest} to {latest} of partition {partition}, and the job has "
                    f"stopped at {offset}: records between are gone, or the topic was created again",
                    "bring them back, or declare a new stream and a new table",
                )
        ids[name] = info.id
    return ids


def _earlier(settings: Settings, plan: AdoptionPlan) -> StreamRecord | None:
    """The record of an adoption that was killed; raises UsageError for any other state of the stream."""
    record = stream_record.load(settings, plan.stream)
    alone = record is None or (record.adopted and not record.tables)  # no session has started the stream
    if alone or (record is not None and record.generations[0].reason == plan.reason):
        return record
    raise UsageError(f"stream {plan.stream} has run before", "adopt the job by a new stream")


def _is_of(record: StreamRecord | None, plan: AdoptionPlan) -> bool:
    return record is not None and record.generations[0].reason == plan.reason and record.starts == plan.starts


def _record(plan: AdoptionPlan, earlier: StreamRecord | None) -> StreamRecord:
    now = time.time()
    return StreamRecord(
        plan.stream,
        (Generation(1, now, plan.reason, from_batch=plan.position.batch),),
        topics=tuple(BoundTopic(topic, plan.topic_ids[topic], each) for topic, each in plan.starts.items()),
        accepted=tuple(Accepted(plan.table, version, plan.reason, now) for version in plan.accepted),
        state_fingerprint={} if plan.state is None else plan.state.fingerprint,
        tag="" if earlier is None else earlier.tag,
    )


def _take_over(sink: DeltaSink, plan: AdoptionPlan) -> None:
    """The commit without rows. Its entry is a publish that changes no rows: the stream's position begins there."""
    reads = tuple(OffsetRange(topic, plan.topic_ids[topic], each, each) for topic, each in plan.starts.items())
    entry = LedgerEntry("publish", plan.stream, plan.table, 1, plan.position.batch, reads, note=plan.reason)
    with _committing(plan.table):
        sink.handle.alter.set_table_properties(
            {STREAM_PROPERTY: plan.stream}, raise_if_not_exists=False, commit_properties=moving(entry, sink.app_id)
        )
    sink.update()
    sink.sync()
