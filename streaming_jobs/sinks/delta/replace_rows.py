"""The one commit that replaces the rows of a Delta table: files that the table has stay, others are hard-linked.

It is made through `DeltaSink.commit`, so repeating it changes nothing, and it is refused if another writer has changed
rows of the table. Each attempt compares the content with the version that it is committed to: another program may have
compacted the table since the attempt before.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from deltalake import CommitProperties, DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from streaming_jobs.errors import CommitRefused, PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.sinks.delta import column_bounds
from streaming_jobs.sinks.delta.content import DeltaContent, Identity, has_content, identities
from streaming_jobs.sinks.delta.log import walk
from streaming_jobs.sinks.delta.table_files import TableFile, on_disk, table_files
from streaming_jobs.sinks.stored import Replaced, committed_as
from streaming_jobs.storage.files import sync
from streaming_jobs.storage.locations import StorePath, files_below, path_below, placed

if TYPE_CHECKING:
    from streaming_jobs.sinks.delta.sink import DeltaSink

_ANY_GENERATION = 0
"""The generation in the entries of changes before the commit itself: they do not depend on it."""


def replace_rows(
    sink: DeltaSink, content: DeltaContent, entry: LedgerEntry, place: str, new: DeltaContent | None = None
) -> Replaced:
    """Replace the table's rows by the content; files that are new to the table go into its folder `place`.

    The entry names those of them that are in `new`, if it is given.
    """
    sink.widen(content.schema, _ANY_GENERATION)
    _narrow(sink, content)
    unread = None if new is None else set(new.identities())
    made = Replaced(None, 0, 0, 0, 0.0)

    def done(entry: LedgerEntry) -> bool:
        return sink.holds(entry) and _published(sink, content, entry)

    def write(_: DeltaTable, __: CommitProperties) -> None:
        nonlocal made
        rename_unencoded(sink, entry.generation)
        change = _change(sink, content, place)
        began = time.monotonic()
        sink.commit_actions([*change.removes, *change.adds], sink.properties(_naming(sink, change, entry, unread)))
        seconds = round(time.monotonic() - began, 3)
        made = Replaced(None, len(change.adds), len(change.removes), change.stayed, seconds)

    version = sink.commit(entry, write, done)
    return replace(made, version=version)


@dataclass(frozen=True)
class _Change:
    """The actions that make a content of the rows of the table's newest version, and the paths added, by identity."""

    adds: tuple[AddAction, ...]
    removes: tuple[RemoveAction, ...]
    names: Mapping[Identity, str]
    stayed: int


def _change(sink: DeltaSink, content: DeltaContent, place: str) -> _Change:
    """Compare the content with the version that is committed to, and link the files that the table lacks."""
    live = table_files(sink.path, sink.handle.version())
    here = dict(zip(identities(sink.path, live), live, strict=True))
    wanted = dict(zip(content.identities(), content.files.items(), strict=True))
    names, adds = {}, []
    there = frozenset(name for name, _ in files_below(sink.path)) if isinstance(sink.path, StorePath) else None
    for identity in wanted.keys() - here.keys():
        path, file = wanted[identity]
        names[identity] = name = _name(sink, content, path, identity, place)
        if there is not None and name not in there:
            raise PreflightRefused(
                f"file {name} of table {sink.name} is gone", "put it back from a copy, or choose a savepoint"
            )
        adds.append(file.add(name))
    at = int(time.time() * 1000)
    removes = tuple(live[path].remove(at) for identity, path in here.items() if identity not in wanted)
    return _Change(tuple(adds), removes, names, len(here) - len(removes))


def _name(sink: DeltaSink, content: DeltaContent, path: str, identity: Identity, place: str) -> str:
    """The path below the table of a file that comes.

    On a store it lies below the table already: staged there, or once a file of the table that a savepoint has kept.
    """
    if isinstance(identity, str):
        return StorePath(identity).relative_to(sink.path).as_posix()
    source = on_disk(content.root, path)
    name = f"{place}/{path_below(source, content.root)}"
    placed(source, sink.path / name)
    return name


