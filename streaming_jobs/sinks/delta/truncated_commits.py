"""The newest commits of a Delta table that a power cut has truncated, and the test if they may be removed.

A commit counts as truncated if its text is, or if a file that it adds is not on disk with all its bytes. Later damage
looks the same, so a truncated commit may be removed only if nothing is lost with it: it is not another writer's, the
version below still has all of its files, and that version has reached the position that others rely on. This module
itself removes only copies: a truncated checkpoint of the log, and the file that names the newest checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry, Txn, app_id
from streaming_jobs.platform.delta_log import CommitActions, actions, names_on_disk
from streaming_jobs.sinks.delta.log_cleanup import log_files
from streaming_jobs.sinks.stored import ReliedOn, TruncatedEnd
from streaming_jobs.storage.files import remove_files
from streaming_jobs.text import commands

_START = Txn(0, -1)
_FROM_COPY = f"put the file back from a copy, or go back to a savepoint (`{commands.savepoints()}`)"


@dataclass(frozen=True)
class TruncatedCommit:
    """A damaged version: the damage as text, and its ledger entry; None if the entry cannot be read."""

    version: int
    found: str
    readable: bool
    entry: LedgerEntry | None


@dataclass(frozen=True)
class InspectedTable:
    """A table, its stream, and the facts that others rely on."""

    path: Path
    stream: str
    relied: ReliedOn

    @property
    def log(self) -> Path:
        return self.path / "_delta_log"


def truncated_end(path: Path, stream: str, relied: ReliedOn) -> TruncatedEnd | None:
    """The files of its truncated commits, in the order of their removal; None if there is no table.

    Raises PreflightRefused for a commit that is not whole and that something relies on.
    """
    table = InspectedTable(path, stream, relied)
    if not table.log.is_dir():
        return None
    truncated, below = _tail(table)
    if truncated:
        _refuse_needed(table, truncated, below)
    return TruncatedEnd(list(_files(table.log, truncated)) if truncated else [], below)


def truncated_copies(path: Path) -> Iterator[Path]:
    """Remove truncated checkpoints of the log, and the file that names the newest; both repeat what commits say."""
    log = path / "_delta_log"
    if not log.is_dir():
        return
    hint = log / "_last_checkpoint"
    truncated = [
        path for file in log_files(log) if file.kind == "checkpoint" and not _is_parquet(path := Path(str(file.path)))
    ]
    if truncated or (hint.exists() and not _points_somewhere(hint)):
        yield from remove_files(hint)
    yield from remove_files(*truncated)


def _tail(table: InspectedTable) -> tuple[list[TruncatedCommit], int]:
    """The newest versions that are truncated, newest first, and the one below them (-1: none)."""
    files = list(log_files(table.log))
    commits = {file.version: Path(str(file.path)) for file in files if file.kind == "commit"}
    last = max(commits, default=-1)
    # Checkpoint or checksum of a version without a commit: a removal was killed, or the commit's name was lost.
    alone = {file.version for file in files if commits and file.version > last}
    truncated: list[TruncatedCommit] = []
    for version in sorted({*commits, *alone}, reverse=True):
        commit = _read(version, commits[version], table) if version in commits else None
        if commit is None:
            truncated.append(
                TruncatedCommit(version, f"version {version} of table {table.path.name} is cut off", False, None)
            )
            continue
        missing = _missing(table.path, ((str(add["path"]), int(add["size"])) for add in commit.adds))
        if not missing:
            return truncated, version
        words = f"file {missing[0]} of table {table.path.name}, which version {version} added, is gone or cut off"
        truncated.append(TruncatedCommit(version, words, True, LedgerEntry.decode(commit.user_metadata)))
    return truncated, -1


def _read(version: int, path: Path, table: InspectedTable) -> CommitActions | None:
    """The commit; None if its text is truncated.

    Other writers may leave `commitInfo` out. Every commit of ours that moves the table has both `commitInfo` and a
    transaction, and a text that was truncated between two lines has only one of the two.
    """
    try:
        lines = list(actions(path))
    except ValueError:
        return None
    if not lines or not all(isinstance(line, dict) for line in lines):
        return None
    commit = CommitActions.of(version, lines)
    entry = LedgerEntry.decode(commit.user_metadata)
    moves = entry is not None and entry.stream == table.stream and entry.kind in ("batch", "fence", "publish")
    moved = app_id(table.stream, table.path.name) in commit.txns
    return None if (moves and not moved) or (moved and commit.info is None) else commit


def _refuse_needed(table: InspectedTable, truncated: Sequence[TruncatedCommit], below: int) -> None:
    """Raise PreflightRefused if one of the truncated versions may not be removed."""
    name, first = table.path.name, truncated[0].found
    relied = table.relied
    for each in truncated:
        foreign = each.readable and (each.entry is None or each.entry.stream != table.stream)
        if foreign or each.version in relied.accepted:
            raise PreflightRefused(each.found, _FROM_COPY)
    if below < 0:
        if relied.bound:
            raise PreflightRefused(f"{first}, and no version is below it", _FROM_COPY)
        return
    try:
        handle = DeltaTable(table.path, version=below)
    except DeltaError as error:
        raise PreflightRefused(f"{first}, and version {below} cannot be read: {error}", _FROM_COPY) from error
    number = handle.transaction_version(app_id(table.stream, name))
    at = _START if number is None else Txn.of(number)
    if at < relied.at:
        raise PreflightRefused(first, _FROM_COPY)
    furthest = max(at.generation, *(each.entry.generation for each in truncated if each.entry is not None), 0)
    if furthest > relied.generation and not relied.recovering:
        raise PreflightRefused(
            f"{first}: a recovery was writing it",
            f"resume the recovery, or abort it; its name: `{commands.plans()}`",
        )
    listed = handle.get_add_actions(flatten=True)
    files = zip(listed["path"].to_pylist(), listed["size_bytes"].to_pylist(), strict=True)
    if gone := _missing(table.path, files):
        raise PreflightRefused(f"{first}, and file {gone[0]} of version {below} is gone too", _FROM_COPY)


def _files(log: Path, truncated: Sequence[TruncatedCommit]) -> Iterator[Path]:
    """All files of these versions in the log: the pointer to a checkpoint first, of each version its commit last."""
    if any(log.glob(f"{each.version:020d}.checkpoint*") for each in truncated):
        yield log / "_last_checkpoint"
    for each in truncated:
        commit = log / f"{each.version:020d}.json"
        beside = {*log.glob(f"{each.version:020d}.*"), *log.glob(f".{each.version:020d}.*")} - {commit}
        yield from sorted(beside)
        yield commit


def _missing(table: Path, files: Iterable[tuple[str, int]]) -> list[str]:
    """The files that are not on disk with all their bytes; files outside of the table's folder are not checked."""
    return [path for path, size in files if "://" not in path and _size(table, path) != size]


def _size(table: Path, path: str) -> int | None:
    for name in names_on_disk(path):
        if (table / name).exists():
            return (table / name).stat().st_size
    return None


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 4, 0))
        return size > 8 and file.read() == b"PAR1"


def _points_somewhere(hint: Path) -> bool:
    try:
        version = int(json.loads(hint.read_bytes())["version"])
    except (ValueError, KeyError, TypeError):
        return False
    return any(hint.parent.glob(f"{version:020d}.checkpoint*"))
