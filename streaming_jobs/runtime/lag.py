"""The lag of a stream behind the end of its topics: in records, per partition, and in seconds.

    records     the end of each partition less the stream's position, summed up; records of open transactions count
    seconds     everything that was in the topics that long ago has been read; 0 at the end

Seconds need no record timestamps, which may be years away from now: the ends of the topics are remembered, with the
time, until the stream has read up to them. After a restart the count continues from the moment in the last status file.
For a stream that has never reached an end, it begins with the first look, so the figure is a lower bound; it is one too
after the clock was set back.

A session looks every two seconds in a separate thread (`EndOffsets`), so that the figure is fresh during a long batch
too. Without a driver, `lag_now` looks once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import structlog
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaException, Message, TopicPartition

from streaming_jobs.catalog.archive import is_archive
from streaming_jobs.declare.names import cluster_of, in_cluster, kafka_name
from streaming_jobs.errors import BrokerUnreachable, PreflightRefused, RecourseError
from streaming_jobs.ledger.positions import Place, TopicOffsets
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.preflight.snapshot import StreamSnapshot
from streaming_jobs.settings import Settings
from streaming_jobs.sources.base import TopicEnds
from streaming_jobs.sources.connection import NoBroker, client_config
from streaming_jobs.sources.topics import Topics
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges
from streaming_jobs.state import stream_record, topic_records
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.topics import TABLE, SourceEnds, end_names, versions_of

log = structlog.get_logger()

LOOK_EVERY = 2.0
_LOOKS = 200
_QUICK = timedelta(seconds=2)


@dataclass(frozen=True)
class Ends:
    """The ends of topics by partition; `at` (seconds since 1970) is just before the request to the broker.

    `open_since`: topic -> partition -> the offset at which a transaction is open, and when it was first seen there.
    """

    at: float
    offsets: TopicOffsets
    open_since: Mapping[str, Mapping[int, tuple[int, float]]] = field(default_factory=dict)

    def blocked(self, position: TopicOffsets) -> dict[str, dict[int, float]]:
        """The partitions that a stream has read up to an open transaction, and since when that has been open.

        Without transactions that only one sample has seen: the transactions of an active producer end soon.
        """
        waits = {
            topic: {
                p: since
                for p, (end, since) in each.items()
                if since < self.at and position.get(topic, {}).get(p, 0) >= end
            }
            for topic, each in self.open_since.items()
        }
        return {topic: each for topic, each in waits.items() if each}


@dataclass(frozen=True)
class StreamLag:
    """The lag of a stream at the time `at`; `partitions`: topic -> partition -> records."""

    at: float
    records: int
    seconds: float | None
    partitions: Mapping[str, Mapping[int, int]]
    read_up_to: float


@dataclass
class LagClock:
    """Computes lag from samples of the topics; `read_up_to` is the moment known from an earlier session."""

    read_up_to: float | None = None
    _looks: deque[Ends] = field(default_factory=deque)

    def measure(self, position: TopicOffsets, ends: Ends) -> StreamLag:
        """The lag at `ends.at` of a stream that has read up to `position`."""
        while self._looks and self._looks[-1].at > ends.at:  # seen before the clock was set back
            self._looks.pop()
        if self.read_up_to is not None:
            self.read_up_to = min(self.read_up_to, ends.at)
        # With a long lag, few looks are remembered: half a percent of the lag apart, so about a thousand for a day.
        apart = (ends.at - self._looks[0].at) / _LOOKS if self._looks else 0.0
        if not self._looks or ends.at - self._looks[-1].at > apart:
            self._looks.append(ends)
        while self._looks and not any(behind(position, self._looks[0].offsets).values()):
            self.read_up_to = max(self.read_up_to or 0.0, self._looks.popleft().at)
        if self.read_up_to is None:
            self.read_up_to = self._looks[0].at
        by_topic = {
            topic: {p: max(end - position.get(topic, {}).get(p, 0), 0) for p, end in each.items()}
            for topic, each in ends.offsets.items()
        }
        lag = lag_of(ends.at, by_topic, self.read_up_to)
        self.read_up_to = lag.read_up_to
        return lag


def lag_of(at: float, partitions: Mapping[str, Mapping[int, int]], read_up_to: float) -> StreamLag:
    """The lag at one moment, summed up; a stream at the end has read up to that moment."""
    records = sum(sum(each.values()) for each in partitions.values())
    known = read_up_to if records else max(at, read_up_to)
    return StreamLag(at, records, round(max(at - known, 0.0), 1), partitions, known)


def behind(position: TopicOffsets, ends: TopicOffsets) -> dict[tuple[str, int], int]:
    """Records between a position and an end, by topic and partition, where there are any."""
    each = {(t, p): end - position.get(t, {}).get(p, 0) for t, ends_of in ends.items() for p, end in ends_of.items()}
    return {place: count for place, count in each.items() if count > 0}


class EndOffsets:
    """Looks at the ends of topics at an interval in a thread, from `start` to `close`.

    If the broker does not answer, the thread continues, and the newest look gets older. Names of tables are as in
    `table_sources/topics.py`.
    """

    def __init__(self, topics: TopicEnds, names: Iterable[str], every: float = LOOK_EVERY) -> None:
        tables_first = sorted(set(names), key=lambda name: (not name.startswith(TABLE), name))
        self._topics, self._names, self._every = topics, tables_first, every
        self._seen: dict[str, tuple[float, dict[int, int]]] = {}
        self._open: dict[str, dict[int, tuple[int, float]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="end-offsets", daemon=True)
        self._away: set[str] = set()
        """The clusters that did not answer at the last look."""

    def start(self) -> EndOffsets:
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop looking. A request in progress ends within the deadline of the topics' client."""
        self._stop.set()

    def newest(self, names: Iterable[str]) -> Ends | None:
        """The newest look at these topics together; None before each of them was seen."""
        looks = {name: self._seen.get(name) for name in names}
        known = {name: seen for name, seen in looks.items() if seen is not None}
        if not known or len(known) < len(looks):
            return None
        return Ends(
            min(at for at, _ in known.values()),
            {name.removeprefix(TABLE): ends for name, (_, ends) in known.items()},
            {name: partitions for name in known if (partitions := self._open.get(name))},
        )

    def look(self) -> None:
        away: set[str] = set()
        for name in self._names:
            if (cluster := cluster_of(name)) in away:
                continue
            at = time.time()
            try:
                # In this order: only records of open transactions are before the first and behind the second.
                high = {} if name.startswith(TABLE) else self._topics.high_watermarks(name)
                stable = self._topics.latest(name)
                self._note_open(name, at, stable, high)
                self._seen[name] = (at, {p: max(end, high.get(p, end)) for p, end in stable.items()})
                self._away.discard(cluster)
            except Exception as error:  # noqa: BLE001 - the thread continues: the figure gets older, and shows its age
                if cluster not in self._away:
                    log.info("the end of a topic could not be seen", topic=name, reason=str(error)[:200])
                self._away.add(cluster)
                if isinstance(error, BrokerUnreachable):
                    away.add(cluster)
            if self._stop.is_set():
                return

    def _note_open(self, name: str, at: float, stable: Mapping[int, int], high: Mapping[int, int]) -> None:
        """Note which transactions are open; one that ends where the next begins moves the last stable offset."""
        before = self._open.get(name, {})
        self._open[name] = {
            p: before[p] if before.get(p, (None,))[0] == end else (end, at)
            for p, end in stable.items()
            if high.get(p, end) > end
        }

    def _run(self) -> None:
        while not self._stop.is_set():
            self.look()
            self._stop.wait(self._every)


