"""The versions of a table as a reader sees them: the rows that each commit added for it.

| commit | rows |
|---|---|
| a batch of the stream that writes the table | those that it added |
| a recovery's publish | those of records that no batch had read before (`LedgerEntry.new`); the others replace rows |
| upkeep, fence, schema, slice | none |
| of another program, only adding rows | all of them; in a table of ours (1) |
| of another program, rewriting rows | refused; none once it was accepted |
| of another program, only removing rows | none |

(1) once it was accepted (`streams accept`) and the writer has gone on after it: without the files that other programs
have taken out again before that.

A range `[start, end)` of versions gives the rows of these commits in their order, and within one in the order of its
files. A range that begins at 0 gives the rows that the table has at version `end - 1` instead: the log's beginning is
cleaned up within hours, and the rows are still there. Both stay the same however often they are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from streaming_jobs.errors import ForeignWrite, OffsetsLost, PermanentError, PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import Place, by_place, ends_of
from streaming_jobs.platform.delta_log import UNREAD, commit_actions
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from streaming_jobs.sinks.delta.table_files import TableFile
    from streaming_jobs.sinks.stored import Commit


# What later commits of a table made of rows that a reader reads, or has read: taken back, or replaced.


def undone_after(table: Path, writer: str, number: int) -> tuple[set[str], bool]:
    """The files that other programs removed after a version and before the writer's next commit; True if it came.

    Compaction removes no rows, and upkeep continues while the writer waits for a person.
    """
    removed: set[str] = set()
    while commit := _commit(table, number := number + 1):
        entry = LedgerEntry.decode(info_of(commit).get("userMetadata"))
        if entry is None or entry.stream != writer:
            removed |= _removed(commit)
        elif entry.kind != "upkeep":
            return removed, True
    return removed, False


def replaced_since(table: Path, writer: str | None, start: int) -> list[tuple[int, str]]:
    """The commits from a version on that replaced or removed rows, newest first: (version, by whom).

    A reader of versions passes over what they have made of rows that it read before. `writer` is None for a table
    that no stream of ours writes.
    """
    found = []
    for commit in whole_walk(table):
        if commit.version < start:
            break
        entry = commit.entry
        if not commit.changes_data:
            continue
        if entry is None or writer not in (None, entry.stream):
            if _rewrites(table, commit.version):
                found.append((commit.version, "another program"))
        elif entry.kind in ("publish", "slice"):
            found.append((commit.version, f"plan {entry.plan}" if entry.plan else f"a {entry.kind}"))
    return found


def whole_walk(table: Path, version: int | None = None) -> Iterator[Commit]:
    """`walk`, and after it the commits that are kept for readers only."""
    from streaming_jobs.sinks.delta.log import walk

    before = None if version is None else version + 1
    for root in (table, table / UNREAD):
        for commit in walk(root, None if before is None else before - 1):
            if root != table and before is not None and commit.version != before - 1:
                return
            before = commit.version
            yield commit


def info_of(commit: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The action `commitInfo` of a commit; empty without one."""
    return next((action["commitInfo"] for action in commit if action.get("commitInfo")), {})


def name_on_disk(path: str) -> str:
    """A path of the log as a name on disk; writers differ in how often they percent-encode it."""
    return unquote(unquote(path))


def _rewrites(table: Path, number: int) -> bool:
    try:
        return bool(_removed(commit_actions(table, number)))
    except FileNotFoundError:  # cleaned up since it was listed
        return False


def _commit(table: Path, number: int) -> list[dict[str, Any]]:
    try:
        return commit_actions(table, number)
    except FileNotFoundError:
        return []


def _removed(commit: Iterable[Mapping[str, Any]]) -> set[str]:
    """The files whose rows a commit removed."""
    removes = (action["remove"] for action in commit if action.get("remove"))
    return {name_on_disk(each["path"]) for each in removes if each.get("dataChange", True)}


_NO_ROWS = ("upkeep", "fence", "schema", "slice")


@dataclass(frozen=True)
class DataFile:
    """A data file: its path as the log writes it, partition values as text, bytes, rows."""

    path: str
    partition: Mapping[str, str | None]
    size: int
    rows: int


