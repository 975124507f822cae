"""The rules about what a stream reads: its topics and tables, and the records that they still have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta

from streaming_jobs.declare.topic_sink import TOPIC_SINK
from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import TopicOffsets, first_after
from streaming_jobs.preflight.findings import StartFinding
from streaming_jobs.preflight.snapshot import (
    CheckpointSnapshot,
    ShardsSnapshot,
    StreamSnapshot,
    TopicSinkSnapshot,
    TopicSnapshot,
)
from streaming_jobs.sources.archived_ranges import gone
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.table_sources.versions import gone_words
from streaming_jobs.text import commands
from streaming_jobs.text.durations import format_duration
from streaming_jobs.text.spelling import counted


def topic_findings(snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    """Findings for topics and tables that are gone, are others, or no longer have what the stream needs."""
    planned = snapshot.checkpoint.planned
    starts = snapshot.checkpoint.starts.get(planned, {}) if planned is not None else {}
    ends = snapshot.checkpoint.ends.get(planned, {}) if planned is not None else {}
    to_read = planned is not None and planned != snapshot.checkpoint.committed and _reads(snapshot, planned)
    position = starts if to_read else ends
    yield from other_topics(snapshot)
    for topic in snapshot.topics:
        if topic.topic_id is None:
            yield _missing(snapshot, topic)
            continue
        bound = snapshot.record.topic(topic.name) if snapshot.record else None
        if bound is not None and bound.topic_id != topic.topic_id:
            yield StartFinding(
                "lost",
                f"{topic.kind} {topic.name} was deleted and made anew: {_lost(position.get(topic.name, bound.start))} "
                f"of the old {topic.kind} can no longer be read",
                f"on the new {topic.kind}, {snapshot.start_over}",
            )
            continue
        if topic.content_gone is not None and to_read:
            yield _content_gone(snapshot, topic.name, topic.content_gone)
        for partition, end in _with_unread(topic, ends).items():
            offset = position.get(topic.name, {}).get(partition, 0)
            earliest, latest = topic.earliest.get(partition), topic.latest.get(partition)
            if earliest is None or latest is None:
                yield StartFinding("lost", f"partition {partition} of topic {topic.name} is gone", snapshot.start_over)
            elif (first := first_after(offset, partition, topic.earliest, topic.continues)) is not None:
                yield _gone(snapshot, topic, partition, offset, first, position)
            elif end > latest:
                yield StartFinding("lost", _ends_early(topic, partition, latest, end), _put_back(snapshot, topic))
        yield from _read_void(snapshot, topic)
        yield from _retention(topic)


def _read_void(snapshot: StreamSnapshot, topic: TopicSnapshot) -> Iterator[StartFinding]:
    """The finding for a stream that has read records which a recovery without it has declared void since."""
    committed = snapshot.checkpoint.committed
    ends = snapshot.checkpoint.ends.get(committed, {}) if committed is not None else {}
    at = ends.get(topic.name, {})
    read = [each for each in topic.void_since if each.begin < at.get(each.partition, 0)]
    if read:
        first = min(read, key=lambda each: (each.partition, each.begin))
        back = {
            name: {
                p: min([offset, *(each.begin for each in read if (name, p) == (topic.name, each.partition))])
                for p, offset in each_of.items()
            }
            for name, each_of in ends.items()
        }
        yield StartFinding(
            "refuse",
            f"plan {first.plan} has declared offsets {first.begin} to {first.end - 1} of topic {topic.name}, partition "
            f"{first.partition}, void, and stream {snapshot.stream}, which was not declared then, has read them up to "
            f"{at[first.partition] - 1}",
            f"go back to before them, and read the corrected records instead: {_to_offsets(snapshot, back)}",
        )


def _missing(snapshot: StreamSnapshot, topic: TopicSnapshot) -> StartFinding:
    begun = snapshot.record is not None and snapshot.record.topic(topic.name) is not None
    if topic.kind == "topic" and begun:
        return StartFinding(
            "unknown",
            f"topic {topic.name}, which stream {snapshot.stream} has read, does not exist",
            "check that kafka.bootstrap_servers names the right cluster; if the topic was deleted, "
            f"{snapshot.start_over}",
        )
    if topic.kind == "topic":
        return StartFinding(
            "refuse",
            f"topic {topic.name} does not exist",
            f"create it, or correct the name (stream {snapshot.stream})",
        )
    if snapshot.checkpoint.planned is None:
        return StartFinding(
            "await",
            f"table {topic.name}, which stream {snapshot.stream} reads, does not exist yet",
            "start the stream that writes it; or correct the name",
        )
    return StartFinding("refuse", f"table {topic.name}, which the stream reads, is gone", _put_back(snapshot, topic))


def _gone(
    snapshot: StreamSnapshot,
    topic: TopicSnapshot,
    partition: int,
    offset: int,
    first: int,
    position: Mapping[str, Mapping[int, int]],
) -> StartFinding:
    """The finding for the lost offsets, from `offset` on and before `first`."""
    if topic.kind == "table":
        rebuild = commands.plan(snapshot.stream, to_batch=-1)
        return StartFinding(
            "lost",
            f"{gone_words(topic.name, offset, first)} ({counted(first - offset, 'version')} never read)",
            f"rebuild the stream's tables from the table's present rows: {rebuild}; or continue without them: "
            f"{_skip_lost(snapshot, position)}",
        )
    return StartFinding(
        "lost",
        f"{gone(topic.archived, topic.name, partition, offset, first)} "
        f"({counted(first - offset, 'record')} {'read for its state' if _only_for_state(snapshot) else 'never read'})",
        f"bring them back from a copy of the topic, or {_without(snapshot, position)}",
    )


def _without(snapshot: StreamSnapshot, position: TopicOffsets) -> str:
    """The instruction to continue without lost records, with its cost."""
    if snapshot.checkpoint.committed is None:
        return f"as no batch was finished yet, begin with the first record that is left: {snapshot.start_over}"
    if _only_for_state(snapshot):
        return (
            "begin anew with empty state and empty tables at the first record that is left (readers have the present "
            "rows until that is published, and then only those of the records that are left; the savepoint from "
            f"before it keeps the others): {commands.plan(snapshot.stream, to_batch=-1, discard_state=True)}"
        )
    return f"continue without them: {_skip_lost(snapshot, position)}"


def _only_for_state(snapshot: StreamSnapshot) -> bool:
    """True if the tables have the planned batch, and it is read once more to compute the stream's state."""
    planned = snapshot.checkpoint.planned
    uncommitted = planned is not None and planned != snapshot.checkpoint.committed
    return _keeps_state(snapshot) and uncommitted and primary_has(snapshot, planned or 0)