def _published(sink: DeltaSink, content: DeltaContent, entry: LedgerEntry) -> bool:
    """True if the table's commit with the entry has left the content."""
    commit = committed_as(walk(sink.path), entry)
    try:
        return commit is not None and has_content(sink.path, content, commit.version)
    except PreflightRefused:  # its files were compacted and vacuumed since, or its log was cleaned up
        return False


def _naming(sink: DeltaSink, change: _Change, entry: LedgerEntry, unread: set[Identity] | None) -> LedgerEntry:
    """The entry with the added files that are unread; those of an earlier commit with it have been shown to readers."""
    if unread is None:
        return entry
    earlier = committed_as(walk(sink.path), entry)
    shown = set(earlier.entry.new or ()) if earlier is not None and earlier.entry is not None else set()
    named = (name for identity, name in change.names.items() if identity in unread and name not in shown)
    return replace(entry, new=tuple(sorted(named)))


def _narrow(sink: DeltaSink, content: DeltaContent) -> None:
    """Remove columns from the table's list of bounded ones if a file lacks their bounds, as older files may."""
    statistics = (json.loads(file.stats or "{}") for file in content.files.values())
    bounded = column_bounds.bounded_in(statistics, sink.bounded)
    if bounded != sink.bounded:
        sink.set_properties({column_bounds.PROPERTY: column_bounds.encode(bounded)}, _ANY_GENERATION)


# Files of a partitioned table whose paths are in the log unencoded, as delta-spark writes text that is not ASCII.
#
# deltalake percent-encodes the path when it removes such a file. Every reader takes that for the removal of another
# file: the old one stays in the table, with its rows a second time. New files do not get such paths (the property
# `delta.randomizeFilePrefixes`); older ones are renamed here, before deltalake removes them.

RENAMED = "renamed"


def rename_unencoded(sink: DeltaSink, generation: int) -> int:
    """Give the live files with such paths a second name (a hard link), and list them under it; returns their number.

    One commit that changes no rows. It is written here because deltalake cannot express the removal of such a path.
    Raises CommitRefused, with nothing changed, if another writer's commit comes first.
    """
    if not isinstance(sink.path, Path):  # delta-spark never writes there
        return 0
    paths = sink.handle.get_add_actions()["path"].to_pylist()
    if all(path.isascii() for path in paths):  # deltalake shows some of the encoded ones decoded
        return 0
    version = sink.handle.version()
    raw = [file for path, file in table_files(sink.path, version).items() if not path.isascii()]
    if not raw:
        return 0
    note = f"renamed {len(raw)} files whose paths were not encoded"
    entry = LedgerEntry("upkeep", sink.stream, sink.name, generation, -1, note=note)
    now = int(time.time() * 1000)
    info = {"timestamp": now, "operation": "RENAME FILES", "operationParameters": {}, "userMetadata": entry.encode()}
    actions: list[Mapping[str, Any]] = [{"commitInfo": info}]
    for file in raw:
        name = f"{RENAMED}/{hashlib.sha256(file.path.encode()).hexdigest()[:32]}.parquet"
        placed(on_disk(sink.path, file.path), sink.path / name)
        actions += rename_actions(file, name, now)
    _commit(sink.path / "_delta_log", version + 1, actions)
    sink.update()
    sink.sync()
    return len(raw)


def rename_actions(file: TableFile, name: str, now: int) -> Iterable[Mapping[str, Any]]:
    same = {"partitionValues": dict(file.partition), "size": file.size, "dataChange": False}
    yield {"remove": {"path": file.path, "deletionTimestamp": now, "extendedFileMetadata": True, **same}}
    stats = {} if file.stats is None else {"stats": file.stats}
    yield {"add": {"path": name, "modificationTime": file.modified, **same, **stats}}


def _commit(log: Path, version: int, actions: Iterable[Mapping[str, Any]]) -> None:
    """Write a commit, whole or not at all; raises CommitRefused if another writer has made that version."""
    written = log / f"_commit_{uuid4().hex}.json.tmp"
    try:
        written.write_text("".join(json.dumps(action) + "\n" for action in actions), encoding="utf-8")
        sync(written)
        os.link(written, log / f"{version:020d}.json")
    except FileExistsError as error:
        raise CommitRefused(
            f"version {version} of the table of {log} was written by somebody else meanwhile"
        ) from error
    finally:
        written.unlink(missing_ok=True)
