"""The fsync of a table's commits: neither deltalake nor Spark syncs its files, so it is done here, after each commit.

In this order: the data files that a commit adds and the folders that lead to them, then the commit's own file and a
checkpoint of the log made with it, then the log's folder. Files that rely on the commit (Spark's `commits/N`, a
recovery's journal) are written after that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from streaming_jobs.platform.delta_log import actions, commit_file, names_on_disk
from streaming_jobs.platform.files import sync_files

_WITH_FILES = ("add", "cdc")


def sync_commits(table: Path, versions: Iterable[int]) -> int:
    """Have these versions on disk; returns the bytes of files that they removed. One that the log lacks is skipped."""
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
        commits.append(commit)
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
