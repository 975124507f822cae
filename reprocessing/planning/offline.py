"""Planning without a broker, from the stream's files alone.

They are enough for targets that are a batch of the stream. The plan's figures about the topics then come from the
record and the ledger; like every plan, it is compared with the topics when it is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from reprocessing.planning.snapshot import PlanningSnapshot, planning_snapshot
from streaming_jobs.errors import BrokerUnreachable
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.preflight.snapshot import TopicSnapshot
from streaming_jobs.settings import Settings
from streaming_jobs.sources.base import TopicReader
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state import stream_record
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream

OF_THE_STREAM = ("batch", "table-version", "savepoint", "code")
"""Targets that need no broker."""


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
    topics = tuple(_up_to(topic, snapshot.history.position.get(topic.name, {})) for topic in snapshot.around.topics)
    note = (
        f"no broker answered ({reason.found}): how many records there are, and whether the topics still have all of "
        "those to replay, is looked up by `recover apply`"
    )
    return replace(snapshot, around=replace(snapshot.around, topics=topics), notes=(note,), unreachable=reason)


class RememberedTopics:
    """The topics as the stream's record has them; raises BrokerUnreachable for what only a broker knows."""

    def __init__(self, record: StreamRecord, error: BrokerUnreachable) -> None:
        self._record, self._error = record, error

    def describe(self, name: str) -> TopicInfo | None:
        """The topic that the stream was bound to."""
        bound = self._record.topic(name)
        return None if bound is None else TopicInfo(name, bound.topic_id, len(bound.start), -1, "delete")

    def offsets(self, name: str) -> OffsetBounds:
        """The offsets of the first start, as both ends."""
        bound = self._record.topic(name)
        starts = dict(bound.start) if bound else {}
        return OffsetBounds(starts, dict(starts))

    def latest(self, name: str) -> dict[int, int]:
        """The offsets of the first start."""
        return self.offsets(name).latest

    def high_watermarks(self, name: str) -> dict[int, int]:
        """The offsets of the first start."""
        return self.latest(name)

    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:  # noqa: ARG002
        """Raise BrokerUnreachable: only the broker knows."""
        raise only_the_broker(self._error, "which record has which time")

    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:  # noqa: ARG002
        """Unknown."""
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
