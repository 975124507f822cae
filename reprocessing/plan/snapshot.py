"""The snapshot that planning takes of a stream: its record, its tables and topics, its history, its savepoints.

Without a broker, the stream's files are enough for targets that are a batch of the stream. The plan's figures about the
topics then come from the record and the ledger; like every plan, it is compared with the topics when it is applied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from reprocessing.plan.history import CommittedBatch, History, lineage
from reprocessing.plan.journal import refuse_under_way
from reprocessing.plan.plan import PlannedAgainst, SawTable, SawTopic
from reprocessing.plan.targets import View, no_batch
from streaming_jobs.errors import BrokerUnreachable, PreflightRefused, UsageError
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.preflight.snapshot import StreamSnapshot, TopicSnapshot, ledger_file, take_snapshot
from streaming_jobs.runtime.code_version import code_version
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import LATE, StoredTable
from streaming_jobs.sinks.tables import all_tables, open_tables
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state import savepoint_retention, savepoints, stream_record
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.archives import Archives

OF_THE_STREAM = ("batch", "table-version", "savepoint", "code")
"""Targets that need no broker."""


@dataclass(frozen=True)
class PlanningSnapshot:
    """A stream at the moment of planning; `unreachable` is the error if no broker answered."""

    settings: Settings
    stream: Stream
    topics: TopicReader
    record: StreamRecord
    preflight: StreamSnapshot
    history: History
    savepoints: Sequence[Savepoint]
    notes: Sequence[str] = ()
    unreachable: BrokerUnreachable | None = None

    @cached_property
    def planned_against(self) -> PlannedAgainst:
        """The part that a plan stores; raises UsageError if there is nothing to recover."""
        if self.history.last is None:
            raise no_batch(self.stream.name)
        last = self.history.last.txn
        code = code_version(self.stream, self.settings.flows)
        return PlannedAgainst(
            generation=self.record.generation,
            batch=last.batch,
            code=code,
            tables=tuple(self._tables()),
            topics=tuple(_saw(topic) for topic in self.preflight.topics),
        )

    def refuse_under_way(self) -> None:
        """Raise RecoveryUnderWay if a recovery of the stream is not over."""
        for table in self.preflight.tables:
            if table.entry is not None:
                refuse_under_way(table.name, table.entry, self.record.generation)

    def view(self) -> View:
        return View(
            record=self.record,
            history=self.history,
            topics=self.preflight.topics,
            savepoints=self.savepoints,
            for_time=self.topics.offsets_for_time,
            now=time.time(),
            names=savepoint_retention.of_stream(self.settings, self.stream.name),
        )

    @cached_property
    def tables(self) -> Mapping[str, StoredTable]:
        """The stream's tables that exist, opened once."""
        return open_tables(self.settings, self.stream)

    def _tables(self) -> list[SawTable]:
        tables = []
        for declared, role in all_tables(self.stream):
            table = self.tables.get(declared.name)
            if table is None and role in LATE:  # the stream has not run since it has it
                continue
            if table is None:
                raise PreflightRefused(f"table {declared.name} is gone", "put it back from a copy")
            table.check_one_commit()
            files, size = table.size()
            tables.append(
                SawTable(
                    name=declared.name,
                    role=role,
                    table_id=table.table_id,
                    version=table.version,
                    files=files,
                    size=size,
                    mode=declared.mode,
                )
            )
        return tables


def planning_snapshot(settings: Settings, stream: Stream, topics: TopicReader) -> PlanningSnapshot:
    """Take the snapshot; raises UsageError for a stream that has never run. Takes no lease and changes nothing."""
    record = stream_record.load(settings, stream.name)
    if record is None:
        raise UsageError(f"stream {stream.name} has never run", "there is nothing to recover")
    topics = Archives(settings).added_to(topics, stream)
    around = take_snapshot(settings, stream, topics)
    history = lineage(record.generations, ledger_file(settings, stream.name).days(stream.name))
    entry = next(t.entry for t in around.tables if t.role == "primary")
    ours = entry is not None and entry.kind in ("batch", "publish") and entry.generation == record.generation
    if entry is not None and ours and entry.batch >= 0 and history.find(entry.txn) is None:
        history.append(CommittedBatch.of(entry, time.time(), {}))
    return PlanningSnapshot(
        settings, stream, topics, record, around, history, savepoints.savepoints(settings, stream.name)
    )


def _saw(topic: TopicSnapshot) -> SawTopic:
    added = topic.archived
    archive, first = (added.name, dict(added.first)) if added is not None and added.bounds else ("", {})
    return SawTopic(
        topic.name,
        topic.topic_id or "",
        dict(topic.earliest),
        dict(topic.latest),
        archive,
        first,
        dict(topic.continues),
    )


def look_for_plan(settings: Settings, stream: Stream, reach: Callable[[], TopicReader]) -> PlanningSnapshot:
    """The planning snapshot of a stream; if no broker can be reached, with its topics as its files have them."""
    try:
        return planning_snapshot(settings, stream, reach())
    except BrokerUnreachable as error:
        record = stream_record.load(settings, stream.name)
        if record is None:
            raise
        reason = error
        snapshot = planning_snapshot(settings, stream, RememberedTopics(record, reason))
    topics = tuple(_up_to(topic, snapshot.history.position.get(topic.name, {})) for topic in snapshot.preflight.topics)
    note = (
        f"no broker answered ({reason.found}): how many records there are, and whether the topics still have all of "
        "those to replay, is looked up by `recover apply`"
    )
    return replace(snapshot, preflight=replace(snapshot.preflight, topics=topics), notes=(note,), unreachable=reason)


class RememberedTopics:
    """The topics as the stream's record has them; raises BrokerUnreachable for what only a broker knows."""

    def __init__(self, record: StreamRecord, error: BrokerUnreachable) -> None:
        self._record, self._error = record, error

    def describe(self, name: str) -> TopicInfo | None:
        bound = self._record.topic(name)
        return None if bound is None else TopicInfo(name, bound.topic_id, len(bound.start), -1, "delete")

    def offsets(self, name: str) -> OffsetBounds:
        """The offsets of the first start, as both ends."""
        bound = self._record.topic(name)
        starts = dict(bound.start) if bound else {}
        return OffsetBounds(starts, dict(starts))

    def latest(self, name: str) -> dict[int, int]:
        return self.offsets(name).latest

    def high_watermarks(self, name: str) -> dict[int, int]:
        return self.latest(name)

    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:  # noqa: ARG002
        """Raise BrokerUnreachable: only the broker knows."""
        raise only_the_broker(self._error, "which record has which time")

    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:  # noqa: ARG002
        return None


def only_the_broker(error: BrokerUnreachable, what: str) -> BrokerUnreachable:
    """The error for a question that the stream's files do not answer."""
    return BrokerUnreachable(
        f"only the broker knows {what}, and none can be reached: {error.found}",
        f"{error.next_step}; without it a plan can go back to a batch, a savepoint, code or a bad row",
    )


def _up_to(topic: TopicSnapshot, position: Mapping[int, int]) -> TopicSnapshot:
    earliest = {partition: topic.earliest.get(partition, 0) for partition in {*topic.earliest, *position}}
    return replace(topic, earliest=earliest, latest={p: position.get(p, first) for p, first in earliest.items()})
