"""What a stream has not read yet, by partition: how many records, and how old the first of them is.

It is computed from the checkpoint on disk and the topics as they are now, so it is right for a stream that runs, is
stopped, has failed or is catching up. The age is by the record's own timestamp, which may be years away from the time
at which it came (records of 2013 are); `lag.py` has the seconds that do not depend on timestamps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import structlog

from streaming_jobs.archives.declaration import is_archive
from streaming_jobs.errors import PreflightRefused, RecourseError
from streaming_jobs.platform.broker import bootstrap_servers
from streaming_jobs.positions import Place, TopicOffsets
from streaming_jobs.runtime.lag import EndOffsets, Ends, position_on_disk, source_ends
from streaming_jobs.settings import Settings
from streaming_jobs.sources.connection import client_config
from streaming_jobs.sources.first_records import first_timestamps
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges
from streaming_jobs.state import stream_record, topic_records
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.ends import end_names
from streaming_jobs.table_sources.table_topics import versions_of

log = structlog.get_logger()

_QUICK = timedelta(seconds=2)
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
        """All unread records."""
        return sum(each.records for each in self.partitions)

    @property
    def oldest(self) -> float | None:
        """The timestamp of the oldest one, of those that are first in their partition."""
        return min((each.oldest for each in self.partitions if each.oldest is not None), default=None)

    @property
    def oldest_age(self) -> float | None:
        """Its age in seconds; 0 if everything is read, None if it is not known."""
        if not self.records:
            return 0.0
        return None if self.oldest is None else max(self.at - self.oldest, 0.0)

    def as_json(self) -> dict[str, Any]:
        """The figures for programs."""
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
    positions = {stream.name: (stream, at) for stream in streams if (at := _position(settings, stream.name))}
    if not positions:
        return {}
    read = [stream for stream, _ in positions.values()]
    try:
        looking = EndOffsets(source_ends(settings, read, _QUICK), (name for s in read for name in end_names(s)))
        with_topics = any(stream.topics for stream in read)
        config = client_config(settings.kafka, bootstrap_servers(settings)) if with_topics else {}
    except RecourseError as error:
        log.info("the end of the topics could not be seen", reason=str(error)[:200])
        return {}
    looking.look()
    unread = {}
    for name, (stream, position) in positions.items():
        ends = looking.newest(end_names(stream))
        if ends is not None:
            void = _void(settings, stream)
            starts = behind(position, ends, void)
            tables = {table.name: versions_of(settings, stream, table.name) for table in stream.tables_read}
            of_topics = {place: at for place, at in starts.items() if place[0] not in tables}
            oldest = first_timestamps(config, of_topics, _QUICK.total_seconds())
            oldest |= {
                place: ms / 1000
                for place, start in starts.items()
                if place[0] in tables and (ms := tables[place[0]].time_of_next(start)) is not None
            }
            unread[name] = replace(unread_of(position, ends, oldest, void), tables=frozenset(tables))
    return unread


def behind(position: TopicOffsets, ends: Ends, void: Mapping[str, VoidRanges] | None = None) -> dict[Place, int]:
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


def _position(settings: Settings, stream: str) -> TopicOffsets | None:
    try:
        return position_on_disk(settings, stream)
    except PreflightRefused as error:  # its next start reports it
        log.info("the position of a stream cannot be read", stream=stream, reason=error.found)
        return None