def _reads(snapshot: StreamSnapshot, batch: int) -> bool:
    """True if the next start reads the records of a planned batch: for the tables, or for its state."""
    return _keeps_state(snapshot) or not primary_has(snapshot, batch)


def _keeps_state(snapshot: StreamSnapshot) -> bool:
    return snapshot.record is not None and bool(snapshot.record.state_fingerprint)


def _with_unread(topic: TopicSnapshot, offsets: TopicOffsets) -> dict[int, int]:
    """The offsets of a topic, including partitions that were added since, which are read from 0 on."""
    known = offsets.get(topic.name, {})
    return {**dict.fromkeys(topic.earliest, 0), **known} if known and topic.kind == "topic" else dict(known)


def _content_gone(snapshot: StreamSnapshot, table: str, version: int) -> StartFinding:
    """The finding for a planned batch that reads the content of a table at a version that is gone."""
    batch = snapshot.checkpoint.planned
    return StartFinding(
        "lost",
        f"batch {batch} reads the content of table {table} at version {version}, and it can no longer be read: its log "
        "or its files were cleaned up",
        f"no batch was committed, so nothing is lost: {snapshot.start_over}"
        if snapshot.checkpoint.committed is None
        else f"rebuild from the table's present rows: {commands.plan(snapshot.stream, to_batch=-1)}",
    )


def _ends_early(topic: TopicSnapshot, partition: int, latest: int, end: int) -> str:
    if topic.kind == "table":
        return (
            f"table {topic.name} ends at version {latest - 1}, the stream has read up to version {end - 1}: the table "
            "was put back to an older copy"
        )
    return (
        f"topic {topic.name}, partition {partition}, ends at offset {latest}, the stream is at {end}: offsets {latest} "
        f"to {end - 1} are gone"
    )


def _put_back(snapshot: StreamSnapshot, topic: TopicSnapshot) -> str:
    return f"put the {topic.kind} back, or {snapshot.start_over}"


