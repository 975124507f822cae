"""The files of one version of a table, as its log adds them: a savepoint keeps them, a publish compares them.

deltalake lists a version's files but not the text of their statistics and partition values, which a later commit has
to repeat. So the log is replayed (Delta's protocol, "Action Reconciliation"), and the result compared with deltalake's
list.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
from deltalake.transaction import AddAction, RemoveAction

from streaming_jobs.errors import PermanentError, PreflightRefused
from streaming_jobs.platform.delta_log import CommitActions, actions, names_on_disk
from streaming_jobs.sinks.delta.log_cleanup import log_files
from streaming_jobs.storage.locations import Location, StorePath, delta_table, opened_for_reading

_SLASH = re.compile(r"^([a-z0-9]+):/+")
"""The beginning of a URL, of whose two slashes deltalake lists one."""


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


def table_files(table: Location, version: int) -> dict[str, TableFile]:
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
        rows = pq.read_table(opened_for_reading(log / f"{begin:020d}.checkpoint.parquet"), columns=["add"])[
            "add"
        ].to_pylist()
        files = {row["path"]: _file(row) for row in rows if row is not None and row["path"] is not None}
    for number in sorted(commits):
        commit = CommitActions.of(number, actions(commits[number]))
        for removed in commit.removes:
            files.pop(removed["path"], None)
        files.update({add["path"]: _file(add) for add in commit.adds})
    listed = delta_table(table, version).get_add_actions()["path"].to_pylist()
    if {unquote(path) for path in files} != {_SLASH.sub(r"\1://", unquote(path)) for path in listed}:
        raise PreflightRefused(
            f"the files of version {version} of table {table.name} are not the same in its log and in deltalake's list",
            "report it; nothing was changed",
        )
    return files


def on_disk(table: Location, path: str) -> Location:
    """Where a file of the log lies; on a store it is not looked for.

    Raises PermanentError for a path that is absolute or has `..`: it leads out of the table's folder. On a store, a
    staged table has the URLs of files that it shares with the table that it is staged for.
    """
    if isinstance(table, StorePath):
        if path.startswith(f"{table.url.partition('://')[0]}://"):
            return StorePath(unquote(path), table.options)
        if not _leads_out(name := unquote(path), path):
            return table / name
    for name in names_on_disk(path):
        if _leads_out(name, path):
            raise PermanentError(
                f"file {path} of table {table.name} is not in the table's folder: its path is absolute or has '..'",
                "copy the table, so that it has its files itself (a shallow clone has not)",
            )
        if os.path.exists(f"{table}/{name}"):  # noqa: PTH110 - a recovery asks for every file of a table
            return table / name
    raise PreflightRefused(
        f"file {path} of table {table.name} is gone", "put it back from a copy, or choose a savepoint"
    )


def _leads_out(name: str, path: str) -> bool:
    """True for a name on disk of a path of the log; a partition value may have `://`, which is escaped there."""
    return name.startswith("/") or ".." in name.split("/") or "://" in path


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
