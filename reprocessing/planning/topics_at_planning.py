"""The topics that a stream writes, as they are when its recovery is planned.

The log cleaner of a compacted topic removes a right record because of a later wrong one with its key, and a wrong one
because of its correction. So only a replay that writes every record anew ends with all keys, and what it has replaced
does not come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from reprocessing.planning.offline import only_the_broker
from reprocessing.planning.snapshot import PlanningSnapshot
from reprocessing.planning.wrong_records import (
    BEFORE_ALL,
    declared_since,
    first_written,
    start_of,
    topics_written,
    wrong_from,
)
from reprocessing.plans.plan import Base
from reprocessing.topics.groups import group_words
from reprocessing.topics.written_topics import GroupPosition, KafkaWrittenTopics, behind
from streaming_jobs.errors import TransientError, UsageError
from streaming_jobs.ledger.positions import TopicOffsets
from streaming_jobs.preflight.snapshot import is_compacted
from streaming_jobs.settings import Settings
from streaming_jobs.state import topic_records
from streaming_jobs.state.stream_record import Generation
from streaming_jobs.text import commands


@dataclass(frozen=True)
class WrittenAtPlanning:
    """By topic and partition, the first offset that becomes void, and the end; notes about others who read them."""

    wrong_from: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    ends: TopicOffsets = field(default_factory=dict)
    notes: tuple[str, ...] = ()


_EVERYTHING = (
    "everything that the stream has ever written to its topics becomes void, also what came from records before the "
    "target: these are not read again"
)
NOTHING_WRITTEN = WrittenAtPlanning()


def check_topic_sinks(snapshot: PlanningSnapshot, *, bounded: bool) -> None:
    """Raise for a stream that writes topics if their ends are not known, or if the recovery is bounded."""
    if not snapshot.stream.topic_sinks:
        return
    if snapshot.unreachable is not None:
        raise only_the_broker(snapshot.unreachable, "where the topics end that the stream writes")
    if bounded:
        name = snapshot.stream.name
        raise UsageError(
            f"stream {name} writes topics: corrected records come after all others, so its readers would have them "
            "twice",
            "plan without --until",
        )


@dataclass(frozen=True)
class CommittedOffsets:
    """The committed offsets of all consumer groups, asked for once for all streams of a plan, if at all."""

    settings: Settings

    @cached_property
    def found(self) -> Sequence[GroupPosition] | TransientError:
        """The offsets; an error if they cannot be had."""
        try:
            return KafkaWrittenTopics(self.settings).committed()
        except TransientError as error:
            return error


def written_topics(
    snapshot: PlanningSnapshot, start: Base, known: TopicOffsets | None, committed: CommittedOffsets, *, discards: bool
) -> WrittenAtPlanning:
    """The topics of a stream whose replay begins at `start`; `known` offsets are wrong in any case."""
    stream = snapshot.stream
    if not stream.topic_sinks:
        return NOTHING_WRITTEN
    settings, sinks = snapshot.settings, [sink.name for sink in stream.topic_sinks.values()]
    ids = {name: info.id for name in sinks if (info := snapshot.topics.describe(name)) is not None}
    firsts = first_written(settings, stream, snapshot.record, start, ids)
    names = topics_written(stream, {**firsts, **(known or {})})
    there = [name for name in names if name in ids or snapshot.topics.describe(name) is not None]
    ends = {name: snapshot.topics.latest(name) for name in there}
    records = [each for name in there if (each := topic_records.load(settings, name)) is not None]
    opened = Generation(snapshot.record.generation + 1, 0.0, "", start.generation, start.batch)
    earlier = declared_since(records, snapshot.record, start, opened)
    wrong = wrong_from(start, ends, firsts, known=[known or {}, earlier])
    notes = [
        *_compacted(snapshot, start, wrong, ends),
        *_groups(committed, wrong, ends),
        *([_EVERYTHING] if discards and start_of(start) == BEFORE_ALL else []),
    ]
    return WrittenAtPlanning(wrong, ends, tuple(notes))


def _compacted(snapshot: PlanningSnapshot, start: Base, wrong: TopicOffsets, ends: TopicOffsets) -> Iterator[str]:
    """Notes about compacted topics; raises UsageError if records that stay may have been removed from one."""
    for name, begins in wrong.items():
        info = snapshot.topics.describe(name)
        void = any(begin < ends[name][partition] for partition, begin in begins.items())
        if info is None or not is_compacted(info) or not void:
            continue
        if start_of(start) != BEFORE_ALL:
            stream = snapshot.stream.name
            raise UsageError(
                f"topic {name} of stream {stream} is compacted: its cleaner removes records before the replay's start "
                "because of wrong ones with the same key, and no replay from there brings them back",
                f"let stream {stream} write all its records anew, with the code that is right: "
                f"{commands.plan(stream, to_batch=-1)}",
            )
        yield (
            f"topic {name} is compacted: consumers that are not ours keep the wrong value of each key that the replay "
            "does not write again (send them a tombstone for such a key); once its cleaner has run, neither abort nor "
            "undo brings the replaced records back"
        )


def _groups(committed: CommittedOffsets, wrong: TopicOffsets, ends: TopicOffsets) -> Iterator[str]:
    """Notes about consumer groups that have read wrong records; they are not ours, since ours commit no offsets."""
    for name, begins in wrong.items():
        if read := {p: begin for p, begin in begins.items() if begin < ends[name][p]}:
            if isinstance(committed.found, TransientError):
                yield f"whether other consumers have read wrong records of {name} is not known: {committed.found.found}"
            else:
                yield from (group_words(group, begins, ends[name]) for group in behind(committed.found, name, read))
