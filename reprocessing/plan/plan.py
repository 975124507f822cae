"""The plan of a recovery for each of its streams; frozen, and shown before it is applied.

The facts about a stream at planning are in `saw`; `moved` returns what is different now. Batches that the stream has
run since do not invalidate it: the replay reads to the topic's end anyway. `plan_file.py` writes and reads plans.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from streaming_jobs.ledger.entry import CodeVersion, Txn
from streaming_jobs.ledger.positions import TopicOffsets, first_after
from streaming_jobs.state.stream_record import Generation

PlanKind = Literal["rewind", "skip"]

BEFORE_ALL = Txn(0, -1)
"""The position before a stream's first batch."""


@dataclass(frozen=True)
class SawTable:
    """A table at planning: its id, version, live files and bytes, and the mode in which the stream writes it."""

    name: str
    role: Literal["primary", "secondary", "deletes", "quarantine", "late"]
    table_id: str
    version: int
    files: int
    size: int
    mode: Literal["append", "upsert"]


@dataclass(frozen=True)
class SawTopic:
    """A topic at planning, with its offsets by partition.

    With an archive, `earliest` is the first offset that can be read, there or in Kafka, and `first` Kafka's own. A
    table that the stream reads is one too: its offsets are versions, and it has `continues`, as in `OffsetBounds`.
    """

    name: str
    topic_id: str
    earliest: Mapping[int, int]
    latest: Mapping[int, int]
    archive: str = ""
    first: Mapping[int, int] = field(default_factory=dict)
    continues: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedAgainst:
    """The facts that the plan relies on. `code` is the version of the function that the replay will run."""

    generation: int
    batch: int
    code: CodeVersion
    tables: tuple[SawTable, ...]
    topics: tuple[SawTopic, ...]

    @property
    def txn(self) -> Txn:
        return Txn(self.generation, self.batch)


@dataclass(frozen=True)
class Base:
    """The start of the replay: a savepoint, or nothing (`savepoint` None: empty state, empty tables).

    In a plan that skips forward it is the position of the stream when the plan was made.
    """

    savepoint: str | None
    generation: int
    batch: int
    ends: TopicOffsets

    @property
    def after(self) -> Txn:
        """The last batch whose rows and records stay; without a savepoint everything is written anew."""
        return BEFORE_ALL if self.savepoint is None else Txn(self.generation, self.batch)


@dataclass(frozen=True)
class Until:
    """The last batch that a bounded recovery corrects: its position, its end, and the savepoint with its rows.

    `target` is the requested target as text.
    """

    savepoint: str
    generation: int
    batch: int
    ends: TopicOffsets
    target: str

    @property
    def txn(self) -> Txn:
        return Txn(self.generation, self.batch)


@dataclass(frozen=True)
class Checks:
    """The checks before publishing: SQL conditions for every row of the primary table, suites, and a bound on change.

    `max_changed` is the largest share of the published table's rows that may change, vanish or appear; None: any.
    `suites` are names of suites on the stream's tables, of which nothing critical may fail.
    """

    rules: tuple[str, ...] = ()
    max_changed: float | None = None
    suites: tuple[str, ...] = ()


NO_CHECKS = Checks()


@dataclass(frozen=True)
class StreamRecoveryPlan:
    """The plan for one stream; `id` is that of the recovery, which commits, savepoints and folders name.

    `rewind` replays from `base` and publishes the rebuilt rows; with `discards_state` the replay starts with the base's
    tables and empty state. `skip` moves forward: nothing is replayed, and records from `base.ends` to `wanted` are
    never read. With `until` the recovery is bounded: the replay ends with that batch, and later rows stay as they are.
    `staging` is the name of its folder of staging tables. `wrong_from` has for each topic that the stream writes, by
    partition, the first offset that becomes void; the replay appends the corrected records after the topic's end, which
    was at `ends_written` when the plan was made. Of the offsets to replay, `void` were void then. `wrong_versions` has
    for each table that a stream of the plan reads the first version whose rows the replay writes anew. `append_rate`
    are the records per second of the stream's last append of staged records; None without one.
    """

    id: str
    stream: str
    kind: PlanKind
    target: str
    wanted: TopicOffsets
    notes: tuple[str, ...]
    saw: PlannedAgainst
    base: Base
    stateful: bool
    rate: float | None
    record_bytes: float | None
    checks: Checks
    staging: str
    discards_state: bool = False
    until: Until | None = None
    wrong_from: TopicOffsets = field(default_factory=dict)
    ends_written: TopicOffsets = field(default_factory=dict)
    void: int = 0
    wrong_versions: Mapping[str, int] = field(default_factory=dict)
    append_rate: float | None = None

    @property
    def skips(self) -> bool:
        return self.kind == "skip"

    @property
    def target_words(self) -> str:
        return self.target if self.until is None else f"{self.target}, until batch {self.until.batch}"

    @property
    def generation(self) -> int:
        return self.saw.generation + 1

    @property
    def records(self) -> int:
        """Records to replay, counted when the plan was made, without void ones."""
        return sum(end - begin for _, _, begin, end in self.ranges()) - self.void

    @property
    def reads_tables(self) -> bool:
        return any(topic.continues for topic in self.saw.topics)

    @property
    def unit(self) -> str:
        """The word for one of its `records`: a table's offsets are versions."""
        tables = [bool(topic.continues) for topic in self.saw.topics]
        return "version" if tables and all(tables) else "offset" if any(tables) else "record"

    @property
    def size(self) -> float | None:
        """Bytes of keys and values to replay, estimated from records at its beginning; None if none could be read."""
        return None if self.record_bytes is None else self.records * self.record_bytes

    @property
    def seconds(self) -> float | None:
        """The expected duration of the replay in seconds, at the stream's pace so far; None if that is not known."""
        return self.records / self.rate if self.rate else None

    def ranges(self) -> Iterator[tuple[str, int, int, int]]:
        """Yields the ranges to replay: (topic, partition, first offset, offset after the last)."""
        for topic in () if self.skips else self.saw.topics:
            begins = self.base.ends.get(topic.name, {})
            ends = topic.latest if self.until is None else self.until.ends.get(topic.name, {})
            for partition, end in sorted(ends.items()):
                yield topic.name, partition, begins.get(partition, topic.earliest.get(partition, 0)), end

    def archived(self) -> Iterator[tuple[str, int, int, int]]:
        """Yields the parts of `ranges` that Kafka no longer had when the plan was made: an archive has them."""
        firsts = {(topic.name, p): first for topic in self.saw.topics for p, first in topic.first.items()}
        for topic, partition, begin, end in self.ranges():
            if begin < (until := min(end, firsts.get((topic, partition), 0))):
                yield topic, partition, begin, until

    def skipped(self) -> Iterator[tuple[str, int, int, int]]:
        """Yields the ranges never read, as of planning: (topic, partition, first offset, offset after the last)."""
        if not self.skips:
            return
        for topic in self.saw.topics:
            for partition, end in sorted(self.wanted[topic.name].items()):
                begin = self.base.ends.get(topic.name, {}).get(partition, topic.earliest.get(partition, 0))
                if end > begin:
                    yield topic.name, partition, begin, end