def position_in(snapshot: StreamSnapshot) -> TopicOffsets | None:
    """The position from which the stream continues, from preflight's snapshot; None if only its start decides it."""
    checkpoint = snapshot.checkpoint
    if checkpoint.committed is not None:
        return checkpoint.ends[checkpoint.committed]
    if checkpoint.planned is not None:
        return checkpoint.starts[checkpoint.planned]
    return (snapshot.record.starts or None) if snapshot.record is not None else None


def position_on_disk(settings: Settings, stream: str) -> TopicOffsets | None:
    """The position from which a stream that does not run would continue; None if its files do not show it.

    Raises PreflightRefused when they are damaged.
    """
    record = stream_record.load(settings, stream)
    if record is None:
        return None
    checkpoint = StreamFolder.of(settings, stream).checkpoint(record.generation)
    if (committed := checkpoint.last_committed) is not None:
        return checkpoint.end(committed)
    if (planned := checkpoint.last_planned) is not None:
        return checkpoint.start(planned)
    return record.starts or None


@dataclass(frozen=True)
class _Look:
    """A stream that need not run, the position from which it would continue, and the ends of its topics now."""

    stream: Stream
    position: TopicOffsets
    ends: Ends


def _look_once(settings: Settings, streams: Iterable[Stream]) -> Iterator[_Look]:
    """Yields a look at each stream whose position and ends are known within two seconds."""
    positions = [(s, position) for s in streams if (position := _readable_position(settings, s.name)) is not None]
    if not positions:
        return
    read = [stream for stream, _ in positions]
    try:
        ends_of = source_ends(settings, read, _QUICK)
    except RecourseError as error:
        log.info("the end of the topics could not be seen", reason=str(error)[:200])
        return
    looking = EndOffsets(ends_of, (name for stream in read for name in end_names(stream)))
    looking.look()
    for stream, position in positions:
        if (ends := looking.newest(end_names(stream))) is not None:
            yield _Look(stream, position, ends)


