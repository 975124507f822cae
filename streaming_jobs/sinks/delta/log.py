"""A table's log, read from the newest commit backwards, with its ledger entries. Needs no JVM."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import uuid4

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry, epoch_id, redrive_id
from streaming_jobs.platform.delta_log import actions, commit_file, names_on_disk, read_commit, versions_in_log
from streaming_jobs.sinks import stored
from streaming_jobs.sinks.stored import Commit
from streaming_jobs.storage.files import sync_files
from streaming_jobs.storage.locations import Location

if TYPE_CHECKING:
    from deltalake import CommitProperties
    from deltalake.transaction import AddAction


def walk(table: Location, version: int | None = None) -> Iterator[Commit]:
    """The commits of a table's log up to a version (None: all), newest first, as far back as it has no gap.

    Raises PreflightRefused for a damaged commit.
    """
    versions = [number for number in reversed(versions_in_log(table)) if version is None or number <= version]
    for position, number in enumerate(versions):
        if position and versions[position - 1] != number + 1:
            return
        try:
            read = read_commit(table, number)
            commit = Commit(number, read.at, read.operation, read.changes_data, LedgerEntry.decode(read.user_metadata))
        except FileNotFoundError:  # cleaned up since the folder was listed
            return
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise PreflightRefused(
                f"version {number} in {table / '_delta_log'} cannot be read: {error}",
                "put the table's log back from a copy",
            ) from error
        yield commit


def newest(table: Location, stream: str, version: int | None = None) -> tuple[Commit | None, list[Commit]]:
    """The stream's newest entry on the table, up to a version, and later commits that change data and are not ours.

    Without an entry in the log, None and every such commit that the log still holds.
    """
    return stored.newest(walk(table, version), stream)


# Properties of our Delta commits: the ledger entry, and the transaction where a commit moves the table.

STREAM_PROPERTY = "recourse.stream"
"""The property of a table that names the stream it belongs to."""


def noted(entry: LedgerEntry, *, retries: int | None = None, epoch: int = 0) -> CommitProperties:
    """Properties of a commit that leaves the stream's position as it is; `retries` None: deltalake's default."""
    return _properties(entry, {epoch_id(entry.stream): epoch}, retries)


WRITER = "recourse.writer"
"""The field of `commitInfo` by which the writer of a commit to a store knows it again if the answer was lost."""


def moving(entry: LedgerEntry, app: str, epoch: int = 0, writer: str = "") -> CommitProperties:
    """Properties of a commit that moves the table to the entry's position; no retry: no commit may come between."""
    return _properties(entry, {app: entry.txn.version, epoch_id(entry.stream): epoch}, 0, writer)


def redriving(entry: LedgerEntry, epoch: int = 0, writer: str = "") -> CommitProperties:
    """Properties of a redrive's commit to one table, which happens once and leaves the stream's position as it is."""
    return _properties(entry, {redrive_id(entry.stream, entry.plan): 1, epoch_id(entry.stream): epoch}, 0, writer)


def _properties(
    entry: LedgerEntry, versions: Mapping[str, int], retries: int | None, writer: str = ""
) -> CommitProperties:
    """The entry, and the transactions: appId -> version; 0 is none."""
    from deltalake import CommitProperties, Transaction  # who only reads the log does without

    now = int(time.time() * 1000)
    return CommitProperties(
        custom_metadata={"userMetadata": entry.encode(), **({WRITER: writer} if writer else {})},
        max_commit_retries=retries,
        app_transactions=[Transaction(app, version, now) for app, version in versions.items() if version] or None,
    )


_PLAIN_IN_PATHS = "/=:@!$&'()*+,;-._~"


def append_commit(table: Path, version: int, adds: Sequence[AddAction], properties: CommitProperties) -> None:
    """Make a version of a table on a disk: these files are appended, and nothing else changes.

    Raises CommitFailedError if the log has the version, or had it and has cleaned it up: the version before is gone
    then, since the oldest goes first. As in deltalake, the commit's file is linked to its name when it is whole, and
    link(2) replaces no file.
    """
    from deltalake.exceptions import CommitFailedError

    now = int(time.time() * 1000)
    info = {
        "timestamp": now,
        "operation": "WRITE",
        "operationParameters": {"mode": "Append"},
        "engineInfo": "recourse",
        **(properties.custom_metadata or {}),
    }
    txns = [
        {"appId": txn.app_id, "version": txn.version, "lastUpdated": txn.last_updated}
        for txn in properties.app_transactions or ()
    ]
    files = [
        {
            "path": quote(add.path, safe=_PLAIN_IN_PATHS),
            "partitionValues": dict(add.partition_values),
            "size": add.size,
            "modificationTime": add.modification_time,
            "dataChange": add.data_change,
            "stats": add.stats,
        }
        for add in adds
    ]
    lines = [{"commitInfo": info}, *({"txn": txn} for txn in txns), *({"add": file} for file in files)]
    commit = table / "_delta_log" / f"{version:020d}.json"
    made = commit.with_name(f"_commit_{uuid4()}.json.tmp")
    try:
        made.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        os.link(made, commit)
        if not commit.with_name(f"{version - 1:020d}.json").exists():
            commit.unlink()
            raise CommitFailedError(f"version {version} of table {table.name} was there, and is cleaned up")
    except FileExistsError as error:
        raise CommitFailedError(f"version {version} of table {table.name} is there already") from error
    finally:
        made.unlink(missing_ok=True)


# The fsync of a table's commits: neither deltalake nor Spark syncs its files, so it is done here, after each commit.
#
# In this order: the data files that a commit adds and the folders that lead to them, then the commit's own file and a
# checkpoint of the log made with it, then the log's folder. Files that rely on the commit (Spark's `commits/N`, a
# recovery's journal) are written after that.

_WITH_FILES = ("add", "cdc")


def sync_commits(table: Location, versions: Iterable[int]) -> int:
    """Have these versions on disk; returns the bytes of files that they removed. One that the log lacks is skipped.

    An object is whole and durable once it is there, so nothing is done for a table on a store.
    """
    if not isinstance(table, Path):
        return 0
    log = table / "_delta_log"
    data: set[Path] = set()
    commits: list[Path] = []
    removed = 0
    for version in versions:
        commit = commit_file(table, version)
        try:
            lines = list(actions(commit))
        except FileNotFoundError:
            continue
        commits.append(Path(str(commit)))
        if (checkpoint := log / f"{version:020d}.checkpoint.parquet").exists():
            commits += [checkpoint, log / "_last_checkpoint"]
        for kind, action in (one for line in lines for one in line.items()):
            if kind in _WITH_FILES:
                data.update(_files_on_disk(table, action))
            elif kind == "remove":
                removed += int(action.get("size") or 0)
    if data:
        sync_files(data, table)
    if commits:
        sync_files(commits, log)
    return removed


def _files_on_disk(table: Path, action: Mapping[str, Any]) -> list[Path]:
    """The action's file and its deletion vectors."""
    path = str(action["path"])
    file = table / next((name for name in names_on_disk(path) if os.path.exists(f"{table}/{name}")), path)  # noqa: PTH110
    vectors = table.rglob("deletion_vector_*.bin") if action.get("deletionVector") else ()
    return [file, *vectors]