@dataclass(frozen=True)
class RecoveryPlan:
    """A recovery of one or more streams, in the order in which they are recovered. `undoes` is the plan it takes back.

    `made_at` in seconds since 1970. `left` are streams that have read the wrong records and stay as they are, as
    somebody has chosen. The fingerprint covers all of it.
    """

    id: str
    made_at: float
    streams: tuple[StreamRecoveryPlan, ...]
    undoes: str | None = None
    fingerprint: str = ""
    left: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.stream for each in self.streams)

    @property
    def target(self) -> str:
        return "; ".join(dict.fromkeys(each.target_words for each in self.streams))

    @property
    def skips(self) -> bool:
        """True if none of its streams is replayed."""
        return all(each.skips for each in self.streams)

    @property
    def records(self) -> int:
        """Records to replay, counted when the plan was made."""
        return sum(each.records for each in self.streams)

    @property
    def followed(self) -> tuple[StreamRecoveryPlan, ...]:
        """The streams whose replays can follow them while they run, in order.

        Streams that read tables are not among them, nor streams that read what the plan appends to topics: that is
        there once its writer has stopped.
        """
        return tuple(
            each for each in self.streams if not (each.skips or each.reads_tables or self.upstream(each.stream))
        )

    def upstream(self, stream: str) -> list[StreamRecoveryPlan]:
        """The plans for streams that append to topics, or write tables, which this one reads."""
        read = self.of(stream).saw.topics
        topics, tables = {t.name for t in read if not t.continues}, {t.name for t in read if t.continues}
        return [
            each
            for each in self.streams
            if topics.intersection(each.wrong_from) or tables.intersection(each.wrong_versions)
        ]

    def of(self, stream: str) -> StreamRecoveryPlan:
        """The plan for one stream; raises KeyError if the plan does not include the stream."""
        for each in self.streams:
            if each.stream == stream:
                return each
        raise KeyError(stream)


def opened_by(plan: StreamRecoveryPlan) -> Generation:
    origin = plan.base.generation if plan.base.savepoint else None
    return Generation(
        plan.generation, time.time(), f"recovery {plan.id}", origin, plan.base.batch, restarts=plan.discards_state
    )


def moved(plan: StreamRecoveryPlan, now: PlannedAgainst) -> list[str]:
    """The changes since planning that make the plan invalid, in words."""
    saw, changes = plan.saw, []
    if now.generation != saw.generation:
        changes.append(f"the stream is in generation {now.generation}, the plan was made in {saw.generation}")
    elif now.batch < saw.batch:
        changes.append(f"the stream is at batch {now.batch}, the plan saw batch {saw.batch}")
    if now.code != saw.code:
        changes.append(f"the code is {now.code}, the plan was made for {saw.code}")
    tables = {table.name: table for table in now.tables}
    for table in saw.tables:
        other = tables.get(table.name)
        if other is None or other.table_id != table.table_id:
            changes.append(f"table {table.name} is another table, or gone")
        elif other.version < table.version:
            changes.append(f"table {table.name} is at version {other.version}, the plan saw {table.version}")
    topics = {topic.name: topic for topic in now.topics}
    for topic in saw.topics:
        seen = topics.get(topic.name)
        if seen is None or seen.topic_id != topic.topic_id:
            changes.append(f"topic {topic.name} was deleted or made anew")
            continue
        if set(seen.latest) != set(topic.latest):
            changes.append(f"topic {topic.name} has {len(seen.latest)} partitions, the plan saw {len(topic.latest)}")
        needed = [(t, p, end) for t, p, _, end in plan.skipped()] or [(t, p, begin) for t, p, begin, _ in plan.ranges()]
        for name, partition, begin in needed:
            first = first_after(begin, partition, seen.earliest, seen.continues)
            if name == topic.name and first is not None:
                changes.append(f"offsets {begin} to {first - 1} of {name}, partition {partition}, are gone since")
    return changes
