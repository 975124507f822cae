"""What a recovery does to the topics that its streams write: fence them, mark positions, see where they end.

A topic keeps its wrong records. The replay appends the corrected ones, in the stream's new generation, and the wrong
ones become a void range (`streaming_jobs/state/topic_records.py`).

A marker that is lost can be written again, if it can be proved which batches the topic has. The primary table's newest
entry lists the newest batch of the topic, and each record names its batch in its headers. If every record of the topic
is of another writer, or of a batch up to the listed one, the topic has exactly these batches: a batch that only the
topic has would be a later one, and its transaction is whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import structlog
from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
from confluent_kafka.admin import AdminClient

from streaming_jobs.declare.names import cluster_of, in_cluster
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import TransientError, UsageError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import PartitionOffsets, WrittenRange
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.kafka.clients import NO_LIMIT, ClientLost
from streaming_jobs.sinks.kafka.markers import ensure_marker_topic, marker_topic, read_marker, transactional_id
from streaming_jobs.sinks.kafka.sharded import ShardedWriter
from streaming_jobs.sinks.kafka.shards import read_shards
from streaming_jobs.sinks.kafka.staged import StagedBatch, StagedRecords
from streaming_jobs.sinks.kafka.writer import Clients, PlainWriter, Writer
from streaming_jobs.sinks.stored import entries
from streaming_jobs.sinks.tables import store_of
from streaming_jobs.sources.archived_ranges import read_ranges
from streaming_jobs.sources.base import Span
from streaming_jobs.sources.connection import client_config
from streaming_jobs.sources.range_reader import RangeReader
from streaming_jobs.sources.record_blocks import SourceRecords
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.lease import take
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands

_POLL = 0.1
_BEYOND_A_TRANSACTION = timedelta(seconds=20)
"""The broker looks for transactions past their timeout every ten seconds."""
_BLOCK = 10_000
_AT_ONCE = 100
"""Consumer groups that are asked about at the same time."""
IN_SHARDS = "in shards only"
"""The note of the newest batch, if the topic's own marker does not have it: some shards may lack it."""
_OWN = "recourse."


def group_words(group: GroupPosition, begins: PartitionOffsets, ends: PartitionOffsets) -> str:
    """As text: which wrong records of a partition a group has read, and where it gets their corrections.

    `begins` are the first wrong offsets, `ends` the offsets at which the corrected records begin.
    """
    begin, end = begins[group.partition], ends[group.partition]
    last = min(group.offset, end) - 1
    read = f"consumer group {group.group} has read {group.topic} partition {group.partition} to {group.offset - 1}"
    rest = "" if group.offset >= end else f"; {group.offset} to {end - 1} are wrong too: set its offset to {end}"
    return f"{read}: {begin} to {last} are wrong, and it gets their corrected records from {end} on{rest}"


log = structlog.get_logger()


NextMarker = Callable[[LedgerEntry | None], LedgerEntry]
"""What the marker shall say, made of the newest one."""


class GroupPosition(NamedTuple):
    """The committed offset of a consumer group in one partition: the next one that it reads."""

    group: str
    topic: str
    partition: int
    offset: int


def behind(committed: Iterable[GroupPosition], topic: str, begins: PartitionOffsets) -> list[GroupPosition]:
    """Those in these partitions of a topic that lie after `begins`."""
    return [
        each
        for each in committed
        if each.topic == topic and each.partition in begins and each.offset > begins[each.partition]
    ]


def _positions(group: str, asked: Any, timeout: float) -> list[GroupPosition]:
    """The offsets of one group; none, which is logged, if it cannot be described."""
    try:
        positions = asked.result(timeout).topic_partitions or ()
    except (KafkaException, TimeoutError) as error:
        log.warning("consumer group cannot be described", group=group, reason=str(error)[:200])
        return []
    return [GroupPosition(group, p.topic, p.partition, p.offset) for p in positions if p.error is None]


