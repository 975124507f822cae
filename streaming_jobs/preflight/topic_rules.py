"""The rules about what a stream reads: its topics and tables, and the records that they still have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta

from streaming_jobs.ledger.entry import Txn
from streaming_jobs.ledger.positions import TopicOffsets, first_after
from streaming_jobs.preflight.findings import StartFinding
from streaming_jobs.preflight.snapshot import StreamSnapshot, TopicSnapshot
from streaming_jobs.sources.archived_ranges import gone
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