def _skip_lost(snapshot: StreamSnapshot, position: Mapping[str, Mapping[int, int]]) -> str:
    """The command that skips lost records, to the first offset that a topic still has or the stream's position."""
    return _to_offsets(
        snapshot,
        {
            topic.name: {
                p: first_after(offset, p, topic.earliest, topic.continues) or offset
                for p, offset in _with_unread(topic, position).items()
            }
            for topic in snapshot.topics
        },
    )


def _to_offsets(snapshot: StreamSnapshot, offsets: TopicOffsets) -> str:
    """The command that lets the stream continue at offsets."""
    several = len(snapshot.topics) > 1
    places = [
        f"{topic + '/' if several else ''}{partition}:{offset}"
        for topic, each in offsets.items()
        for partition, offset in sorted(each.items())
    ]
    return commands.plan(snapshot.stream, to_offsets=",".join(places))


def other_topics(snapshot: StreamSnapshot) -> Iterator[StartFinding]:
    """Findings for other topics than the record's; before the first batch they may change: nothing was read yet."""
    if snapshot.record is None or snapshot.checkpoint.planned is None:
        return
    now, before = {t.name for t in snapshot.topics}, {t.name for t in snapshot.record.topics}
    for name in sorted(before - now):
        yield StartFinding(
            "refuse",
            f"stream {snapshot.stream} no longer reads topic {name}",
            "declare it again, or make it a new stream",
        )
    for name in sorted(now - before):
        yield StartFinding(
            "refuse",
            f"stream {snapshot.stream} would begin to read topic {name} after its first batch",
            "declare the topics it began with again, or make it a new stream",
        )


def primary_has(snapshot: StreamSnapshot, batch: int) -> bool:
    """True if the primary table has the batch, so that repeating it reads no records."""
    primary = next(t for t in snapshot.tables if t.role == "primary")
    return snapshot.record is not None and primary.txn == Txn(snapshot.record.generation, batch)


def _lost(position: Mapping[int, int]) -> str:
    return "everything after offsets " + ", ".join(f"{p}:{o}" for p, o in sorted(position.items()))


_SAFE_RETENTION = timedelta(days=3650)


def _retention(topic: TopicSnapshot) -> Iterator[StartFinding]:
    if 0 <= topic.retention_ms < _SAFE_RETENTION // timedelta(milliseconds=1):
        retention = format_duration(timedelta(milliseconds=topic.retention_ms))
        yield StartFinding(
            "warn",
            f"topic {topic.name} keeps records for {retention} counted from the time each record carries: records with "
            "older times vanish within minutes, read or not",
            "set retention.ms=-1 on the topic if its records carry times of the past",
        )


# The rules by which the topics that a stream writes must agree with its checkpoint and its primary table.
#
# 1. Each topic exists, its `min.insync.replicas` can be reached, and that of its marker topic.
# 2. The marker of an exactly-once topic is there, once the stream has begun: without it a batch may be written twice.
# 3. The marker is at the batch that the primary's newest entry lists for it, or at the planned batch.
# 4. The stream still writes the topics that it began with.


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
    if snapshot.external_known:
        yield from _no_longer_written(snapshot)


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
    expected = listed_at(snapshot, sink.name)
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
    if not is_possible(at, expected, generation, snapshot.checkpoint):
        yield StartFinding(
            "refuse",
            f"topic {sink.topic} is at {at}, but table {primary.name} says it should be at {expected or 'no batch'}",
            f"put the table and the checkpoint back that belong to the topic; or {snapshot.write_again(sink)}",
        )


def listed_at(snapshot: StreamSnapshot, sink: str) -> Txn | None:
    """The position that the primary table's newest entry lists for a sink; None if it lists none."""
    primary = next(t for t in snapshot.tables if t.role == "primary")
    listed = (primary.entry.txns if primary.entry else {}).get(sink)
    return None if listed is None else Txn.of(listed)


def is_possible(at: Txn, expected: Txn | None, generation: int, checkpoint: CheckpointSnapshot) -> bool:
    """True if a sink may be at this position: where the primary table expects it, newly opened, or one batch ahead."""
    opened = at == Txn(generation, -1) and (expected is None or expected.generation < generation)
    done = -1 if checkpoint.committed is None else checkpoint.committed
    planned = checkpoint.planned
    in_flight = planned is not None and planned > done and at == Txn(generation, planned)
    return at == expected or opened or in_flight


def _no_longer_written(snapshot: StreamSnapshot) -> Iterator[StartFinding]:
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