@dataclass(frozen=True)
class WrittenTopics:
    """Topics that streams write. Every call has a deadline, and raises BrokerUnreachable if no broker answers."""

    settings: Settings

    def topic_id(self, topic: str) -> str | None:
        """Kafka's id of a topic; None if there is none."""
        info = self._topics.describe(topic)
        return None if info is None else info.id

    def partitions(self, topic: str) -> int:
        """The number of a topic's partitions; 0 if there is none."""
        info = self._topics.describe(topic)
        return 0 if info is None else info.partitions

    def newest(self, stream: Stream, sink: KafkaSink) -> LedgerEntry | None:
        """The marker of the newest batch in the topic, also if only shards have it (`IN_SHARDS`); None without one."""
        prefix = self.settings.topic_sink.prefix
        name = marker_topic(prefix, stream.name, sink.name)
        if not sink.exactly_once or self._topics.describe(name) is None:
            return None
        key = transactional_id(prefix, stream.name, sink.name)
        try:
            config = self._config(sink.name)
            marker = read_marker(config, name, key, self.settings.kafka.of(sink.name).timeout)
            count, shards = 0 if marker is None else marker.shards, dict[int, LedgerEntry | None]()
            if count:
                shards |= read_shards(config, stream.name, sink.name, self.settings.topic_sink, count)
        except ClientLost as lost:
            raise TransientError(
                f"the markers of topic {sink.name} cannot be read: {lost}", "check the broker"
            ) from lost
        if marker is None:
            return None
        ahead = [
            replace(each, note=IN_SHARDS)
            for each in shards.values()
            if each is not None and each.txn > marker.entry.txn
        ]
        return max([marker.entry, *ahead], key=lambda each: each.txn)

    def fence(
        self, stream: Stream, sink: KafkaSink, generation: int, plan: str, position: Txn
    ) -> Sequence[WrittenRange]:
        """Open the generation for this plan alone: no older driver writes the topic from now on.

        Returns the ranges of a batch after the stream's position, which was written before a crash kept it from the
        tables. The marker of kind fence carries them on, so that fencing may be repeated.
        """
        if not sink.exactly_once:
            return ()
        fenced = LedgerEntry("fence", stream.name, sink.ledger_name, generation, -1, plan=plan)

        def entry(newest: LedgerEntry | None) -> LedgerEntry:
            if newest is None:
                return fenced
            if (newest.kind, newest.plan, newest.txn) == (fenced.kind, fenced.plan, fenced.txn):
                return newest
            if newest.generation >= generation:
                raise UsageError(
                    f"topic {sink.name} is in generation {newest.generation} already",
                    f"another recovery has written it: {commands.abort(plan)}",
                )
            return replace(fenced, written=_carried(newest, position))

        return self._marked(stream, sink, entry)

    def mark(self, stream: Stream, sink: KafkaSink, at: Txn, plan: str, position: Txn) -> Sequence[WrittenRange]:
        """Say that the topic has the stream's batches up to a position; older drivers write no more.

        Returns the same ranges as `fence`. A marker that is there already stays, with its ranges.
        """
        if not sink.exactly_once:
            return ()
        there = LedgerEntry("batch", stream.name, sink.ledger_name, at.generation, at.batch, plan=plan)

        def entry(newest: LedgerEntry | None) -> LedgerEntry:
            if newest is None or newest.txn == at:
                return newest or there
            return replace(there, written=_carried(newest, position))

        return self._marked(stream, sink, entry)

    @contextmanager
    def appending(self, stream: Stream, sink: KafkaSink, generation: int) -> Iterator[Writer]:
        """The writer of a topic in a generation; it fences older producers. Raises Fenced for a newer generation."""
        arguments = stream.name, sink.ledger_name, sink.name, self.settings.topic_sink, Clients(self._config(sink.name))
        writer: Writer = PlainWriter(*arguments)
        if sink.exactly_once:
            writer = ShardedWriter(*arguments, shards=sink.shards or 0)
        try:
            writer.open(generation)
            yield writer
        finally:
            writer.close()

    def records(self, batch: StagedBatch) -> StagedRecords:
        """Staged records for the writer of their topic; raises UsageError if one of the topics is gone."""
        ids, smallest = dict[str, str](), NO_LIMIT
        for name in sorted(batch.topics):
            if (info := self._topics.describe(name)) is None:
                raise UsageError(
                    f"topic {name} is gone, to which staged records of {batch.entry.txn} are to be appended",
                    "create it and resume, or give the plan up",
                )
            ids[name], smallest = info.id, min(smallest, info.max_message_bytes)
        return StagedRecords(batch, ids, smallest)

    def settled(self, topic: str) -> dict[int, int]:
        """The end of every partition, once no transaction is open; raises TransientError if one stays open."""
        patience = self.settings.topic_sink.transaction_timeout + _BEYOND_A_TRANSACTION
        until = time.monotonic() + patience.total_seconds()
        while True:
            stable, written = self._topics.latest(topic), self._topics.high_watermarks(topic)
            if stable == written:
                return stable
            if time.monotonic() > until:
                open_in = ", ".join(str(p) for p, end in written.items() if stable.get(p) != end)
                raise TransientError(
                    f"a transaction of another producer is open in topic {topic}, partition {open_in}",
                    "end that producer, or wait for its transaction.timeout.ms; then resume",
                )
            time.sleep(_POLL)

    def groups(self, topic: str, begins: PartitionOffsets) -> list[GroupPosition]:
        """The consumer groups that have committed an offset after `begins`, with it.

        Raises TransientError if groups cannot be listed, or are too many to be asked in time. Groups that may not be
        described are left out.
        """
        return behind(self.committed(cluster_of(topic)), topic, begins)

    def committed(self, cluster: str) -> list[GroupPosition]:
        """The committed offsets of all consumer groups of a cluster, from one request; raises TransientError."""
        of_cluster = in_cluster("", cluster)
        timeout = self.settings.kafka.of(of_cluster).timeout.total_seconds()
        until, admin, found = time.monotonic() + timeout, AdminClient(self._config(of_cluster)), list[GroupPosition]()
        try:
            listed = admin.list_consumer_groups(request_timeout=timeout).result(timeout).valid
        except (KafkaException, TimeoutError) as error:
            raise TransientError(f"consumer groups cannot be listed: {error}", "check the broker") from error
        shown = self.settings.kafka.group_prefix  # groups of streams, which a plan includes as streams
        names = [g.group_id for g in listed if not (shown and g.group_id.startswith(shown))]
        for number in range(0, len(names), _AT_ONCE):
            if time.monotonic() > until:
                raise TransientError(
                    f"{number} of {len(names)} consumer groups could be asked in time", "ask them by hand"
                )
            asked: dict[str, Any] = {}
            for name in sorted(names)[number : number + _AT_ONCE]:
                places = [ConsumerGroupTopicPartitions(name)]
                asked |= admin.list_consumer_group_offsets(places, request_timeout=timeout)
            for name, future in asked.items():
                found += _positions(name, future, timeout)
        return [each._replace(topic=in_cluster(each.topic, cluster)) for each in found]

    def blocks(self, topic: str, spans: Mapping[int, Span]) -> Iterator[SourceRecords]:
        """The committed records in ranges of offsets by partition, some thousands at a time."""
        reader = RangeReader(topic, self._config(topic), self.settings.kafka.of(topic).timeout)
        try:
            yield from read_ranges(reader, spans, _BLOCK)
        finally:
            reader.close()

    def _marked(self, stream: Stream, sink: KafkaSink, entry: NextMarker) -> Sequence[WrittenRange]:
        writer = ShardedWriter(
            stream.name, sink.ledger_name, sink.name, self.settings.topic_sink, Clients(self._config(sink.name))
        )
        try:
            return writer.mark_all(entry)
        finally:
            writer.close()

    @cached_property
    def _bootstrap(self) -> str:
        return bootstrap_servers(self.settings)

    def _config(self, topic: str) -> dict[str, Any]:
        return client_config(self.settings.kafka, self._bootstrap, topic)

    @cached_property
    def _topics(self) -> Topics:
        return Topics.of(self.settings.kafka, self._bootstrap)