def _readable_position(settings: Settings, stream: str) -> TopicOffsets | None:
    try:
        return position_on_disk(settings, stream)
    except PreflightRefused as error:  # its next start reports it
        log.info("the position of a stream cannot be read", stream=stream, reason=error.found)
        return None


def lag_now(settings: Settings, streams: Iterable[Stream], read_up_to: Mapping[str, float]) -> dict[str, StreamLag]:
    """The lag of streams without a driver, by name; without those whose lag is not known within two seconds.

    `read_up_to` is from the status file of each stream; without it the seconds of a lag are not known.
    """
    lags = {}
    for look in _look_once(settings, streams):
        before = read_up_to.get(look.stream.name)
        lag = LagClock(before).measure(look.position, look.ends)
        lags[look.stream.name] = lag if before is not None or not lag.records else replace(lag, seconds=None)
    return lags


def source_ends(settings: Settings, streams: Iterable[Stream], timeout: timedelta) -> SourceEnds:
    """The ends of what streams read; raises BrokerUnreachable if one of them reads a topic and no broker runs."""
    every = list(streams)
    topics: TopicEnds
    try:
        topics = Topics.of(settings.kafka, bootstrap_servers(settings), timeout)
    except BrokerUnreachable as error:
        if any(stream.topics for stream in every):
            raise
        topics = NoBroker(error)
    return SourceEnds.of(settings, topics, every)


# Timestamps of the first records from given offsets on: one record of each partition, within a deadline.

_FETCH = 64 * 1024
"""Bytes that are asked of a partition at once; a broker sends a larger first batch of records whole."""


def first_timestamps(config: Mapping[str, Any], starts: Mapping[Place, int], within: float) -> dict[Place, float]:
    """Timestamp (seconds since 1970) of the first committed record at or after an offset, by topic and partition.

    All are of one cluster. `within` is in seconds. Partitions without such a record, or without an answer in time,
    are missing. Offsets that are gone count from the first available offset.
    """
    found: dict[Place, float] = {}
    waiting = {(kafka_name(topic), partition): (topic, partition) for topic, partition in starts}
    if not waiting:
        return found
    ends_at = time.monotonic() + within
    consumer = Consumer(
        {
            **config,
            "group.id": "recourse-unread",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "max.partition.fetch.bytes": _FETCH,
            "queued.min.messages": 1,
            "fetch.wait.max.ms": 50,
        }
    )
    try:
        consumer.assign([TopicPartition(*there, starts[place]) for there, place in waiting.items()])
        while waiting and (left := ends_at - time.monotonic()) > 0:
            for message in consumer.consume(len(waiting), timeout=min(left, 0.2)):
                there = (str(message.topic()), int(message.partition() or 0))
                if (place := waiting.pop(there, None)) is None:
                    continue
                if (at := _timestamp(message)) is not None:
                    found[place] = at
                consumer.incremental_unassign([TopicPartition(*there)])
    except KafkaException as error:
        log.info("the first unread records could not be read", reason=str(error)[:200])
    finally:
        consumer.close()
    return found


def _timestamp(message: Message) -> float | None:
    """The record's timestamp; None at the end of a partition, for an error, and for a record without one."""
    if message.error() is not None:
        return None
    kind, ms = message.timestamp()
    return None if kind == TIMESTAMP_NOT_AVAILABLE else ms / 1000


# What a stream has not read yet, by partition: how many records, and how old the first of them is.
#
# It is computed from the checkpoint on disk and the topics as they are now, so it is right for a stream that runs,
# is stopped, has failed or is catching up. The age is by the record's own timestamp, which may be years away from
# the time at which it came (records of 2013 are); `lag.py` has the seconds that do not depend on timestamps.

MOST = 500
"""Partitions at most whose first unread record is read: those with the most unread records."""


@dataclass(frozen=True)
class PartitionLag:
    """One partition: the next offset to read, the end, and the timestamp of the first unread record (seconds).

    `oldest` is None if everything is read, or if the record could not be read in time. `void` offsets between both are
    never read.
    """

    topic: str
    partition: int
    position: int
    end: int
    oldest: float | None = None
    void: int = 0

    @property
    def records(self) -> int:
        """Records from the position to the end, without void ones; offsets of transaction markers count too."""
        return max(self.end - self.position - self.void, 0)


