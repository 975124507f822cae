"""The rules by which the topics that a stream writes must agree with its checkpoint and its primary table.

1. Each topic exists, its `min.insync.replicas` can be reached, and that of its marker topic.
2. The marker of an exactly-once topic is there, once the stream has begun: without it a batch may be written twice.
3. The marker is at the batch that the primary's newest entry lists for it, or at the planned batch.
4. The stream still writes the topics that it began with.
"""

from __future__ import annotations

from collections.abc import Iterator

from streaming_jobs.declare.topic_sink import TOPIC_SINK
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.preflight.findings import StartFinding
from streaming_jobs.preflight.snapshot import ShardsSnapshot, StreamSnapshot, TopicSinkSnapshot
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.text import commands

# The rules by which the shards of a topic sink must agree with its marker and the checkpoint.
#
# 1. Every shard that the sink's marker speaks of has a marker: without it, a part of a batch may be written twice.
# 2. A shard is ahead of the sink's marker only by the planned batch, of this generation; then the number of shards is
#    the declared one, too. A sink without a marker has no shard with a batch: such a marker is of a topic that is gone.


def topic_shards(sink: TopicSinkSnapshot, snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    """Findings about the shards of a topic that the stream writes."""
    for shards in sink.shards:
        yield from _of_one_number(shards, sink, snapshot)


def _of_one_number(shards: ShardsSnapshot, sink: TopicSinkSnapshot, snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    number = len(shards.newest)
    if shards.marked and (gone := sorted(shard for shard, marker in shards.newest.items() if marker is None)):
        yield StartFinding(
            "refuse",
            f"topic {shards.topic} lacks the markers of shards {', '.join(map(str, gone))}: nobody knows which "
            f"batches of stream {snapshot.stream} they have written to topic {sink.topic}",
            f"put the topic {shards.topic} back from a copy; or {snapshot.write_again(sink)}",
        )
        return
    at = None if sink.marker is None else sink.marker.txn
    entries = [marker for marker in shards.newest.values() if marker is not None and marker.batch >= 0]
    ahead = sorted({entry.txn for entry in entries if at is None or entry.txn > at})
    if not ahead:
        return
    planned = None
    if snapshot.record is not None and snapshot.checkpoint.planned is not None:
        planned = Txn(snapshot.record.generation, snapshot.checkpoint.planned)
    if ahead != [planned]:
        yield StartFinding(
            "refuse",
            f"shards of topic {sink.topic} have {', '.join(map(str, ahead))}, which is not the planned batch of stream "
            f"{snapshot.stream}, {planned or 'none'}",
            "put the checkpoint back that belongs to the topic"
            if shards.marked
            else f"put the checkpoint back that belongs to the topic; or delete topic {shards.topic}, if topic "
            f"{sink.topic} was deleted and made anew",
        )
    elif number != sink.declared_shards:
        yield StartFinding(
            "refuse",
            f"some of the {number} shards of topic {sink.topic} have {planned} and others do not; the sink "
            f"is declared with {sink.declared_shards or 'none'}",
            f"start the stream once with shards={number}: it finishes the batch",
        )


def topic_sinks(snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    for sink in snapshot.topic_sinks:
        yield from _topic(sink, snapshot.stream)
        if sink.exactly_once:
            yield from _marker(sink, snapshot)
            yield from topic_shards(sink, snapshot)
    if snapshot.topic_sinks_known:
        yield from _gone(snapshot)


def _topic(sink: TopicSinkSnapshot, stream: str) -> Iterator[StartFinding]:
    info = sink.info
    if info is None:
        yield StartFinding(
            "refuse" if sink.written_id is None else "unknown",
            f"topic {sink.topic}, which stream {stream} writes, does not exist",
            "create it, or correct the name",
        )
        return
    yield from _replicas(info)
    if sink.marker_info is not None:
        yield from _replicas(sink.marker_info)
        if sink.marker_info.replicas < info.replicas:
            yield StartFinding(
                "warn",
                f"topic {sink.marker_topic} has {sink.marker_info.replicas} replicas, topic {sink.topic} has "
                f"{info.replicas}: without its marker nobody knows which batches of stream {stream} the topic has",
                f"give topic {sink.marker_topic} as many replicas (kafka-reassign-partitions)",
            )
    if sink.acks != "all":
        yield StartFinding(
            "warn",
            f"topic {sink.topic} is written with acks={sink.acks}: records may be lost when a broker ends",
            "set topic_sink.acks=all",
        )
    if sink.written_id is not None and sink.written_id != info.id:
        yield StartFinding(
            "warn",
            f"topic {sink.topic} was deleted and made anew: what stream {stream} wrote to it before is gone",
            "rebuild it, if its readers need the old records",
        )


def _replicas(info: TopicInfo) -> Iterator[StartFinding]:
    if info.min_insync_replicas > info.replicas:
        yield StartFinding(
            "refuse",
            f"topic {info.name} has {info.replicas} replicas and min.insync.replicas={info.min_insync_replicas}: no "
            "record can be acknowledged by all",
            "lower min.insync.replicas of the topic, or give it more replicas",
        )
    elif info.replicas > 1 and info.min_insync_replicas == 1:
        yield StartFinding(
            "warn",
            f"topic {info.name} has {info.replicas} replicas and min.insync.replicas=1: an acknowledged record "
            "is lost with the one broker that has it",
            "set min.insync.replicas=2 on the topic",
        )


def _marker(sink: TopicSinkSnapshot, snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    if snapshot.record is None:
        if sink.marker is not None and sink.marker.txn.batch >= 0:
            yield StartFinding(
                "refuse",
                f"topic {sink.topic} has records of stream {snapshot.stream} up to {sink.marker.txn}, but the stream's "
                "record is gone",
                f"put the state folder and the tables back from the newest copy; or {snapshot.write_again(sink)}",
            )
        return
    generation, planned = snapshot.record.generation, snapshot.checkpoint.planned
    primary = next(t for t in snapshot.tables if t.role == "primary")
    listed = (primary.entry.txns if primary.entry else {}).get(sink.name)
    expected = None if listed is None else Txn.of(listed)
    at = None if sink.marker is None else sink.marker.txn
    if at is None:
        if planned is None and expected is None:
            return
        lost = expected is not None
        yield StartFinding(
            "refuse",
            f"the marker of topic {sink.topic} is {'gone' if lost else 'missing'}: nobody knows which batches of "
            f"stream {snapshot.stream} the topic has",
            "let it be proved from table, ledger and topic, and written again: "
            f"{commands.write_marker(snapshot.stream)}; or put the topic {sink.marker_topic} back from a copy; or "
            f"{snapshot.write_again(sink)}"
            if lost
            else "declare the topic as a sink of a new stream; or take it out of the declaration",
        )
        return
    if at.generation > generation:
        yield StartFinding(
            "refuse",
            f"topic {sink.topic} is in generation {at.generation}, the stream's state in {generation}: the state "
            "folder is an old copy",
            "put the state folder back from the newest copy",
        )
        return
    opened = at == Txn(generation, -1) and (expected is None or expected.generation < generation)
    done = -1 if snapshot.checkpoint.committed is None else snapshot.checkpoint.committed
    in_flight = planned is not None and planned > done and at == Txn(generation, planned)
    if not (at == expected or opened or in_flight):
        yield StartFinding(
            "refuse",
            f"topic {sink.topic} is at {at}, but table {primary.name} says it should be at {expected or 'no batch'}",
            f"put the table and the checkpoint back that belong to the topic; or {snapshot.write_again(sink)}",
        )


def _gone(snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    primary = next((t for t in snapshot.tables if t.role == "primary"), None)
    listed = primary.entry.txns if primary is not None and primary.entry is not None else {}
    declared = {sink.name for sink in snapshot.topic_sinks if sink.exactly_once}
    for name in sorted(listed.keys() - declared):
        if name.startswith(TOPIC_SINK):
            yield StartFinding(
                "refuse",
                f"stream {snapshot.stream} no longer writes topic {name.removeprefix(TOPIC_SINK)} exactly once",
                "declare the sink again as it was, or make it a new stream",
            )