def _carried(newest: LedgerEntry, position: Txn) -> tuple[WrittenRange, ...]:
    """The ranges of a batch after a position, from its own marker or from the fence's copy of that marker."""
    return newest.written if newest.txn > position or newest.kind == "fence" else ()


def write_markers(
    settings: Settings, stream: Stream, topics: WrittenTopics, reader: Topics
) -> Iterator[tuple[str, Txn]]:
    """Write each lost marker of the stream's topics again; yields the topics with the batch that they have.

    The stream has to be stopped. Raises UsageError if no marker is lost, or if one cannot be proved.
    """
    with take(settings, stream.name, purpose="write a marker again", wait=0):
        sinks = [each for each in stream.topic_sinks.values() if each.exactly_once]
        lost = [each for each in sinks if topics.newest(stream, each) is None]
        if not lost:
            raise UsageError(f"no marker of stream {stream.name} is lost", "there is nothing to write again")
        listed = entries(store_of(stream.primary).commits(settings, stream.primary), 1)
        for sink in lost:
            at = _listed(stream, sink, listed[0][1] if listed else None)
            earliest = reader.offsets(sink.name).earliest
            _prove(settings, stream, sink, topics, at, earliest)
            name = marker_topic(settings.topic_sink.prefix, stream.name, sink.name)
            ensure_marker_topic(reader, name, reader.describe(sink.name))
            topics.mark(stream, sink, at, "", at)
            yield sink.name, at