@dataclass(frozen=True)
class Version:
    """The rows of one version for a reader; `at` is the time of its commit in milliseconds since 1970.

    One that is not `settled` may not be read yet: other programs may still take its rows back.
    """

    number: int
    at: int
    files: tuple[DataFile, ...]
    settled: bool = True

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def size(self) -> int:
        """Bytes of their files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class TableVersions:
    """The versions of the table in a folder, for a reader; it is pickled into the processes that plan.

    `writer` is the stream that writes the table, None if none of ours does. A commit of another program is accepted if
    one of the `records` says so, those of the writer and of the reader.
    """

    table: Path
    writer: str | None = None
    records: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        return self.table.name

    def newest(self) -> int | None:
        """The newest version; None if there is no table."""
        return max(self._numbers(self.table), default=None)

    @property
    def _roots(self) -> tuple[Path, Path]:
        """The table, and the log of what is kept for readers only."""
        return self.table, self.table / UNREAD

    @staticmethod
    def _numbers(root: Path) -> list[int]:
        """The versions whose commits a log has, in order; one listing."""
        log = root / "_delta_log"
        return sorted(int(f.stem) for f in log.glob("*.json") if f.stem.isdigit() and len(f.stem) == 20)

    def has(self, number: int) -> bool:
        name = f"_delta_log/{number:020d}.json"
        return any((root / name).exists() for root in self._roots)

    def first(self) -> int:
        """The first version from which on every commit is in the log, and every file that one of them adds is there.

        A reader that has read all versions below it, or none at all, can continue; the newest version plus one if no
        commit can be read. Files are looked for only where a later commit took them out of the table.
        """
        newest = self.newest()
        if newest is None:
            return 0
        removed: set[str] = set()
        for number in range(newest, -1, -1):
            try:
                commit = commit_actions(self.table, number)
            except FileNotFoundError:
                return number + 1
            files = (action["add"]["path"] for action in commit if action.get("add"))
            if any(path in removed and self.on_disk(path) is None for path in files):
                return number + 1
            removed.update(action["remove"]["path"] for action in commit if action.get("remove"))
        return 0

    def between(self, start: int, end: int) -> Iterator[Version]:
        """Yields the versions of a range with their rows; raises OffsetsLost for one whose commit is gone."""
        if start == 0 < end:
            yield self.content(end - 1)
            return
        for number in range(start, end):
            yield self.version(number)

    def version(self, number: int) -> Version:
        """The rows that one version added; raises OffsetsLost, ForeignWrite or PreflightRefused (`versions.py`)."""
        try:
            commit = commit_actions(self.table, number)
        except FileNotFoundError:
            raise self.gone(number, number + 1) from None
        info = info_of(commit)
        adds = [a["add"] for a in commit if a.get("add") and a["add"].get("dataChange", True)]
        rewrites = any(a["remove"].get("dataChange", True) for a in commit if a.get("remove"))
        entry = LedgerEntry.decode(info.get("userMetadata"))
        settled = True
        if entry is not None and self.writer in (None, entry.stream):
            adds = self._of_ours(number, entry, adds, rewrites=rewrites)
        elif adds:
            adds = self._of_others(number, str(info.get("operation", "unknown operation")), adds, rewrites=rewrites)
            if adds and self.writer is not None:
                undone, settled = undone_after(self.table, self.writer, number)
                adds = [add for add in adds if name_on_disk(add["path"]) not in undone]
        return Version(number, _time(info, adds), tuple(self._file(add) for add in adds), settled)

    def content(self, number: int) -> Version:
        """All rows of the table at a version; raises OffsetsLost if the log no longer reaches back to it."""
        try:
            listed = self._listed(number)
            info = info_of(commit_actions(self.table, number))
        except (FileNotFoundError, PreflightRefused):
            raise self.gone(number, number + 1) from None
        files = sorted(listed.values(), key=lambda file: (file.modified, file.path))
        adds = [
            {
                "path": f.path,
                "partitionValues": f.partition,
                "size": f.size,
                "stats": f.stats,
                "modificationTime": 0,
                "deletionVector": f.has_deletions,
            }
            for f in files
        ]
        return Version(number, _time(info, adds), tuple(self._file(add) for add in adds))

    def _listed(self, number: int) -> dict[str, TableFile]:
        from streaming_jobs.sinks.delta.table_files import table_files  # it needs deltalake

        try:
            return table_files(self.table, number)
        except PreflightRefused:
            return table_files(self.table / UNREAD, number)

    def time_of(self, number: int) -> int:
        """The time of a version's commit, milliseconds since 1970; raises FileNotFoundError if it is gone."""
        commit = commit_actions(self.table, number)
        info = info_of(commit)
        return _time(info, [a["add"] for a in commit if a.get("add")])

    def commits_of_others(self) -> Iterator[Commit]:
        """The commits without a ledger entry, newest first."""
        return (commit for commit in whole_walk(self.table) if commit.entry is None)

    def time_of_next(self, start: int) -> int | None:
        """The time of the first commit from a version on that the log still has; None without any."""
        there = sorted({number for root in self._roots for number in self._numbers(root) if number >= start})
        for number in there:
            with suppress(FileNotFoundError):  # cleaned up since it was listed
                return self.time_of(number)
        return None

    def on_disk(self, path: str) -> Path | None:
        """A file of the log on disk; None if it is gone."""
        from streaming_jobs.sinks.delta.table_files import on_disk

        try:
            return on_disk(self.table, path)
        except PreflightRefused:
            return None

    def gone(self, start: int, end: int) -> OffsetsLost:
        """The error for a range of versions that can no longer be read."""
        return OffsetsLost(gone_words(self.name, start, end), f"see `{commands.status()}`")

    def _of_ours(
        self, number: int, entry: LedgerEntry, adds: list[dict[str, Any]], *, rewrites: bool
    ) -> list[dict[str, Any]]:
        if entry.kind in _NO_ROWS:
            return []
        if entry.kind == "publish":
            return self._published(number, entry, adds)
        if rewrites:
            raise PreflightRefused(
                f"version {number} of table {self.name}, batch {entry.batch} of stream {entry.stream}, rewrote rows: "
                "the table is no longer one to which rows are only added",
                "read the topic that the other stream reads, or let it write a table without keys",
            )
        return adds

    def _published(self, number: int, entry: LedgerEntry, adds: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The files of a publish whose rows are those of records that no batch had read before."""
        before, now = self._read_before(number, entry.stream), by_place(ends_of(entry.offsets))
        rebuild = f"rebuild this stream's tables from the table's present rows: {commands.plan('NAME', to_batch=-1)}"
        if before is not None and any(now.get(place, 0) < end for place, end in before.items()):
            raise PreflightRefused(
                f"version {number} of table {self.name}, by plan {entry.plan}, took rows back that this stream may "
                f"have read, and stream {entry.stream} writes them again",
                rebuild,
            )
        if entry.new is None and before != now:
            raise PreflightRefused(
                f"version {number} of table {self.name}, published by recovery {entry.plan}, also has rows of records "
                "that came during the recovery, and does not say which",
                rebuild,
            )
        wanted = {name_on_disk(path) for path in entry.new or ()}
        return [add for add in adds if name_on_disk(add["path"]) in wanted]

    def _read_before(self, number: int, stream: str) -> dict[Place, int] | None:
        """The offsets up to which the writer had read before a publish; None if the log no longer shows it."""
        for commit in whole_walk(self.table, number - 1):
            entry = commit.entry
            if entry is not None and entry.stream == stream and entry.kind in ("batch", "publish"):
                return by_place(ends_of(entry.offsets))
        return None

    def _of_others(
        self, number: int, operation: str, adds: list[dict[str, Any]], *, rewrites: bool
    ) -> list[dict[str, Any]]:
        accepted = self._accepts(number)
        if self.writer is not None and not accepted:
            raise ForeignWrite(
                f"version {number} of table {self.name} ({operation}) changed rows and was not written by stream "
                f"{self.writer}",
                f"undo it, or if it is right: {commands.accept(self.writer, self.name, number)}",
            )
        if rewrites and not accepted:
            raise ForeignWrite(
                f"version {number} of table {self.name} ({operation}) rewrote rows, and a stream reads a table to "
                "which rows are only added",
                "if what was read before may stay as it is, skip the version: "
                f"{commands.accept('NAME', self.name, number)}",
            )
        return [] if rewrites else adds

    def _accepts(self, number: int) -> bool:
        from streaming_jobs.state import stream_record

        each = (stream_record.read(path) for path in self.records)
        return any(record is not None and number in record.accepts(self.name) for record in each)

    def _file(self, add: Mapping[str, Any]) -> DataFile:
        if add.get("deletionVector"):
            raise PermanentError(
                f"table {self.name} has deletion vectors, which a stream cannot read",
                "let its writer rewrite files instead: delta.enableDeletionVectors=false, then REORG TABLE ... PURGE",
            )
        path = str(add["path"])
        return DataFile(path, dict(add.get("partitionValues") or {}), int(add["size"]), self._rows(add, path))

    def _rows(self, add: Mapping[str, Any], path: str) -> int:
        stats = json.loads(add.get("stats") or "{}")
        if (rows := stats.get("numRecords")) is not None:
            return int(rows)
        import pyarrow.parquet as pq

        if (file := self.on_disk(path)) is None:
            raise self.file_gone(path)
        return int(pq.ParquetFile(file).metadata.num_rows)

    def file_gone(self, path: str) -> OffsetsLost:
        """The error for a file that was deleted before it was read."""
        return OffsetsLost(
            f"file {path} of table {self.name} was deleted before it was read", f"see `{commands.status()}`"
        )


def gone_words(table: str, start: int, end: int) -> str:
    """The versions from `start` on and before `end` that can no longer be read, in words."""
    versions = f"version {start}" if end - start == 1 else f"versions {start} to {end - 1}"
    return f"{versions} of table {table} can no longer be read: its log or its files were cleaned up"


def _time(info: Mapping[str, Any], adds: list[dict[str, Any]]) -> int:
    """The commit's own time; without one, that of its newest file."""
    at = info.get("inCommitTimestamp", info.get("timestamp"))
    return int(at) if at is not None else max((int(add.get("modificationTime") or 0) for add in adds), default=0)
