"""The files of a table's log that may be removed, by Delta's protocol, section "Metadata Cleanup".

A commit may be removed if there is a complete checkpoint at its version or a later one: the versions from that
checkpoint on stay readable, earlier ones do not. Files with other names than these are left alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from streaming_jobs.sinks.stored import Need

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.parquet")
_PART = re.compile(r"(\d{20})\.checkpoint\.(\d{10})\.(\d{10})\.parquet")
_BESIDE = re.compile(r"(\d{20})\.(?:crc|(?:json|checkpoint\.parquet)#\d+)|\d{20}\.(\d{20})\.compacted\.json")


@dataclass(frozen=True)
class LogFile:
    """One file of a log; `version` is the last one that it covers, `modified` in seconds since 1970, `size` on disk.

    A part of a checkpoint is of kind `beside`: only checkpoints in one file count as complete.
    """

    path: Path
    kind: Literal["commit", "checkpoint", "beside"]
    version: int
    modified: float
    size: int = 0


def log_files(log: Path) -> Iterator[LogFile]:
    """The files of a log whose names are known."""
    with os.scandir(log) as listing:
        for file in listing:
            kind: Literal["commit", "checkpoint", "beside"] = "beside"
            if match := _COMMIT.fullmatch(file.name):
                kind = "commit"
            elif match := _CHECKPOINT.fullmatch(file.name):
                kind = "checkpoint"
            elif not (match := _PART.fullmatch(file.name) or _BESIDE.fullmatch(file.name)):
                continue
            try:
                status = file.stat()
            except FileNotFoundError:
                continue
            version = int(match[1] or match[2])
            yield LogFile(Path(file.path), kind, version, status.st_mtime, status.st_blocks * 512)


def expired(
    files: Iterable[LogFile],
    *,
    now: float,
    retention: timedelta,
    versions: int,
    needed: int | None,
) -> list[LogFile]:
    """The files that may be removed, oldest first.

    A version stays while it is younger than `retention` and among the newest `versions` (0: no such bound). The version
    `needed` and all later ones stay in any case, and so does the checkpoint that the oldest of them starts from.
    """
    files = sorted(files, key=lambda file: (file.version, file.path.name))
    commits = [file for file in files if file.kind == "commit"]
    if not commits:
        return []
    newest = commits[-1].version
    young = (file.version for file in commits if file.modified >= now - retention.total_seconds())
    keep = next(young, newest)
    if versions:
        keep = max(keep, newest - versions + 1)
    keep = keep if needed is None else min(keep, needed)
    starts = [file.version for file in files if file.kind == "checkpoint" and file.version <= keep]
    return [file for file in files if file.version < max(starts)] if starts else []


def bounded(
    commits: Sequence[LogFile],
    needs: Iterable[Need],
    *,
    now: float,
    retention: timedelta,
    max_bytes: int,
    removed: Callable[[LogFile], int],
) -> int | None:
    """The first version that stays for readers: younger than `retention`, and within `max_bytes`.

    `commits` are the newest first, without a gap; `removed` are the bytes of the files that one took out of the table,
    which stay for readers of the versions before it. None if no reader needs any. One that reads an older version next
    cannot continue, whatever stays: it does not count.
    """
    needs = list(needs)
    if not commits or not needs:
        return None
    oldest, held = commits[0].version, 0
    for commit in commits:
        held += commit.size
        if commit.version < commits[0].version and (
            held > max_bytes or commit.modified < now - retention.total_seconds()
        ):
            break
        oldest = commit.version
        held += removed(commit)
    return min((max(need.first, oldest) for need in needs if need.then is None or need.then >= oldest), default=None)