def _listed(stream: Stream, sink: KafkaSink, newest: LedgerEntry | None) -> Txn:
    """The newest batch of the topic by the primary table; raises UsageError without one, or if many topics have it."""
    number = None if newest is None else newest.txns.get(sink.ledger_name)
    if number is None:
        raise UsageError(
            f"table {stream.primary.name} lists no batch of topic {sink.name}", "declare the topic in a new stream"
        )
    if sink.route is not None or sink.shards is not None:
        raise UsageError(
            f"stream {stream.name} writes topic {sink.name} by route or in shards: more than one transaction, or more "
            "than one topic, would have to be proved",
            "put the marker topics back from a copy",
        )
    return Txn.of(number)


def _prove(
    settings: Settings, stream: Stream, sink: KafkaSink, topics: WrittenTopics, at: Txn, earliest: PartitionOffsets
) -> None:
    """Raise UsageError for a record that may be of a batch after a position."""
    ends = topics.settled(sink.name)
    known = _known_ends(settings, stream, sink.name, topics.topic_id(sink.name) or "", at)
    spans: dict[int, Span] = {p: (max(known.get(p, 0), earliest.get(p, 0)), end) for p, end in ends.items()}
    for records in topics.blocks(sink.name, {p: span for p, span in spans.items() if span[0] < span[1]}):
        columns = zip(*(records.column(name).to_pylist() for name in ("partition", "offset", "headers")), strict=True)
        for partition, offset, headers in columns:
            if _may_be_later({each["key"]: each["value"] for each in headers or ()}, stream.name, at):
                raise UsageError(
                    f"record {offset} of topic {sink.name}, partition {partition}, is or may be of a batch of stream "
                    f"{stream.name} after {at}, which table {stream.primary.name} does not have",
                    "put the marker topic back from a copy; what else there is, preflight says at the next start",
                )


def _known_ends(settings: Settings, stream: Stream, topic: str, topic_id: str, at: Txn) -> dict[int, int]:
    """By partition, the offset after the last record of batches up to a position, as far as the ledger reaches back."""
    ends: dict[int, int] = {}
    for day in ledger_file(settings, stream.name).days(stream.name):
        for line in day:
            for each in line.read().entry.written if line.txn <= at else ():
                if (each.topic, each.topic_id) == (topic, topic_id):
                    ends[each.partition] = max(each.end, ends.get(each.partition, 0))
    return ends


def _may_be_later(headers: Mapping[str, bytes | None], stream: str, at: Txn) -> bool:
    """True for a record of a later batch of the stream, and for a record that does not name its stream."""
    found = {name: headers.get(_OWN + name) for name in ("stream", "generation", "batch")}
    if found["stream"] is None or found["generation"] is None or found["batch"] is None:
        return True
    return found["stream"] == stream.encode() and Txn(int(found["generation"]), int(found["batch"])) > at
