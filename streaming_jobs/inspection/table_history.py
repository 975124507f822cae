"""The history of a Delta table from its log alone: who committed what, and which versions' rows are still in it.

Rows are followed by file: a file has the rows of the version that added it, and of those whose files it replaced. So
rows are seen to go with a RESTORE, a DELETE or an overwrite, to come back with a later RESTORE, and to stay through
compactions, upserts and deletion vectors. Versions are bits of a number, as a file of a merged table has rows of many.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.delta_log import CommitActions, changes_rows, names_on_disk, read_commit, versions_in_log
from streaming_jobs.state.provenance import rows_of
from streaming_jobs.storage.locations import Location, files_below

_URI = re.compile("[a-z][a-z0-9+.-]*:", re.IGNORECASE)
"""A path of the log that begins with a scheme: `s3://...`, and `file:/...` or `dbfs:/...` too."""
_ON_DISK = re.compile("file:(//)?(?=/(?!/))")
_STREAMING, _RESTORE = "STREAMING UPDATE", "RESTORE"
_PARSE_ERRORS = (ValueError, TypeError, AttributeError, KeyError)


@dataclass(frozen=True)
class Versions:
    """A set of versions as bits, from a first one on; in order when iterated."""

    first: int = 0
    bits: int = 0

    def __bool__(self) -> bool:
        return self.bits != 0

    def __iter__(self) -> Iterator[int]:
        at, bits = self.first, self.bits
        while bits:
            low = (bits & -bits).bit_length()
            yield at + low - 1
            bits >>= low
            at += low


@dataclass(frozen=True)
class TableCommit:
    """One version of a table; `at` in seconds since 1970. `rows` are those that it was given; None if not known.

    `touches` are the versions whose files it took out or rewrote.
    """

    version: int
    at: float
    operation: str
    parameters: Mapping[str, str]
    engine: str
    txns: Mapping[str, int]
    changes_data: bool
    rows: int | None
    entry: LedgerEntry | None
    touches: Versions = Versions()

    @property
    def epoch(self) -> tuple[str, int] | None:
        """Query id and batch, by which Delta's own streaming sink signs its commits."""
        query, epoch = self.parameters.get("queryId", ""), self.parameters.get("epochId", "")
        return (query, int(epoch)) if self.operation == _STREAMING and query and epoch.isdigit() else None

    @property
    def signature(self) -> tuple[str, str]:
        """Operation and mode: what the commits of one statement of a program have in common.

        The append that creates the table has an operation or a mode of its own.
        """
        if self.operation in ("WRITE", "CREATE TABLE AS SELECT"):
            mode = self.parameters.get("mode", "")
            return "WRITE", "Append" if mode in ("", "ErrorIfExists") else mode
        return self.operation, ""

    @property
    def upserts(self) -> bool:
        return self.operation == "MERGE"

    @property
    def replaces_all(self) -> bool:
        """True for an overwrite and a recovery: its rows do not come from the files that it takes out."""
        if self.entry is not None and self.entry.kind == "publish":
            return True
        mode = self.parameters.get("mode", "") or self.parameters.get("outputMode", "")
        return mode in ("Overwrite", "Complete") or self.operation.startswith(("CREATE", "REPLACE"))


@dataclass(frozen=True)
class GoneRows:
    """The rows of a version are no longer in the table, since a commit."""

    version: int
    by: TableCommit


@dataclass(frozen=True)
class MissingFile:
    """A file of the table that is not on disk, and the versions whose rows it has; `rows` None: not known."""

    path: str
    versions: Versions
    rows: int | None


@dataclass(frozen=True)
class TableHistory:
    """A table as its log tells; `commits` by version, without a gap up to the newest.

    `before` has by application the newest transaction before the first version that the log has.
    """

    name: str
    location: str
    commits: Mapping[int, TableCommit]
    gone: Mapping[int, GoneRows] = field(default_factory=dict)
    missing_files: tuple[MissingFile, ...] = ()
    before: Mapping[str, int] = field(default_factory=dict)
    trouble: tuple[str, ...] = ()

    @property
    def first(self) -> int:
        return min(self.commits, default=0)

    @property
    def cut(self) -> bool:
        """True if the log no longer reaches back to the table's first version."""
        return self.first > 0

    @property
    def begun(self) -> float:
        """The time of the first version in the log; 0 without one."""
        return self.commits[self.first].at if self.commits else 0.0

    def alive(self, version: int) -> bool:
        """True if the rows that a version wrote are in the table; also for one that wrote none."""
        return version not in self.gone


def is_table(folder: Location) -> bool:
    return (folder / "_delta_log").is_dir()


def read_table(table: Location) -> TableHistory:
    """The history of a table; a commit that cannot be read is named in `trouble`, and history begins after it."""
    trouble: list[str] = []
    read: dict[int, CommitActions] = {}
    for version in reversed(versions_in_log(table)):
        if read and version != min(read) - 1:
            trouble.append(f"the log has no version {min(read) - 1}, although it has earlier ones: they are not read")
            break
        try:
            read[version] = read_commit(table, version)
        except FileNotFoundError:  # cleaned up since the folder was listed
            break
        except _PARSE_ERRORS as error:
            trouble.append(f"version {version} of the log cannot be read: {error}")
            if read:
                break
    first = min(read, default=0)
    base = _Base.of(table, first, trouble) if first else _Base()
    rows = _FollowedRows(first, base.paths)
    commits = {version: rows.follow(read[version]) for version in sorted(read)}
    return TableHistory(
        name=str(table).rstrip("/").rpartition("/")[2],
        location=str(table),
        commits=commits,
        gone={version: GoneRows(version, commits[by]) for version, by in rows.gone.items()},
        missing_files=tuple(_missing(table, rows)),
        before=base.txns,
        trouble=tuple(trouble),
    )


