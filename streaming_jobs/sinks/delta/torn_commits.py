"""The newest commits of a Delta table that a power cut has left half written, and the test if they may be removed.

A commit is torn if its text is truncated, or a file that it adds is not on disk with all its bytes. Later damage looks
the same, so a torn commit may be removed only if nothing is lost with it: it is not another writer's, the version below
still has all of its files, and that version has reached the position that others rely on. This module itself removes
only copies: a truncated checkpoint of the log, and the file that names the newest checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from streaming_jobs.errors import PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry, Txn, app_id
from streaming_jobs.platform.files import remove_files
from streaming_jobs.sinks.delta.log_cleanup import log_files
from streaming_jobs.sinks.torn import ReliedOn, TornEnd
from streaming_jobs.text import commands

_START = Txn(0, -1)
_FROM_COPY = f"put the file back from a copy, or go back to a savepoint (`{commands.savepoints()}`)"


@dataclass(frozen=True)
class Actions:
    """A commit's actions, and its ledger entry if it has one."""

    actions: Sequence[tuple[str, Mapping[str, Any]]]
    entry: LedgerEntry | None


@dataclass(frozen=True)
class Torn:
    """A version that is not whole: the damage in words, and its ledger entry; None for one that cannot be read."""

    version: int
    found: str
    readable: bool
    entry: LedgerEntry | None


@dataclass(frozen=True)
class Table:
    """A table, its stream, and the facts that others rely on."""

    path: Path
    stream: str
    relied: ReliedOn

    @property
    def log(self) -> Path:
        return self.path / "_delta_log"


def torn_end(path: Path, stream: str, relied: ReliedOn) -> TornEnd | None:
    """The files of its torn commits, in the order in which they are to be removed; None if there is no table.

    Raises PreflightRefused for a commit that is not whole and that something relies on.
    """
    table = Table(path, stream, relied)
    if not table.log.is_dir():
        return None
    torn, below = _tail(table)
    if torn:
        _refuse_needed(table, torn, below)
    return TornEnd(list(_files(table.log, torn)) if torn else [], below)


def torn_copies(path: Path) -> Iterator[Path]:
    """Remove truncated checkpoints of the log, and the file that names the newest; both repeat what commits say."""
    log = path / "_delta_log"
    if not log.is_dir():
        return
    hint = log / "_last_checkpoint"
    torn = [file.path for file in log_files(log) if file.kind == "checkpoint" and not _is_parquet(file.path)]
    if torn or (hint.exists() and not _points_somewhere(hint)):
        yield from remove_files(hint)
    yield from remove_files(*torn)


def _tail(table: Table) -> tuple[list[Torn], int]:
    """The newest versions that are torn, newest first, and the one below them (-1: none)."""
    files = list(log_files(table.log))
    commits = {file.version: file.path for file in files if file.kind == "commit"}
    last = max(commits, default=-1)
    # Checkpoint or checksum of a version without a commit: a removal was killed, or the commit's name was lost.
    alone = {file.version for file in files if commits and file.version > last}
    torn: list[Torn] = []
    for version in sorted({*commits, *alone}, reverse=True):
        commit = _read(commits[version], table) if version in commits else None
        if commit is None:
            torn.append(Torn(version, f"version {version} of table {table.path.name} is cut off", False, None))
            continue
        missing = _missing(table.path, _added(commit))
        if not missing:
            return torn, version
        words = f"file {missing[0]} of table {table.path.name}, which version {version} added, is gone or cut off"
        torn.append(Torn(version, words, True, commit.entry))
    return torn, -1


def _read(path: Path, table: Table) -> Actions | None:
    """The commit; None if its text is truncated.

    Other writers may leave `commitInfo` out. Every commit of ours that moves the table has both `commitInfo` and a
    transaction, and a text that was truncated between two lines has only one of the two.
    """
    try:
        lines = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
    except ValueError:
        return None
    if not lines or not all(isinstance(line, dict) for line in lines):
        return None
    actions = [(kind, action) for line in lines for kind, action in line.items()]
    texts = (action.get("userMetadata") for kind, action in actions if kind == "commitInfo")
    entry = LedgerEntry.decode(next((text for text in texts if isinstance(text, str)), None))
    moves = entry is not None and entry.stream == table.stream and entry.kind in ("batch", "fence", "publish")
    ours = app_id(table.stream, table.path.name)
    moved = any(kind == "txn" and action["appId"] == ours for kind, action in actions)
    if (moves and not moved) or (moved and not any(kind == "commitInfo" for kind, _ in actions)):
        return None
    return Actions(actions, entry)


def _refuse_needed(table: Table, torn: Sequence[Torn], below: int) -> None:
    """Raise PreflightRefused if one of the torn versions may not be removed."""
    name, first = table.path.name, torn[0].found
    relied = table.relied
    for each in torn:
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
    furthest = max(at.generation, *(each.entry.generation for each in torn if each.entry is not None), 0)
    if furthest > relied.generation and not relied.recovering:
        raise PreflightRefused(
            f"{first}: a recovery was writing it",
            f"resume the recovery, or abort it; its name: `{commands.plans()}`",
        )
    listed = handle.get_add_actions(flatten=True)
    files = zip(listed["path"].to_pylist(), listed["size_bytes"].to_pylist(), strict=True)
    if gone := _missing(table.path, files):
        raise PreflightRefused(f"{first}, and file {gone[0]} of version {below} is gone too", _FROM_COPY)


def _files(log: Path, torn: Sequence[Torn]) -> Iterator[Path]:
    """All files of these versions in the log: the pointer to a checkpoint first, of each version its commit last."""
    if any(log.glob(f"{each.version:020d}.checkpoint*") for each in torn):
        yield log / "_last_checkpoint"
    for each in torn:
        commit = log / f"{each.version:020d}.json"
        beside = {*log.glob(f"{each.version:020d}.*"), *log.glob(f".{each.version:020d}.*")} - {commit}
        yield from sorted(beside)
        yield commit


def _added(commit: Actions) -> list[tuple[str, int]]:
    return [(str(action["path"]), int(action["size"])) for kind, action in commit.actions if kind == "add"]


def _missing(table: Path, files: Iterator[tuple[str, int]] | Sequence[tuple[str, int]]) -> list[str]:
    """The files that are not on disk with all their bytes; files outside of the table's folder are not checked."""
    return [path for path, size in files if "://" not in path and _size(table, path) != size]


def _size(table: Path, path: str) -> int | None:
    for name in (path, unquote(path), unquote(unquote(path))):
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
