"""Tables that a stream reads, as a reader of topics (`sources/base.py`) sees them: one partition, 0, of versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streaming_jobs.catalog.topology import Topology
from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.positions import OffsetBounds
from streaming_jobs.settings import Settings
from streaming_jobs.sources.base import TopicEnds, TopicInfo, TopicReader
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.storage.locations import delta_table
from streaming_jobs.stream import Stream
from streaming_jobs.table_sources.versions import TableVersions

POLICY = "versions"
"""The cleanup policy of a table among topics."""
_MEASURED = 20


def versions_of(settings: Settings, reader: Stream, table: str) -> TableVersions:
    """The versions of a table for a stream that reads it."""
    writer = Topology.load(settings.flows).writer(table)
    records = tuple(
        StreamFolder.of(settings, name).record for name in (writer.name if writer else None, reader.name) if name
    )
    return TableVersions(settings.tables / table, writer.name if writer else None, records)


@dataclass(frozen=True)
class TableTopics:
    """The topics of one stream, and the tables that it reads."""

    topics: TopicReader
    tables: Mapping[str, TableVersions]

    def describe(self, name: str) -> TopicInfo | None:
        """The table, by its id; None if it is not there."""
        return table_info(self.tables[name]) if name in self.tables else self.topics.describe(name)

    def latest(self, name: str) -> dict[int, int]:
        """The version after the newest one; raises UsageError if there is no table."""
        return self.end_of(self.tables[name]) if name in self.tables else self.topics.latest(name)

    def high_watermarks(self, name: str) -> dict[int, int]:
        """The same with the records of open transactions; a table has none."""
        return self.latest(name) if name in self.tables else self.topics.high_watermarks(name)

    @staticmethod
    def end_of(versions: TableVersions) -> dict[int, int]:
        """The version after the newest one, of partition 0."""
        return {0: _end(versions)}

    def offsets(self, name: str) -> OffsetBounds:
        """All versions can be read from 0 on, and from the first one that the log and its files still have."""
        if name not in self.tables:
            return self.topics.offsets(name)
        versions = self.tables[name]
        return OffsetBounds({0: 0}, {0: _end(versions)}, continues={0: versions.first()})

    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:
        """The first version whose commit is at or after `ms`, or the end; 0 if the log does not reach back to `ms`."""
        if name not in self.tables:
            return self.topics.offsets_for_time(name, ms)
        versions = self.tables[name]
        end = found = _end(versions)
        first = versions.first()
        for number in range(end - 1, first - 1, -1):
            if versions.time_of(number) < ms:
                return {0: found}
            found = number
        return {0: 0}

    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:
        """Bytes of an average version, of some from `starts` on; None without any."""
        if name not in self.tables:
            return self.topics.mean_size(name, starts)
        versions, start = self.tables[name], starts.get(0, 0)
        end = _end(versions)
        if start == 0:
            return versions.content(end - 1).size / end
        sizes = [version.size for version in versions.between(start, min(start + _MEASURED, end))]
        return sum(sizes) / len(sizes) if sizes else None


def table_info(versions: TableVersions) -> TopicInfo | None:
    """The table as a topic; None if it does not exist. Raises PreflightRefused if no stream can read the table."""
    from deltalake.exceptions import TableNotFoundError

    if versions.newest() is None:
        return None
    try:
        table = delta_table(versions.table)
        metadata, features = table.metadata(), table.protocol().reader_features or []
    except TableNotFoundError:
        return None
    if metadata.configuration.get("delta.columnMapping.mode", "none") != "none":
        raise PreflightRefused(
            f"table {versions.name} has column mapping, which a stream cannot read", "read a copy without it"
        )
    if "deletionVectors" in features:
        raise PreflightRefused(
            f"table {versions.name} has deletion vectors, which a stream cannot read",
            "let its writer remove them: delta.enableDeletionVectors=false, REORG TABLE ... APPLY (PURGE), then "
            "ALTER TABLE ... DROP FEATURE deletionVectors",
        )
    return TopicInfo(versions.name, str(metadata.id), 1, -1, POLICY)


def _end(versions: TableVersions) -> int:
    if (newest := versions.newest()) is None:
        raise UsageError(f"there is no table {versions.name} below {versions.table.parent}", "let its writer make it")
    return newest + 1


# The ends of what streams read: of topics at the broker, of tables in their logs.
#
# A session looks at the ends of all its streams. A topic and a table may have the same name, so a table's is
# `table:NAME` here; no topic's name has a colon.

TABLE = "table:"
"""Begins the name of a table among those of topics."""


def end_names(stream: Stream) -> list[str]:
    return [*(topic.name for topic in stream.topics), *(f"{TABLE}{table.name}" for table in stream.tables_read)]


@dataclass(frozen=True)
class SourceEnds:
    topics: TopicEnds
    tables: Mapping[str, TableVersions]

    @classmethod
    def of(cls, settings: Settings, topics: TopicEnds, streams: Iterable[Stream]) -> SourceEnds:
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
