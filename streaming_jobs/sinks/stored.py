"""A table at rest: its rows and its history, as preflight, savepoints and recoveries see it. Batches see `base.py`.

A store (`TableStore`) opens the tables that declarations name; `sinks/delta/store.py` is the one of Delta tables,
`streaming_jobs.testing` has one in memory. `tests/unit/streaming_jobs/sinks/test_stored.py` is the contract of both.

Every table, of any store, has a location `<tables>/<name>`. In a file system this is a folder: the table exists as long
as the folder does, and moves with it, so staging is an ordinary folder of tables, which a recovery makes, renames and
removes. On an object store nothing moves: a staged table lies below the table that it is staged for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from streaming_jobs.declare.rules import NO_RULES, RowRules
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import ForeignWrite
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.settings import Settings, StreamSettings, TableSettings
from streaming_jobs.sinks.base import DeadLetterSink, Upkeep, WriteLease
from streaming_jobs.storage.locations import Location
from streaming_jobs.text import commands

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable
    from pyspark.sql.types import StructType


def fence_entry(stream: str, table: str, generation: int, lease: WriteLease) -> LedgerEntry:
    """The entry of the commit that takes a table into the epoch of a lease."""
    return LedgerEntry("upkeep", stream, table, generation, -1, note=f"fence of epoch {lease.epoch}")


# The end of a table's log as a power cut leaves it: truncated commits, and what relies on them.


@dataclass(frozen=True)
class ReliedOn:
    """The facts that others rely on about a table whose last commits may be truncated.

    `at`: the position that the table had reached, as others recorded it. `accepted`: versions that a person accepted.
    `bound`: the stream's record names the table. `generation`: the one the stream is in. `recovering`: the caller is
    the recovery that was writing it.
    """

    at: Txn
    accepted: frozenset[int]
    bound: bool
    generation: int
    recovering: bool


@dataclass(frozen=True)
class TruncatedEnd:
    """The end of a table's log after a power cut: files to remove, in order, and the newest whole version.

    `whole` is -1 if no version is.
    """

    files: Sequence[Path]
    whole: int


Role = Literal["primary", "secondary", "deletes", "quarantine", "late"]
"""The role of a table in a stream. One of role `deletes` remembers the deletes of another, a `quarantine` has the rows
that row rules have set aside, and one of role `late` the records that came too late for a window."""

LATE: tuple[Role, ...] = ("deletes", "quarantine", "late")
"""The roles of tables that any start may create."""


@dataclass(frozen=True)
class Commit:
    """One version of a table as its log shows it; `at` in milliseconds since 1970, `entry` if it is ours."""

    version: int
    at: int
    operation: str
    changes_data: bool
    entry: LedgerEntry | None

    def foreign_to(self, stream: str) -> bool:
        """True if a writer other than the stream changed rows with it: the one definition."""
        return self.changes_data and (self.entry is None or self.entry.stream != stream)

    def moves(self, stream: str) -> bool:
        """True if it moved the stream's position in the table."""
        entry = self.entry
        return entry is not None and entry.stream == stream and entry.kind in ("batch", "fence", "publish")


def newest(commits: Iterable[Commit], stream: str) -> tuple[Commit | None, list[Commit]]:
    """The stream's newest entry among commits, newest first, and the later foreign commits.

    Without an entry, None and every foreign commit.
    """
    foreign: list[Commit] = []
    for commit in commits:
        if commit.moves(stream):
            return commit, foreign
        if commit.foreign_to(stream):
            foreign.append(commit)
    return None, foreign


def refuse_foreign(commits: Iterable[Commit], known: int, table: str, stream: str) -> None:
    """Raise ForeignWrite for the newest foreign commit after the version `known`, among commits, newest first."""
    for commit in commits:
        if commit.version <= known:
            return
        if commit.foreign_to(stream):
            raise ForeignWrite(
                f"version {commit.version} of table {table} ({commit.operation or 'unknown operation'}) changed rows "
                f"while stream {stream} was writing the table",
                f"undo it, or if it is right: {commands.accept(stream, table, commit.version)}",
            )


def entries(commits: Iterable[Commit], limit: int) -> list[tuple[Commit, LedgerEntry]]:
    """The newest ledger entries among commits, newest first, without maintenance and schema changes."""
    shown = ((c, c.entry) for c in commits if c.entry is not None and c.entry.kind not in ("upkeep", "schema"))
    return list(islice(shown, limit))


