"""Which of a table's newest commits a power cut has left half written, and whether they may go.

A commit is torn when its text is cut off, or a file that it adds is not there with all its bytes. Damage that comes
later looks alike, so it goes only where nothing is lost with it: where it is not somebody else's, the version below it
still has all of its files, and that version is at least where Spark, the primary table or a recovery's journal say
that the table is. All of that is decided, for all tables, before the first file is removed.
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
from streaming_jobs.ledger import LedgerEntry, Txn, app_id
from streaming_jobs.preflight.take_snapshot import all_tables
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.log import newest
from streaming_jobs.sinks.delta.log_cleanup import log_files
from streaming_jobs.state.stream_record import StreamRecord
from streaming_jobs.stream import Stream

_START = Txn(0, -1)
_FROM_COPY = "put the file back from a copy, or go back to a savepoint (`recourse savepoints list`)"


@dataclass(frozen=True)
class Commit:
    """A commit's actions, and its ledger entry if it has one."""

    actions: Sequence[tuple[str, Mapping[str, Any]]]
    entry: LedgerEntry | None


@dataclass(frozen=True)
class Torn:
    """A version that is not whole: what of it, in words, and its ledger entry; None for one that cannot be read."""

    version: int
    found: str
    readable: bool
    entry: LedgerEntry | None


@dataclass(frozen=True)
class Table:
    """A table, and what others rely on: the position they know it at, and whether a recovery asks."""

    path: Path
    stream: str
    record: StreamRecord
    known_at: Txn
    recovering: bool

    @property
    def log(self) -> Path:
        """The folder of its log."""
        return self.path / "_delta_log"


def torn_files(
    settings: Settings, stream: Stream, record: StreamRecord, committed: int | None, reached: Txn | None
) -> list[Path]:
    """The files of torn commits in the stream's tables, in the order in which they are to be removed.

    `committed` is Spark's last committed batch, `reached` where a recovery that asks has brought all tables. Raises
    PreflightRefused for a commit that is not whole and that something relies on.
    """
    everywhere = reached or _START
    known_at = {stream.primary.name: Txn(record.generation, -1 if committed is None else committed)}
    found: list[Path] = []
    for declared, role in all_tables(stream):
        known = max(known_at.get(declared.name, _START), everywhere)
        table = Table(settings.tables / declared.name, stream.name, record, known, reached is not None)
        if not table.log.is_dir():
            continue
        torn, below = _tail(table)
        if torn:
            _refuse_needed(table, torn, below)
            found += _files(table.log, torn)
        if role == "primary":
            known_at |= _listed(table, below)
    return found


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


def _read(path: Path, table: Table) -> Commit | None:
    """The commit; None when its text was cut off.

    Others may leave `commitInfo` out. Of ours, every one that moves the table carries its transaction, and a text that
    was cut off between two lines has one of the two.
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
    return Commit(actions, entry)


def _refuse_needed(table: Table, torn: Sequence[Torn], below: int) -> None:
    """Raise PreflightRefused if one of the torn versions may not go."""
    name, first = table.path.name, torn[0].found
    accepted = table.record.accepts(name)
    for each in torn:
        foreign = each.readable and (each.entry is None or each.entry.stream != table.stream)
        if foreign or each.version in accepted:
            raise PreflightRefused(each.found, _FROM_COPY)
    if below < 0:
        if table.record.table(name) is not None:
            raise PreflightRefused(f"{first}, and no version is below it", _FROM_COPY)
        return
    try:
        handle = DeltaTable(table.path, version=below)
    except DeltaError as error:
        raise PreflightRefused(f"{first}, and version {below} cannot be read: {error}", _FROM_COPY) from error
    number = handle.transaction_version(app_id(table.stream, name))
    at = _START if number is None else Txn.of(number)
    if at < table.known_at:
        raise PreflightRefused(first, _FROM_COPY)
    furthest = max(at.generation, *(each.entry.generation for each in torn if each.entry is not None), 0)
    if furthest > table.record.generation and not table.recovering:
        raise PreflightRefused(
            f"{first}: a recovery was writing it",
            "go on with the recovery, or give it up; its name: `recourse recover list`",
        )
    listed = handle.get_add_actions(flatten=True)
    files = zip(listed["path"].to_pylist(), listed["size_bytes"].to_pylist(), strict=True)
    if gone := _missing(table.path, files):
        raise PreflightRefused(f"{first}, and file {gone[0]} of version {below} is gone too", _FROM_COPY)


def _files(log: Path, torn: Sequence[Torn]) -> Iterator[Path]:
    """Everything that the log holds of these versions: what points at a version before it, and its commit last."""
    if any(log.glob(f"{each.version:020d}.checkpoint*") for each in torn):
        yield log / "_last_checkpoint"
    for each in torn:
        commit = log / f"{each.version:020d}.json"
        beside = {*log.glob(f"{each.version:020d}.*"), *log.glob(f".{each.version:020d}.*")} - {commit}
        yield from sorted(beside)
        yield commit


def _listed(primary: Table, version: int) -> dict[str, Txn]:
    """Where the primary's newest entry says that the other tables are; a fence came to them first."""
    commit, _ = newest(primary.path, primary.stream, version)
    if commit is None or commit.entry is None:
        return {}
    if commit.entry.kind == "fence":
        return {bound.name: commit.entry.txn for bound in primary.record.tables if bound.name != primary.path.name}
    return {name: Txn.of(number) for name, number in commit.entry.txns.items()}


def _added(commit: Commit) -> list[tuple[str, int]]:
    return [(str(action["path"]), int(action["size"])) for kind, action in commit.actions if kind == "add"]


def _missing(table: Path, files: Iterator[tuple[str, int]] | Sequence[tuple[str, int]]) -> list[str]:
    """The files that are not there with all their bytes; those of other places are passed."""
    return [path for path, size in files if "://" not in path and _size(table, path) != size]


def _size(table: Path, path: str) -> int | None:
    for name in (path, unquote(path), unquote(unquote(path))):
        if (table / name).exists():
            return (table / name).stat().st_size
    return None