@dataclass(frozen=True)
class _Base:
    """What the checkpoint of a log says of the versions before it: live files, and transactions."""

    paths: tuple[str, ...] = ()
    txns: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, table: Location, first: int, trouble: list[str]) -> _Base:
        """From the newest checkpoint in one file that is not after the log's first version."""
        from io import BytesIO

        import pyarrow.parquet as pq

        log = table / "_delta_log"
        files = {int(file.name[:20]): file for file in log.glob("*.checkpoint.parquet") if file.name[:20].isdigit()}
        if (version := max((v for v in files if v <= first), default=None)) is None:
            trouble.append(
                f"the log begins at version {first} without a checkpoint in one file: what was before is not known"
            )
            return cls()
        try:
            rows = pq.read_table(BytesIO(files[version].read_bytes()), columns=["txn", "add"]).to_pylist()
        except (OSError, ValueError) as error:
            trouble.append(f"the checkpoint of version {version} of the log cannot be read: {error}")
            return cls()
        adds = tuple(str(row["add"]["path"]) for row in rows if row["add"] is not None)
        txns = {str(row["txn"]["appId"]): int(row["txn"]["version"]) for row in rows if row["txn"] is not None}
        return cls(adds, txns)


class _FollowedRows:
    """The versions whose rows each live file has; a bit for each version, from the first one in the log."""

    def __init__(self, first: int, before: Iterable[str]) -> None:
        self.first = first
        self.live: dict[str, int] = dict.fromkeys(before, 0)
        self.rows: dict[str, int | None] = {}
        self.gone: dict[int, int] = {}
        """By version the one that took its last row out."""
        self._ever: dict[str, int] = dict(self.live)

    def follow(self, actions: CommitActions) -> TableCommit:
        """Apply a commit, and say what it was."""
        commit = _described(actions)
        adds = {str(add["path"]): add for add in actions.adds}
        removed = [str(each["path"]) for each in actions.removes if str(each["path"]) not in adds]
        taken = 0
        for path in removed:
            taken |= self.live.pop(path, 0)
        rewritten = taken
        for path in adds.keys() & self.live.keys():  # a new deletion vector, or statistics
            rewritten |= self.live[path] if changes_rows(adds[path]) else 0
        inherited = 0 if commit.replaces_all else taken
        own = 1 << (actions.version - self.first)
        given = 0
        for path, add in adds.items():
            if path in self._ever:  # a RESTORE, or a deletion vector
                bits = self._ever[path]
            elif commit.operation == _RESTORE:
                bits = 0  # of a version that the log no longer has
            else:
                bits = inherited | (own if changes_rows(add) else 0)
            self.live[path] = self._ever[path] = bits
            self.rows[path] = rows_of(add)
            given |= bits
        for version in [version for version in self.gone if given >> (version - self.first) & 1]:
            del self.gone[version]
        if lost := self._without_a_file(taken & ~given):
            self.gone |= dict.fromkeys(Versions(self.first, lost), actions.version)
        return replace(commit, touches=Versions(self.first, rewritten)) if commit.changes_data else commit

    def _without_a_file(self, bits: int) -> int:
        """Those of the versions that no live file has rows of."""
        for held in self.live.values():
            if not bits:
                break
            bits &= ~held
        return bits


def _described(actions: CommitActions) -> TableCommit:
    info = actions.info or {}
    parameters = {str(k): str(v) for k, v in dict(info.get("operationParameters") or {}).items() if v is not None}
    metrics = dict(info.get("operationMetrics") or {})
    fresh = [add for add in actions.adds if changes_rows(add)]
    rows = _number(metrics.get("numSourceRows") if actions.operation == "MERGE" else metrics.get("numOutputRows"))
    counted = [rows_of(add) for add in fresh]
    if rows is None and all(each is not None for each in counted):
        rows = sum(each or 0 for each in counted)
    at = int(info.get("inCommitTimestamp") or actions.at)
    return TableCommit(
        version=actions.version,
        at=at / 1000,
        operation=actions.operation,
        parameters=parameters,
        engine=str(info.get("engineInfo", "")),
        txns=actions.txns,
        changes_data=actions.changes_data,
        rows=rows,
        entry=LedgerEntry.decode(actions.user_metadata),
    )


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _missing(table: Location, rows: _FollowedRows) -> Iterator[MissingFile]:
    """The live files that are not on disk.

    Of files elsewhere (a shallow clone has them), only those of a table on this disk that are on it too are looked for.
    """
    there = None if isinstance(table, Path) else {name for name, _ in files_below(table)}
    for path, bits in rows.live.items():
        on_disk = _ON_DISK.match(path) if isinstance(table, Path) else None
        if on_disk is None and (path.startswith("/") or _URI.match(path)):
            continue
        names = names_on_disk(path if on_disk is None else path[on_disk.end() :])
        if not any(name in there if there is not None else (table / name).exists() for name in names):
            yield MissingFile(path, Versions(rows.first, bits), rows.rows.get(path))