def committed_as(commits: Iterable[Commit], entry: LedgerEntry) -> Commit | None:
    """The newest commit with this kind, plan and position; None if there is none, or none that the log still shows."""
    wanted = (entry.kind, entry.plan, entry.txn)
    return next(
        (c for c in commits if c.entry is not None and (c.entry.kind, c.entry.plan, c.entry.txn) == wanted), None
    )


@dataclass(frozen=True)
class SavedTable:
    """One table of a savepoint: its id, the version whose rows are retained, its columns, and the number of files."""

    name: str
    table_id: str
    version: int
    schema: str
    partition_by: tuple[str, ...]
    files: int


@dataclass(frozen=True)
class SavedAs:
    """A savepoint as stores know it: stream, name, and its location, below which a store may write its files."""

    stream: str
    name: str
    folder: Location


class Content(Protocol):
    """The rows of one version of a table as a value: it is published, staged and compared without being read.

    It consists of pieces (such as files) that never change. Two contents are the same if they consist of the same
    pieces; other pieces with equal rows make another content.
    """

    @property
    def pieces(self) -> int:
        """The number of its pieces."""

    def without(self, other: Content) -> Content:
        """The content with only those pieces that the other one does not have."""


@dataclass(frozen=True)
class Replaced:
    """The result of replacing a table's rows: the numbers of added, removed and unchanged pieces.

    `seconds` is the duration of the commit itself. `version` is None if the table had the entry and the content
    already, so that nothing was committed.
    """

    version: int | None
    came: int
    went: int
    stayed: int
    seconds: float


@dataclass(frozen=True)
class LaterRows:
    """The pieces with rows from after a version of a table: pieces that were added whole, and split pieces."""

    whole: int
    split: int


@dataclass(frozen=True)
class Need:
    """The versions of a table that a stream needs: from `first` on; it reads `then` next, None if unknown."""

    first: int
    then: int | None


Unread = Callable[[], Sequence[Need]]


def no_readers() -> Sequence[Need]:
    """Nothing: no stream reads the table."""
    return ()


class StoredTable(DeadLetterSink, Protocol):
    """One table of one stream, open: at rest, and as a sink of batches. Not for two threads at once."""

    @property
    def table_id(self) -> str:
        """The table's identity; a recreated table has another."""

    @property
    def owner(self) -> str | None:
        """The stream that the table says it belongs to."""

    @property
    def schema(self) -> StructType:
        """Its columns."""

    @property
    def partition_by(self) -> Sequence[str]:
        """The columns that it is partitioned by."""

    def for_batches(
        self,
        settings: StreamSettings,
        *,
        rules: RowRules = NO_RULES,
        quarantine: StoredTable | None = None,
        deletes_table: StoredTable | None = None,
    ) -> DeadLetterSink:
        """The table as a sink of batches; `quarantine` has what `rules` set aside."""

    def upkeep(
        self, settings: TableSettings, *, generation: int, forgets: timedelta | None = None, unread: Unread = ...
    ) -> Upkeep:
        """The maintenance of the table between batches; `forgets` is the time for which it remembers deletes.

        `unread` gives the versions that streams that read the table still need.
        """

    @property
    def epoch(self) -> int:
        """The epoch of its newest commit that carries one, as of the last refresh or commit; 0 if there is none."""

    def under(self, lease: WriteLease, generation: int) -> None:
        """Write under this lease from now on: commits that move the table carry its epoch, later epochs refuse them.

        The lease's epoch is made greater than the table's, if it is not: leases were lost, or came from a copy. If an
        earlier holder may still run, a commit without rows takes the table into the lease's epoch: an upkeep entry,
        which leaves the position as it is. Raises Fenced and LeaseLost.
        """

    def append(self, rows: pa.Table, entry: LedgerEntry) -> int | None:
        """Add rows once; the new version, or None if the table has the entry's batch. Raises as `holds` does."""

    def commits(self) -> Iterator[Commit]:
        """Its commits as they are now, newest first, as far back as they are known without a gap."""

    def holds(self, entry: LedgerEntry) -> bool:
        """True if the table, as it is now, has the entry's position.

        Raises Fenced for a table of a newer generation or a later epoch than the lease's, LeaseLost if the lease has
        run out, ForeignWrite if somebody else has changed rows since it was opened.
        """

    def mark(self, entry: LedgerEntry) -> int | None:
        """Commit the entry without rows, once; the new version, or None if the table has it. Raises as `holds` does."""

    def content(self, version: int | None = None) -> Content:
        """The content of a version (None: the newest); raises PreflightRefused if the version is no longer known."""

    def has_content(self, content: Content, version: int | None = None) -> bool:
        """True if a version (None: the newest) consists of just these pieces."""

    def no_rows(self) -> Content:
        """A content with its columns and without rows."""

    def replace_rows(self, content: Content, entry: LedgerEntry, place: str, new: Content | None = None) -> Replaced:
        """Replace its rows by the content, in one commit with the entry, once. Raises as `holds` does.

        A table at the entry's position whose commit there left other rows than the content gets them in another commit
        at that position. Pieces that others rewrite meanwhile without changing rows are replaced like any others.
        `place` names the place of pieces that come. Columns that only the content has are added before. `new` are the
        pieces with nothing but rows of records that no batch had read before, for streams that read the table; None if
        that is not known.
        """

    def add_later_rows(self, now: Content, then: Content) -> LaterRows:
        """Add the rows that the content `now` has and `then` has not, as multisets, and the columns of `now`.

        Both are contents of one table. A piece of `now` that holds no row of `then` is added as it is; of the others,
        the later rows come in new pieces. Not idempotent: only for staging tables. Raises PreflightRefused if `then`
        has rows that `now` has not.
        """

    def complete(self, version: int) -> bool:
        """True if all pieces of a version are still there."""

    def readable(self, version: int | None = None) -> DeltaTable:
        """A version (None: the newest) as a Delta table, the only kind that DataFusion reads."""

    def size(self) -> tuple[int, int]:
        """The number of its pieces, and their total bytes."""

    def check_one_commit(self) -> None:
        """Raise UsageError if a publish in one commit would lose a property or a feature of the table."""

    def check_removable(self) -> None:
        """Raise UsageError if the table does not allow rows to be removed."""


