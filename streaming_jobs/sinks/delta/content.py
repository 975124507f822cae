"""The content of one version of a Delta table as a value: its files. Two contents are the same if their files are.

A file is identified by device and inode: a hard link is the same file. So on the file system of the table, staging,
retaining and publishing a content copies no data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from deltalake import CommitProperties, DeltaTable, Schema

from streaming_jobs.platform.files import hard_link
from streaming_jobs.sinks.delta.log import STREAM_PROPERTY
from streaming_jobs.sinks.delta.table_files import TableFile, on_disk, table_files
from streaming_jobs.sinks.stored import Content


@dataclass(frozen=True)
class DeltaContent:
    """Files by their paths in the log, the folder that these paths are relative to, and the columns (Delta's JSON)."""

    files: Mapping[str, TableFile]
    root: Path
    schema: str
    partition_by: tuple[str, ...]

    @property
    def pieces(self) -> int:
        return len(self.files)

    def inodes(self) -> list[tuple[int, int]]:
        """Device and inode of each file on disk, in order."""
        return self._inodes

    @cached_property
    def _inodes(self) -> list[tuple[int, int]]:
        return inodes(self.root, self.files)

    def without(self, other: Content) -> DeltaContent:
        """Only the files that the other content lacks."""
        there = set(delta_content(other).inodes())
        left = {
            path: file
            for (path, file), place in zip(self.files.items(), self.inodes(), strict=True)
            if place not in there
        }
        return replace(self, files=left)


def delta_content(content: Content) -> DeltaContent:
    """A content as files; a table receives only contents of its store."""
    assert isinstance(content, DeltaContent)
    return content


def inodes(root: Path, files: Iterable[str]) -> list[tuple[int, int]]:
    """Device and inode of each file below a folder, in order."""
    return [((status := on_disk(root, path).stat()).st_dev, status.st_ino) for path in files]


def content_of(table: Path, version: int | None = None) -> DeltaContent:
    """The content of a version of a table (None: the newest)."""
    handle = DeltaTable(table, version=version)
    files = table_files(table, handle.version())
    return DeltaContent(files, table, handle.schema().to_json(), tuple(handle.metadata().partition_columns))


def has_content(table: Path, content: DeltaContent, version: int | None = None) -> bool:
    """True if a version of a table (None: the newest) consists of exactly these files."""
    number = DeltaTable(table).version() if version is None else version
    return sorted(inodes(table, table_files(table, number))) == sorted(content.inodes())


def make_table(path: Path, name: str, content: DeltaContent, stream: str, properties: CommitProperties) -> None:
    """Make a Delta table at `path` with the files of a content (hard links), in one commit with these properties."""
    handle = DeltaTable.create(
        path,
        Schema.from_json(content.schema),
        partition_by=list(content.partition_by) or None,
        name=name,
        configuration={STREAM_PROPERTY: stream},
        raise_if_key_not_exists=False,
    )
    for file in content.files.values():
        source = on_disk(content.root, file.path)
        hard_link(source, path / source.relative_to(content.root))
    handle.create_write_transaction(
        [file.add() for file in content.files.values()],
        mode="append",
        schema=handle.schema(),
        partition_by=list(content.partition_by) or None,
        commit_properties=properties,
    )
