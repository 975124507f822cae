"""The one commit that replaces the rows of a Delta table: files that the table has stay, others come as hard links.

It is made through `DeltaSink.commit`, so repeating it changes nothing, and it is refused if another writer has changed
the table.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

from deltalake import CommitProperties, DeltaTable
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql.types import StructType

from streaming_jobs.files import hard_link
from streaming_jobs.ledger import LedgerEntry
from streaming_jobs.sinks.delta import column_bounds, unencoded_paths
from streaming_jobs.sinks.delta.content import DeltaContent, inodes
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.delta.table_files import on_disk, table_files
from streaming_jobs.sinks.stored import Replaced

_ANY_GENERATION = 0
"""The generation in the entries of changes before the commit itself: they do not depend on it."""


def replace_rows(
    sink: DeltaSink, content: DeltaContent, entry: LedgerEntry, place: str, new: DeltaContent | None = None
) -> Replaced:
    """Replace the table's rows by the content; files that are new to the table come into its folder `place`.

    The entry names those of them that are in `new`, if it is given.
    """
    _widen(sink, content)
    _narrow(sink, content)
    unencoded_paths.rename(sink, entry.generation)
    live = table_files(sink.path, sink.handle.version())
    here = dict(zip(inodes(sink.path, live), live, strict=True))
    adds: list[AddAction | RemoveAction] = []
    stayed = set()
    unread = set(new.inodes()) if new is not None else set()
    named: list[str] = []
    for inode, (path, file) in zip(content.inodes(), content.files.items(), strict=True):
        if inode in here:
            stayed.add(here[inode])
            continue
        source = on_disk(content.root, path)
        name = f"{place}/{source.relative_to(content.root).as_posix()}"
        hard_link(source, sink.path / name)
        adds.append(file.add(name))
        named += [name] if inode in unread else []
    if new is not None:
        entry = replace(entry, new=tuple(named))
    at = int(time.time() * 1000)
    removes = [file.remove(at) for path, file in live.items() if path not in stayed]
    began = time.monotonic()

    def write(_: DeltaTable, properties: CommitProperties) -> None:
        sink.commit_actions([*removes, *adds], properties)

    version = sink.commit(entry, write)
    return Replaced(version, len(adds), len(removes), len(stayed), round(time.monotonic() - began, 3))


def _widen(sink: DeltaSink, content: DeltaContent) -> None:
    """Add the columns that the content has and the table lacks; columns are never removed."""
    wanted = StructType.fromJson(json.loads(content.schema))
    here = {field.name for field in sink.handle.schema().fields}
    if added := [field for field in wanted.fields if field.name not in here]:
        sink.add_columns(added, _ANY_GENERATION)


def _narrow(sink: DeltaSink, content: DeltaContent) -> None:
    """Remove columns from the table's list of bounded ones if a file lacks their bounds, as older files may."""
    statistics = (json.loads(file.stats or "{}") for file in content.files.values())
    bounded = column_bounds.bounded_in(statistics, sink.bounded)
    if bounded != sink.bounded:
        sink.set_properties({column_bounds.PROPERTY: column_bounds.encode(bounded)}, _ANY_GENERATION)
