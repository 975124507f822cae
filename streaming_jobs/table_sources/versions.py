"""The versions of a table as a reader sees them: the rows that each commit added for it.

| commit | rows |
|---|---|
| a batch of the stream that writes the table | those that it added |
| a redrive of it | those that it added; none of the table of what was set aside, out of which it takes rows |
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

The replay of a reader whose writer the same plan recovers reads `RebuiltRows` in place of the wrong versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streaming_jobs.errors import ForeignWrite, OffsetsLost, PermanentError, PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.ledger.positions import Place, by_place, ends_of
from streaming_jobs.platform.delta_log import (
    UNREAD,
    CommitActions,
    changes_rows,
    commit_file,
    names_on_disk,
    read_kept_commit,
    versions_in_log,
)
from streaming_jobs.storage.locations import Location, opened_for_reading
from streaming_jobs.storage.object_files import ObjectHandle
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from streaming_jobs.sinks.delta.table_files import TableFile
    from streaming_jobs.sinks.stored import Commit, Content


# What later commits of a table made of rows that a reader reads, or has read: taken back, or replaced.


def undone_after(table: Location, writer: str, number: int) -> tuple[set[str], bool]:
    """The files that other programs removed after a version and before the writer's next commit; True if there is one.

    Compaction removes no rows, and upkeep continues while the writer waits for a person.
    """
    removed: set[str] = set()
    while commit := _commit(table, number := number + 1):
        entry = LedgerEntry.decode(commit.user_metadata)
        if entry is None or entry.stream != writer:
            removed |= _removed(commit)
        elif entry.kind != "upkeep":
            return removed, True
    return removed, False


def replaced_since(table: Location, writer: str | None, start: int) -> list[tuple[int, str]]:
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
            if (read := _commit(table, commit.version)) is not None and _removed(read):
                found.append((commit.version, "another program"))
        elif entry.kind in ("publish", "slice"):
            found.append((commit.version, f"plan {entry.plan}" if entry.plan else f"a {entry.kind}"))
    return found


def whole_walk(table: Location, version: int | None = None) -> Iterator[Commit]:
    """`walk`, and after it the commits that are kept for readers only."""
    from streaming_jobs.sinks.delta.log import walk

    before = None if version is None else version + 1
    for root in (table, table / UNREAD):
        for commit in walk(root, None if before is None else before - 1):
            if root != table and before is not None and commit.version != before - 1:
                return
            before = commit.version
            yield commit


def _decoded(path: str) -> str:
    """The name on disk of a path of the log, however often its writer percent-encodes it."""
    return names_on_disk(path)[-1]


def _commit(table: Location, number: int) -> CommitActions | None:
    """A version; None if it has been cleaned up, or is not there yet."""
    try:
        return read_kept_commit(table, number)
    except FileNotFoundError:
        return None


def _removed(commit: CommitActions) -> set[str]:
    """The files whose rows a commit removed."""
    return {_decoded(remove["path"]) for remove in commit.removes if changes_rows(remove)}


_NO_ROWS = ("upkeep", "fence", "schema", "slice")


@dataclass(frozen=True)
class DataFile:
    """A data file: its path as the log writes it, partition values as text, bytes, rows.

    The path is relative to `root`; None: to the folder of the table.
    """

    path: str
    partition: Mapping[str, str | None]
    size: int
    rows: int
    root: Location | None = None


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
class RebuiltRows:
    """Rows that a recovery has rebuilt and not published yet, in place of the rows of versions `begin` to `end - 1`.

    `rebuilt` are the files with these rows, `content` those with all rows of the table. A reader gets them as the rows
    of version `end - 1`, which is the fence of the recovery.
    """

    begin: int
    end: int
    rebuilt: tuple[DataFile, ...]
    content: tuple[DataFile, ...]

    @classmethod
    def of(cls, begin: int, end: int, content: Content, before: Content | None) -> RebuiltRows:
        """The rows of a staged content; `before` has those that the table had at `begin`, None without any."""
        from streaming_jobs.sinks.delta.content import delta_content

        staged = delta_content(content)
        rebuilt = staged if before is None else staged.without(before)
        table = TableVersions(staged.root)
        files, rows = (
            tuple(replace(file, root=staged.root) for file in table.data_files(each.files.values()))
            for each in (staged, rebuilt)
        )
        return cls(begin, end, rows, files)


@dataclass(frozen=True)
class TableVersions:
    """The versions of the table in a folder, for a reader; it is pickled into the processes that plan.

    `writer` is the stream that writes the table, None if none of ours does. A commit of another program is accepted if
    one of the `records` says so, those of the writer and of the reader. With `in_place` the reader is replayed together
    with the writer.
    """

    table: Location
    writer: str | None = None
    records: tuple[ObjectHandle, ...] = ()
    in_place: RebuiltRows | None = None

    @property
    def name(self) -> str:
        return self.table.name

    def newest(self) -> int | None:
        """The newest version, with rebuilt rows in place the last one that these replace; None if there is no table."""
        if self.in_place is not None:
            return self.in_place.end - 1
        return max(versions_in_log(self.table), default=None)

    @property
    def _roots(self) -> tuple[Location, Location]:
        """The table, and the log of what is kept for readers only."""
        return self.table, self.table / UNREAD

    def has(self, number: int) -> bool:
        return any(commit_file(root, number).is_file() for root in self._roots)

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
            if (commit := _commit(self.table, number)) is None:
                return number + 1
            files = (add["path"] for add in commit.adds)
            if any(path in removed and self.on_disk(path) is None for path in files):
                return number + 1
            removed.update(remove["path"] for remove in commit.removes)
        return 0

    def between(self, start: int, end: int) -> Iterator[Version]:
        """Yields the versions of a range with their rows; raises OffsetsLost for one whose commit is gone."""
        if start == 0 < end:
            yield self.content(end - 1)
            return
        while start < end:
            yield self.version(start)
            start = self.after(start)

    def after(self, number: int) -> int:
        """The version that a reader reads after one: the next, or the one after those that rebuilt rows replace."""
        return number + 1 if self.in_place is None or number != self.in_place.begin else self.in_place.end

    def version(self, number: int) -> Version:
        """The rows that one version added; raises OffsetsLost, ForeignWrite or PreflightRefused (`versions.py`)."""
        if (rows := self.in_place) is not None and number == rows.begin:
            return Version(rows.end - 1, self.time_of(rows.end - 1), rows.rebuilt)
        if (commit := _commit(self.table, number)) is None:
            raise self.gone(number, number + 1)
        adds = [add for add in commit.adds if changes_rows(add)]
        rewrites = any(map(changes_rows, commit.removes))
        entry = LedgerEntry.decode(commit.user_metadata)
        settled = True
        if entry is not None and self.writer in (None, entry.stream):
            adds = self._of_ours(number, entry, adds, rewrites=rewrites)
        elif adds:
            adds = self._of_others(number, commit.operation or "unknown operation", adds, rewrites=rewrites)
            if adds and self.writer is not None:
                undone, settled = undone_after(self.table, self.writer, number)
                adds = [add for add in adds if _decoded(add["path"]) not in undone]
        return Version(number, _time(commit, adds), tuple(map(self._added, adds)), settled)

    def content(self, number: int) -> Version:
        """All rows of the table at a version; raises OffsetsLost if the log no longer reaches back to it."""
        if (rows := self.in_place) is not None and number == rows.end - 1:
            return Version(number, self.time_of(number), rows.content)
        try:
            listed = self._listed(number)
            commit = read_kept_commit(self.table, number)
        except (FileNotFoundError, PreflightRefused):
            raise self.gone(number, number + 1) from None
        return Version(number, _time(commit, ()), self.data_files(listed.values()))

    def data_files(self, listed: Iterable[TableFile]) -> tuple[DataFile, ...]:
        """Files of the table in the order in which they are read."""
        files = sorted(listed, key=lambda file: (file.modified, file.path))
        read = (self._file(f.path, f.partition, f.size, f.stats, has_deletions=f.has_deletions) for f in files)
        return tuple(read)

    def _listed(self, number: int) -> dict[str, TableFile]:
        from streaming_jobs.sinks.delta.table_files import table_files  # it needs deltalake

        try:
            return table_files(self.table, number)
        except PreflightRefused:
            return table_files(self.table / UNREAD, number)

    def time_of(self, number: int) -> int:
        """The time of a version's commit, milliseconds since 1970; raises FileNotFoundError if it is gone."""
        commit = read_kept_commit(self.table, number)
        return _time(commit, commit.adds)

    def commits_of_others(self) -> Iterator[Commit]:
        """The commits without a ledger entry, newest first."""
        return (commit for commit in whole_walk(self.table) if commit.entry is None)

    def time_of_next(self, start: int) -> int | None:
        """The time of the first commit from a version on that the log still has; None without any."""
        there = sorted({number for root in self._roots for number in versions_in_log(root) if number >= start})
        for number in there:
            with suppress(FileNotFoundError):  # cleaned up since it was listed
                return self.time_of(number)
        return None

    def on_disk(self, path: str, root: Location | None = None) -> Location | None:
        """A file of the log on disk, below the table or `root`; None if it is gone."""
        from streaming_jobs.sinks.delta.table_files import on_disk

        try:
            found = on_disk(root or self.table, path)
        except PreflightRefused:
            return None
        return found if isinstance(found, Path) or found.is_file() else None

    def gone(self, start: int, end: int) -> OffsetsLost:
        """The error for a range of versions that can no longer be read."""
        return OffsetsLost(gone_words(self.name, start, end), f"see `{commands.status()}`")

    def _of_ours(
        self, number: int, entry: LedgerEntry, adds: list[Mapping[str, Any]], *, rewrites: bool
    ) -> list[Mapping[str, Any]]:
        if entry.kind in _NO_ROWS:
            return []
        if entry.kind == "publish":
            return self._published(number, entry, adds)
        if rewrites and entry.kind == "redrive":
            return []
        if rewrites:
            raise PreflightRefused(
                f"version {number} of table {self.name}, batch {entry.batch} of stream {entry.stream}, rewrote rows: "
                "the table is no longer one to which rows are only added",
                "read the topic that the other stream reads, or let it write a table without keys",
            )
        return adds

    def _published(self, number: int, entry: LedgerEntry, adds: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The files of a publish with the rows of records that no batch had read before."""
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
        wanted = {_decoded(path) for path in entry.new or ()}
        return [add for add in adds if _decoded(add["path"]) in wanted]

    def _read_before(self, number: int, stream: str) -> dict[Place, int] | None:
        """The offsets up to which the writer had read before a publish; None if the log no longer shows it."""
        for commit in whole_walk(self.table, number - 1):
            entry = commit.entry
            if entry is not None and entry.stream == stream and entry.kind in ("batch", "publish"):
                return by_place(ends_of(entry.offsets))
        return None

    def _of_others(
        self, number: int, operation: str, adds: list[Mapping[str, Any]], *, rewrites: bool
    ) -> list[Mapping[str, Any]]:
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

        each = (stream_record.read(handle) for handle in self.records)
        return any(record is not None and number in record.accepts(self.name) for record in each)

    def _added(self, add: Mapping[str, Any]) -> DataFile:
        partition = dict(add.get("partitionValues") or {})
        deletions = bool(add.get("deletionVector"))
        return self._file(str(add["path"]), partition, int(add["size"]), add.get("stats"), has_deletions=deletions)

    def _file(
        self, path: str, partition: Mapping[str, str | None], size: int, stats: str | None, *, has_deletions: bool
    ) -> DataFile:
        if has_deletions:
            raise PermanentError(
                f"table {self.name} has deletion vectors, which a stream cannot read",
                "let its writer rewrite files instead: delta.enableDeletionVectors=false, then REORG TABLE ... PURGE",
            )
        return DataFile(path, partition, size, self._rows(path, stats))

    def _rows(self, path: str, stats: str | None) -> int:
        if (rows := json.loads(stats or "{}").get("numRecords")) is not None:
            return int(rows)
        import pyarrow.parquet as pq

        if (file := self.on_disk(path)) is None:
            raise self.file_gone(path)
        return int(pq.ParquetFile(opened_for_reading(file)).metadata.num_rows)

    def file_gone(self, path: str) -> OffsetsLost:
        """The error for a file that was deleted before it was read."""
        return OffsetsLost(
            f"file {path} of table {self.name} was deleted before it was read", f"see `{commands.status()}`"
        )


def gone_words(table: str, start: int, end: int) -> str:
    """The versions from `start` on and before `end` that can no longer be read, in words."""
    versions = f"version {start}" if end - start == 1 else f"versions {start} to {end - 1}"
    return f"{versions} of table {table} can no longer be read: its log or its files were cleaned up"


def _time(commit: CommitActions, adds: Sequence[Mapping[str, Any]]) -> int:
    """The commit's own time; without one, that of its newest file."""
    info = commit.info or {}
    at = info.get("inCommitTimestamp", info.get("timestamp"))
    return int(at) if at is not None else max((int(add.get("modificationTime") or 0) for add in adds), default=0)
