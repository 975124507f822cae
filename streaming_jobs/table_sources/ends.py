"""The ends of what streams read: of topics at the broker, of tables in their logs.

A session looks at the ends of all its streams. A topic and a table may have the same name, so a table's is `table:NAME`
here; no topic's name has a colon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streaming_jobs.settings import Settings
from streaming_jobs.sources.base import TopicEnds
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.table_topics import TableTopics
from streaming_jobs.table_sources.versions import TableVersions

TABLE = "table:"
"""Begins the name of a table among those of topics."""


def end_names(stream: Stream) -> list[str]:
    """The names of what a stream reads."""
    return [*(topic.name for topic in stream.topics), *(f"{TABLE}{table.name}" for table in stream.tables_read)]


@dataclass(frozen=True)
class SourceEnds:
    """The ends of topics, and of tables."""

    topics: TopicEnds
    tables: Mapping[str, TableVersions]

    @classmethod
    def of(cls, settings: Settings, topics: TopicEnds, streams: Iterable[Stream]) -> SourceEnds:
        """Those of what the streams read."""
        names = {table.name for stream in streams for table in stream.tables_read}
        return cls(topics, {name: TableVersions(settings.tables / name) for name in names})

    def latest(self, name: str) -> dict[int, int]:
        """Next offset of every partition, or the version after a table's newest; raises UsageError without it."""
        if not name.startswith(TABLE):
            return self.topics.latest(name)
        return TableTopics.end_of(self.tables[name.removeprefix(TABLE)])

    def high_watermarks(self, name: str) -> dict[int, int]:
        """The same with the records of open transactions; a table has none."""
        return self.latest(name) if name.startswith(TABLE) else self.topics.high_watermarks(name)
