"""The files of one version of a table, as its log adds them: a savepoint keeps them, a publish compares them.

deltalake lists a version's files but not the text of their statistics and partition values, which a later commit has
to repeat. So the log is replayed (Delta's protocol, "Action Reconciliation"), and the result compared with deltalake's
list.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from uuid import uuid4

import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from streaming_jobs.errors import CommitRefused, PermanentError, PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.delta_log import CommitActions, actions, names_on_disk
from streaming_jobs.platform.files import link_as_new, sync
from streaming_jobs.sinks.delta.log_cleanup import log_files

if TYPE_CHECKING:
    from streaming_jobs.sinks.delta.sink import DeltaSink


@dataclass(frozen=True)
class TableFile:
    """One data file: `path` as the log writes it, bytes, partition values as text, statistics as JSON text.

    With `has_deletions` a deletion vector marks some of its rows as deleted.
    """

    path: str
    size: int
    modified: int
    partition: Mapping[str, str | None]
    stats: str | None
    has_deletions: bool = False

    def add(self, path: str | None = None) -> AddAction:
        """The action that adds it, under another path if one is given."""
        return AddAction(
            path=path or unquote(self.path),
            size=self.size,
            partition_values=dict(self.partition),
            modification_time=self.modified,
            data_change=True,
            stats=self.stats or "{}",
        )

    def remove(self, at: int) -> RemoveAction:
        """The action that removes it, `at` milliseconds since 1970.

        The path is that on disk, because deltalake percent-encodes it again.
        """
        return RemoveAction(unquote(self.path), True, at, self.size, dict(self.partition))


def table_files(table: Path, version: int) -> dict[str, TableFile]:
    """The files of a version by their paths; raises PreflightRefused when the log no longer holds the version."""
    log = table / "_delta_log"
    log_folder = list(log_files(log))
    begin = max((f.version for f in log_folder if f.kind == "checkpoint" and f.version <= version), default=-1)
    commits = {f.version: f.path for f in log_folder if f.kind == "commit" and begin < f.version <= version}
    if len(commits) != version - begin:
        raise PreflightRefused(
            f"version {version} of table {table.name} cannot be read: its log was cleaned up", "choose a savepoint"
        )
    files: dict[str, TableFile] = {}
    if begin >= 0:
        rows = pq.read_table(log / f"{begin:020d}.checkpoint.parquet", columns=["add"])["add"].to_pylist()
        files = {row["path"]: _file(row) for row in rows if row is not None and row["path"] is not None}
    for number in sorted(commits):
        commit = CommitActions.of(number, actions(commits[number]))
        for removed in commit.removes:
            files.pop(removed["path"], None)
        files.update({add["path"]: _file(add) for add in commit.adds})
    listed = DeltaTable(table, version=version).get_add_actions()["path"].to_pylist()
    if {unquote(path) for path in files} != {unquote(path) for path in listed}:
        raise PreflightRefused(
            f"the files of version {version} of table {table.name} are not the same in its log and in deltalake's list",
            "report it; nothing was changed",
        )
    return files


def on_disk(table: Path, path: str) -> Path:
    """The path on disk of a file of the log.

    Raises PermanentError for a path that is absolute or has `..`: it leads out of the table's folder.
    """
    for name in names_on_disk(path):
        if name.startswith("/") or ".." in name.split("/"):
            raise PermanentError(
                f"file {path} of table {table.name} is not in the table's folder: its path is absolute or has '..'",
                "copy the table, so that it has its files itself (a shallow clone has not)",
            )
        if os.path.exists(f"{table}/{name}"):  # noqa: PTH110 - a recovery asks for every file of a table
            return table / name
    raise PreflightRefused(
        f"file {path} of table {table.name} is gone", "put it back from a copy, or choose a savepoint"
    )


def _file(add: Mapping[str, Any]) -> TableFile:
    values = add["partitionValues"] or {}
    deletions = add.get("deletionVector") or {}
    return TableFile(
        path=add["path"],
        size=int(add["size"]),
        modified=int(add["modificationTime"]),
        partition=dict(values),
        stats=add.get("stats"),
        has_deletions=deletions.get("storageType") is not None,
    )


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
        link_as_new(on_disk(sink.path, file.path), sink.path / name)
        actions += rename_actions(file, name, now)
    _commit(sink.path / "_delta_log", version + 1, actions)
    sink.refresh()
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