@dataclass(frozen=True)
class Unread:
    """The unread records of a stream at the time `at` (seconds since 1970), by partition in order."""

    at: float
    partitions: tuple[PartitionLag, ...]
    tables: frozenset[str] = frozenset()
    """The names in `topic` that are tables: their records are versions."""

    @property
    def unit(self) -> str:
        """The word for one of its `records`."""
        tables = {each.topic in self.tables for each in self.partitions}
        return "version" if tables == {True} else "offset" if True in tables else "record"

    @property
    def records(self) -> int:
        return sum(each.records for each in self.partitions)

    @property
    def oldest(self) -> float | None:
        """The oldest timestamp among the first records of the partitions."""
        return min((each.oldest for each in self.partitions if each.oldest is not None), default=None)

    @property
    def oldest_age(self) -> float | None:
        """Its age in seconds; 0 if everything is read, None if it is not known."""
        if not self.records:
            return 0.0
        return None if self.oldest is None else max(self.at - self.oldest, 0.0)

    def as_json(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "records": self.records,
            "unit": self.unit,
            "oldest_at": self.oldest,
            "oldest_age_s": None if self.oldest_age is None else round(self.oldest_age, 1),
            "partitions": [
                {
                    "topic": each.topic,
                    "partition": each.partition,
                    "position": each.position,
                    "end": each.end,
                    "records": each.records,
                    "oldest_at": each.oldest,
                }
                for each in self.partitions
            ],
        }


def unread_now(settings: Settings, streams: Iterable[Stream]) -> dict[str, Unread]:
    """What streams have not read, by name; those whose position or topics are not known within seconds are missing."""
    looks, unread = list(_look_once(settings, streams)), {}
    with_topics = any(look.stream.topics for look in looks)
    try:
        bootstrap = bootstrap_servers(settings) if with_topics else ""
    except BrokerUnreachable as error:  # it has ended since the look
        log.info("unread records are not known", reason=str(error))
        return {}
    for look in looks:
        void = _void(settings, look.stream)
        starts = unread_by_partition(look.position, look.ends, void)
        tables = {table.name: versions_of(settings, look.stream, table.name) for table in look.stream.tables_read}
        of_topics = {place: at for place, at in starts.items() if place[0] not in tables}
        oldest: dict[Place, float] = {}
        for cluster in {cluster_of(topic) for topic, _ in of_topics}:
            config = client_config(settings.kafka, bootstrap, in_cluster("", cluster))
            there = {place: at for place, at in of_topics.items() if cluster_of(place[0]) == cluster}
            oldest |= first_timestamps(config, there, _QUICK.total_seconds())
        oldest |= {
            place: ms / 1000
            for place, start in starts.items()
            if place[0] in tables and (ms := tables[place[0]].time_of_next(start)) is not None
        }
        of_stream = unread_of(look.position, look.ends, oldest, void)
        unread[look.stream.name] = replace(of_stream, tables=frozenset(tables))
    return unread


def unread_by_partition(
    position: TopicOffsets, ends: Ends, void: Mapping[str, VoidRanges] | None = None
) -> dict[Place, int]:
    """The first unread offset of each partition that has unread records, those with the most of them."""
    every = [each for each in unread_of(position, ends, {}, void).partitions if each.records]
    shown = sorted(every, key=lambda each: -each.records)[:MOST]
    ranges = void or {}
    return {
        (each.topic, each.partition): ranges.get(each.topic, NO_VOID).after({each.partition: each.position})[
            each.partition
        ]
        for each in shown
    }


def unread_of(
    position: TopicOffsets,
    ends: Ends,
    oldest: Mapping[Place, float],
    void: Mapping[str, VoidRanges] | None = None,
) -> Unread:
    """The unread records between a position and the ends of topics; `oldest` are timestamps of first unread ones.

    `void` ranges by topic are not counted.
    """
    ranges, partitions = void or {}, []
    for topic, each in sorted(ends.offsets.items()):
        for partition, end in sorted(each.items()):
            start = position.get(topic, {}).get(partition, 0)
            left_out = ranges.get(topic, NO_VOID).count({partition: (start, end)})
            partitions.append(PartitionLag(topic, partition, start, end, oldest.get((topic, partition)), left_out))
    return Unread(max(time.time(), ends.at), tuple(partitions))


def _void(settings: Settings, stream: Stream) -> dict[str, VoidRanges]:
    """By topic the void ranges that the stream does not read; an archive reads all."""
    if is_archive(stream):
        return {}
    try:
        bound = stream_record.load(settings, stream.name)
        known = {topic.name: topic_records.load(settings, topic.name) for topic in (bound.topics if bound else ())}
        ids = {topic.name: topic.topic_id for topic in (bound.topics if bound else ())}
        return {n: each.holding() for n, each in known.items() if each is not None and each.topic_id == ids[n]}
    except PreflightRefused as error:  # its next start reports it
        log.info("void ranges cannot be read", stream=stream.name, reason=error.found)
        return {}
