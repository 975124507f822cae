"""The sources of a stream for its batches: topics with their archives, and tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from streaming_jobs.archives.readable_topics import Archives
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sources.kafka import KafkaSource
from streaming_jobs.stream import KafkaTopic, Stream
from streaming_jobs.table_sources.source import TableSource
from streaming_jobs.table_sources.table_topics import versions_of


def sources_of(
    stream: Stream, own: StreamSettings, client: Path, archives: Archives, topic_ids: Mapping[str, str]
) -> list[KafkaSource | TableSource]:
    """The sources in the order of their declaration; `client` is the file with the properties of Kafka's client.

    Tables and archives lie in the folders of `archives`, also if a replay writes elsewhere.
    """
    made: list[KafkaSource | TableSource] = []
    for parameter, source in stream.sources.items():
        lateness = own.lateness if own.lateness is not None else source.delay  # zero is a lateness too
        if isinstance(source, KafkaTopic):
            topic_id = topic_ids.get(source.name, "")
            archive, void = archives.of(stream, source.name, topic_id), archives.void_of(stream, source.name, topic_id)
            made.append(KafkaSource(parameter, source, client, lateness, archive, void))
        else:
            versions = versions_of(archives.settings, stream, source.name)
            made.append(TableSource(parameter, source, versions, lateness, client))
    return made
