"""The topics and tables that a stream reads, as it can read them.

With an archive, `earliest` of a topic is the first offset that can be read at all. So everything that plans with
a topic's offsets (preflight, the start of a stream, targets of a recovery, `moved`) knows the archive without
asking for it. A topic without an archive is as Kafka has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from streaming_jobs.catalog.archive import archive_of, is_archive
from streaming_jobs.catalog.topology import Topology
from streaming_jobs.ledger.positions import Archived, OffsetBounds
from streaming_jobs.settings import Settings
from streaming_jobs.sources.archived_ranges import readable_from
from streaming_jobs.sources.base import Archive, TopicInfo, TopicReader
from streaming_jobs.sources.void_ranges import NO_VOID, VoidRanges
from streaming_jobs.state import topic_records
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.topics import TableTopics, versions_of
from streaming_jobs.table_sources.versions import RebuiltRows, TableVersions


@dataclass(frozen=True)
class Archives:
    """The declared archives, with the folders of these settings; a replay has its stream's archives.

    `void` are ranges by topic that a recovery has declared void, `in_place` rows by table that it has rebuilt; neither
    is published yet.
    """

    settings: Settings
    void: Mapping[str, VoidRanges] | None = None
    in_place: Mapping[str, RebuiltRows] = field(default_factory=dict)

    def of(self, stream: Stream, topic: str, topic_id: str) -> Archive | None:
        """The archive from which a stream reads what Kafka no longer has of a topic; None without one.

        An archive itself reads from Kafka alone. Raises UsageError for a topic with several.
        """
        if (declared := self._declared(stream, topic)) is None:
            return None
        from streaming_jobs.table_sources.table_archive import TableArchive  # it needs Arrow, a start does without

        table = self.settings.tables / declared.primary.name
        return TableArchive(declared.name, topic, topic_id, table, StreamFolder.of(self.settings, declared.name).record)

    def void_of(self, stream: Stream, topic: str, topic_id: str) -> VoidRanges:
        """The offsets of a topic that the stream must not read; an archive copies them like all others."""
        if is_archive(stream):
            return NO_VOID
        if self.void is not None and topic in self.void:
            return self.void[topic]
        return topic_records.void_of(self.settings, topic, topic_id)

    def versions_of(self, stream: Stream, table: str) -> TableVersions:
        """The versions of a table that the stream reads."""
        return replace(versions_of(self.settings, stream, table), in_place=self.in_place.get(table))

    def added_to(self, topics: TopicReader, stream: Stream) -> TopicReader:
        """The topics and tables, as this stream can read them; the same topics if it has no archive and no table."""
        if stream.tables_read:
            read = {table.name: self.versions_of(stream, table.name) for table in stream.tables_read}
            topics = TableTopics(topics, read)
        if all(self._declared(stream, topic.name) is None for topic in stream.topics):
            return topics
        return ReadableTopics(topics, self, stream)

    def _declared(self, stream: Stream, topic: str) -> Stream | None:
        if is_archive(stream):
            return None
        return archive_of(topic, Topology.load(self.settings.flows).streams.values())


@dataclass(frozen=True)
class ReadableTopics:
    """The topics of one stream: in Kafka, and in their archives."""

    topics: TopicReader
    archives: Archives
    stream: Stream

    def describe(self, name: str) -> TopicInfo | None:
        return self.topics.describe(name)

    def latest(self, name: str) -> dict[int, int]:
        return self.topics.latest(name)

    def high_watermarks(self, name: str) -> dict[int, int]:
        return self.topics.high_watermarks(name)

    def offsets(self, name: str) -> OffsetBounds:
        """First and next offset of every partition, with what the archive adds."""
        kafka = self.topics.offsets(name)
        if (archive := self._archive(name)) is None:
            return kafka
        bounds = {p: span for p, span in archive.bounds().items() if p in kafka.earliest}
        added = Archived(archive.name, bounds, kafka.earliest)
        return OffsetBounds(readable_from(kafka.earliest, bounds), kafka.latest, added)

    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:
        """By partition the first offset whose record timestamp is at or after `ms`, or the end."""
        found, offsets = self.topics.offsets_for_time(name, ms), self.offsets(name)
        archive = self._archive(name)
        if archive is None or offsets.archived is None:
            return found
        first = offsets.archived.first
        spans = {p: (begin, first[p]) for p, begin in offsets.earliest.items() if begin < first[p]}
        return {**found, **archive.first_at(ms, spans)} if spans else found

    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:
        """Bytes of key and value of an average record from `starts` on; None if none could be read."""
        added, archive = self.offsets(name).archived, self._archive(name)
        old = {p: start for p, start in starts.items() if added is not None and start < added.first.get(p, 0)}
        if archive is not None and old and (size := archive.mean_size(old)) is not None:
            return size
        return self.topics.mean_size(name, starts)

    def _archive(self, name: str) -> Archive | None:
        if all(name != topic.name for topic in self.stream.topics):
            return None
        if (info := self.topics.describe(name)) is None:
            return None
        return self.archives.of(self.stream, name, info.id)