class TableStore(Protocol):
    """Opens and makes the tables of one kind. Every method may be called by several threads at once."""

    kind: str
    """The name of this kind of table in catalogues, such as Dagster's."""
    faults: tuple[type[Exception], ...]
    """Exceptions of the store's library that a damaged table raises."""

    def open(self, settings: Settings, declared: DeclaredTable, stream: str) -> StoredTable | None:
        """The table if it exists, even if another program created it."""

    def commits(self, settings: Settings, declared: DeclaredTable, *, up_to: int | None = None) -> Iterator[Commit]:
        """The commits of a table up to a version (None: all), newest first; none if it does not exist.

        They are read from its log; the table is not opened.
        """

    def ensure(
        self, settings: Settings, declared: DeclaredTable, stream: str, output: StructType, *, generation: int
    ) -> StoredTable:
        """The table, made or widened to hold `output`; columns that only the table has stay, null in new rows.

        Raises OutputMismatch for any other difference, and for columns that are added while others are missing.

        The first commit of a new table opens the generation: its position is batch -1.
        """

    def check_output(self, settings: Settings, declared: DeclaredTable, stream: str, output: StructType) -> None:
        """Raise OutputMismatch if `ensure` would for this output; makes and changes nothing."""

    def create(
        self, settings: Settings, declared: DeclaredTable, stream: str, content: Content, entry: LedgerEntry | None
    ) -> StoredTable:
        """A new table that begins with a content, in one commit with the entry, if one is given."""

    def companion(
        self, name: str, description: str, *, owners: Sequence[str] = (), schema: StructType | None = None
    ) -> DeclaredTable:
        """The declaration of a table of this kind beside a stream's own: its dead letters, a quarantine."""

    def retain(self, versions: Sequence[tuple[StoredTable, int]], saved: SavedAs) -> list[SavedTable]:
        """Keep these versions' rows for a savepoint, whatever happens to the tables; on disk when this returns."""

    def retained(self, settings: Settings, tables: Sequence[SavedTable], saved: SavedAs) -> Mapping[str, Content]:
        """The contents of these tables of a savepoint, by name."""

    def release(self, settings: Settings, saved: SavedAs) -> None:
        """Release the rows that a savepoint keeps, also an unfinished one."""

    def retained_in(self, settings: Settings, table: str, saved: SavedAs) -> Sequence[Path]:
        """The folders, other than the savepoint's, with the files that it keeps of a table."""

    def log_place(self, settings: Settings, declared: DeclaredTable) -> Location:
        """The location of the table's log, as messages show it."""

    def truncated_copies(self, settings: Settings, declared: DeclaredTable) -> Iterator[Path]:
        """Remove half-written files that only repeat what commits say, as a power cut leaves them; yields each."""

    def truncated_end(
        self, settings: Settings, declared: DeclaredTable, stream: str, relied: ReliedOn
    ) -> TruncatedEnd | None:
        """The newest commits of the table that a power cut has truncated; None if there is no table. Removes nothing.

        Raises PreflightRefused if something relies on a commit that is not whole.
        """
