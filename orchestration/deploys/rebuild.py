"""The recovery that rebuilds a stream's state from its records: the command, its cost, and what would be lost."""

from __future__ import annotations

from collections.abc import Iterator

from reprocessing.plan.replay_range import lost
from reprocessing.plan.snapshot import PlanningSnapshot, look_for_plan
from streaming_jobs.errors import RecourseError
from streaming_jobs.ledger.positions import first_after, offsets_between
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.settings import Settings
from streaming_jobs.sources.topics import Topics
from streaming_jobs.stream import Stream
from streaming_jobs.text import commands
from streaming_jobs.text.spelling import counted


def rebuild_words(settings: Settings, stream: Stream) -> Iterator[str]:
    """Yields the lines; only the command if the stream's files or the broker do not say more."""
    if stream.postgres_tables:
        yield f"rebuild the state: {stream.rebuild_step()}"
        return
    try:
        snapshot = look_for_plan(settings, stream, lambda: Topics.of(settings.kafka, bootstrap_servers(settings)))
        yield from words_of(snapshot)
    except RecourseError as error:
        yield f"rebuild the state: {commands.plan(stream.name, to_batch=-1)}"
        yield f"what that costs is not known: {error.found}"


def words_of(snapshot: PlanningSnapshot) -> Iterator[str]:
    name, starts = snapshot.stream.name, snapshot.record.starts
    topics = {topic.name: topic for topic in snapshot.preflight.topics}
    gone = lost(starts, topics)
    begins = {
        topic: {
            partition: first_after(offset, partition, topics[topic].earliest, topics[topic].continues) or offset
            for partition, offset in each.items()
        }
        for topic, each in starts.items()
        if topic in topics
    }
    records = offsets_between(begins, {topic.name: topic.latest for topic in topics.values()})
    pace = snapshot.history.pace()
    largest = snapshot.settings.for_stream(name).max_offsets_per_trigger
    time = f", about {records / pace.rate(records, largest):,.0f} s and Spark's start" if pace and records else ""
    cost = f"{counted(records, 'record')}{time}"
    if not gone:
        yield f"rebuild the state: {commands.plan(name, to_batch=-1)} ({cost})"
    else:
        yield f"the state cannot be rebuilt from all records: {gone}"
        for topic, each in begins.items():
            for partition, first in sorted(each.items()):
                if first > starts[topic][partition]:
                    yield (
                        f"lost would be {topic}/{partition}: offsets {starts[topic][partition]:,} to {first - 1:,}; "
                        f"totals begin at offset {first:,}"
                    )
        yield (
            f"rebuild it from the records that are left, and lose these: "
            f"{commands.plan(name, to_batch=-1, discard_state=True)} ({cost})"
        )
    yield from snapshot.notes
