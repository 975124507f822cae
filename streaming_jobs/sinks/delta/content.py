"""The content of one version of a Delta table as a value: its files. Two contents are the same if their files are.

On a file system a file is identified by device and inode: a hard link is the same file. So staging, retaining and
publishing a content copies no data there.

On a store a file is identified by its URL, and a table may list files of another one by their URLs. So a staged table
shares the files of the table that it is staged for, and lies below it, so that its own files become files of that one
where they are. Some files have to be copied for it, to `_copied/<key of the original>`; such a copy is the same file
as its original: those of a table that is merged into, since deltalake rewrites no file outside of the table, and those
whose keys need an escape in a URL (partition values with a space, say), since deltalake escapes these twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.transaction import AddAction

from streaming_jobs.sinks.delta.log import STREAM_PROPERTY
from streaming_jobs.sinks.delta.table_files import TableFile, on_disk, table_files
from streaming_jobs.sinks.stored import Content
from streaming_jobs.storage.files import hard_link
from streaming_jobs.storage.locations import Location, StorePath, copy_objects, delta_options, delta_table, path_below

Identity: TypeAlias = tuple[int, int] | str
"""What identifies a file: device and inode, or its URL."""

COPIED = "_copied/"
"""The folder of a staged table on a store with copies of the other table's files."""
_PLAIN = re.compile(r"[A-Za-z0-9_./=-]*")


@dataclass(frozen=True)
class DeltaContent:
    """Files by their paths in the log, the folder that these paths are relative to, and the columns (Delta's JSON)."""

    files: Mapping[str, TableFile]
    root: Location
    schema: str
    partition_by: tuple[str, ...]

    @property
    def pieces(self) -> int:
        return len(self.files)

    def identities(self) -> list[Identity]:
        """The identity of each file, in order."""
        return self._identities

    @cached_property
    def _identities(self) -> list[Identity]:
        return identities(self.root, self.files)

    def without(self, other: Content) -> DeltaContent:
        """Only the files that the other content lacks."""
        there = set(delta_content(other).identities())
        left = {
            path: file
            for (path, file), place in zip(self.files.items(), self.identities(), strict=True)
            if place not in there
        }
        return replace(self, files=left)


def delta_content(content: Content) -> DeltaContent:
    """A content as files; a table receives only contents of its store."""
    assert isinstance(content, DeltaContent)
    return content


def identities(root: Location, files: Iterable[str]) -> list[Identity]:
    """The identity of each file of a table, in order."""
    return [_identity(on_disk(root, path), root) for path in files]


def _identity(place: Location, root: Location) -> Identity:
    if isinstance(place, Path):
        return (status := place.stat()).st_dev, status.st_ino
    below = path_below(place, root)
    return f"{place.bucket}/{below.removeprefix(COPIED)}" if below.startswith(COPIED) else place.url


def content_of(table: Location, version: int | None = None) -> DeltaContent:
    """The content of a version of a table (None: the newest)."""
    handle = delta_table(table, version)
    files = table_files(table, handle.version())
    return DeltaContent(files, table, handle.schema().to_json(), tuple(handle.metadata().partition_columns))


def has_content(table: Location, content: DeltaContent, version: int | None = None) -> bool:
    """True if a version of a table (None: the newest) consists of exactly these files."""
    number = delta_table(table).version() if version is None else version
    return sorted(identities(table, table_files(table, number))) == sorted(content.identities())


def make_table(
    path: Location,
    name: str,
    content: DeltaContent,
    stream: str,
    properties: CommitProperties,
    *,
    rewritten: bool = False,
) -> None:
    """Make a Delta table at `path`, and in its second commit, with these properties, add the files of a content.

    The files are hard links; on a store the same files, or copies if they are to be `rewritten`.
    """
    handle = DeltaTable.create(
        str(path),
        Schema.from_json(content.schema),
        partition_by=list(content.partition_by) or None,
        name=name,
        configuration={STREAM_PROPERTY: stream},
        raise_if_key_not_exists=False,
        storage_options=delta_options(path),
    )
    handle.create_write_transaction(
        [*(linked(path, content) if isinstance(path, Path) else shared(path, content, copied=rewritten))],
        mode="append",
        schema=handle.schema(),
        partition_by=list(content.partition_by) or None,
        commit_properties=properties,
    )


def linked(path: Path, content: DeltaContent, *, below: str = "") -> list[AddAction]:
    """Link the content's files `below` the table's folder; returns the actions that add them."""
    adds = []
    for file in content.files.values():
        source = on_disk(content.root, file.path)
        assert isinstance(source, Path)
        name = f"{below}{path_below(source, content.root)}"
        hard_link(source, path / name)
        adds.append(file.add(name))
    return adds


def shared(path: StorePath, content: DeltaContent, *, copied: bool = False) -> list[AddAction]:
    """The actions that add the content's files where they lie, or copies of them."""
    originals = [StorePath(str(identity), path.options) for identity in content.identities()]
    copies = {each: f"{COPIED}{each.key}" for each in originals if copied or not _PLAIN.fullmatch(each.key)}
    copy_objects(StorePath(path.bucket, path.options), path / COPIED, [each.key for each in copies])
    return [
        file.add(copies.get(original, original.url))
        for original, file in zip(originals, content.files.values(), strict=True)
    ]
