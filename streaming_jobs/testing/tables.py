"""A table in this process's memory: a sink of batches (`sinks/base.py`) and a stored table (`sinks/stored.py`) in one.

As in a Delta table, a batch that is committed twice is in it once, and a commit is refused if the driver is of an older
generation or another writer has committed.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.types import StructType

from streaming_jobs.declare.rules import NO_RULES, RowRules
from streaming_jobs.declare.table import DeclaredTable, Emit, Mode
from streaming_jobs.errors import Fenced, OutputMismatch, PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetRange
from streaming_jobs.settings import Settings, StreamSettings, TableSettings
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite, WriteLease, refuse_later_epoch
from streaming_jobs.sinks.row_rules import evaluate, marked, outcome, refuse, set_aside
from streaming_jobs.sinks.stored import (
    Commit,
    Content,
    LaterRows,
    ReliedOn,
    Replaced,
    SavedAs,
    SavedTable,
    StoredTable,
    TruncatedEnd,
    Unread,
    committed_as,
    fence_entry,
    no_readers,
    refuse_foreign,
)
from streaming_jobs.sinks.tables import register
from streaming_jobs.storage.files import private_folder, write_atomic

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.sources.base import Source

NO_ROWS = pa.table({})
_NO_COLUMNS = StructType([])


@dataclass(frozen=True)
class MemoryContent:
    """Rows in pieces that never change, and their columns. Two contents with the same pieces are the same."""

    parts: tuple[pa.Table, ...] = ()
    schema: StructType = field(default_factory=lambda: _NO_COLUMNS)
    partition_by: tuple[str, ...] = ()

    @property
    def pieces(self) -> int:
        return len(self.parts)

    def without(self, other: Content) -> MemoryContent:
        """Only the pieces that the other content lacks."""
        there = set(map(id, memory_content(other).parts))
        return replace(self, parts=tuple(part for part in self.parts if id(part) not in there))

    def plus(self, parts: Sequence[pa.Table] = (), columns: StructType = _NO_COLUMNS) -> MemoryContent:
        """The content with further pieces, and with the columns that it lacks."""
        known = set(self.schema.fieldNames())
        added = [field for field in columns.fields if field.name not in known]
        return replace(self, parts=(*self.parts, *parts), schema=StructType([*self.schema.fields, *added]))

    def rows(self) -> pa.Table:
        parts = [part for part in self.parts if part.num_rows]
        return pa.concat_tables(parts, promote_options="default") if parts else NO_ROWS

    def readable(self) -> DeltaTable:
        """The rows as a Delta table, the only kind that DataFusion reads."""
        from deltalake import DeltaTable

        return DeltaTable(self._written.name)

    @cached_property
    def _written(self) -> tempfile.TemporaryDirectory[str]:
        """A folder with the rows; it exists as long as the content does."""
        from deltalake import DeltaTable, Schema, write_deltalake

        folder = tempfile.TemporaryDirectory()
        handle = DeltaTable.create(folder.name, Schema.from_json(self.schema.json()))
        if (rows := self.rows()).num_rows:
            write_deltalake(handle, rows, mode="append", schema_mode="merge")
        return folder

    def same(self, other: MemoryContent) -> bool:
        """True if both consist of the same pieces, in any order."""
        return Counter(map(id, self.parts)) == Counter(map(id, other.parts))


class MemoryCommit(NamedTuple):
    """One version: its entry, the rows that it added, and the table's content since."""

    entry: LedgerEntry | None
    rows: pa.Table
    content: MemoryContent
    operation: str = "WRITE"
    changes_data: bool = True
    moves_to: Txn | None = None
    """The position to which it moves the table; None if it does not move it."""
    at: int = 0
    """The time in milliseconds since 1970; 0 if it does not matter."""
    epoch: int = 0
    """The epoch of the lease under which it was made; 0 if it carries none."""


@dataclass(frozen=True)
class MemoryUpkeep:
    """The upkeep of a table in memory: there is none to do."""

    name: str
    put_off: dict[str, str] = field(default_factory=dict)

    def after_commit(self) -> None:
        """Nothing grows but the rows."""


@dataclass
class MemoryTable:
    """An append-only table; also one of dead letters.

    A restarted driver opens another one over the same log.
    """

    name: str
    log: list[MemoryCommit] = field(default_factory=list)
    table_id: str = ""
    owner: str | None = None
    rules: RowRules = NO_RULES
    quarantine: MemoryTable | None = None
    lease: WriteLease | None = None
    _known: int = field(init=False)

    def __post_init__(self) -> None:
        self._known = self.version

    @property
    def position(self) -> Txn | None:
        """The newest batch in it; None if there is none."""
        return next((commit.moves_to for commit in reversed(self.log) if commit.moves_to is not None), None)

    @property
    def version(self) -> int:
        """The number of its last commit, -1 before the first one."""
        return len(self.log) - 1

    @property
    def epoch(self) -> int:
        return next((commit.epoch for commit in reversed(self.log) if commit.epoch), 0)

    def under(self, lease: WriteLease, generation: int) -> None:
        if self.epoch > lease.epoch:
            lease.exceed(self.epoch)
        self.lease = lease
        if lease.expires and (self.table_id, self.epoch) not in lease.fenced:
            if self.epoch == lease.epoch:
                lease.exceed(self.epoch)
            lease.check()
            lease.fenced.add((self.table_id, lease.epoch))
            entry = fence_entry(self.owner or "", self.name, generation, lease)
            self.log.append(
                MemoryCommit(entry, NO_ROWS, self.content(), changes_data=False, at=_now(), epoch=lease.epoch)
            )

    @property
    def schema(self) -> StructType:
        """Its columns; none if they were never declared."""
        return self.content().schema

    @property
    def partition_by(self) -> tuple[str, ...]:
        return self.content().partition_by

    def rows(self) -> pa.Table:
        """Every row that is visible, the oldest commit's first."""
        return self.content().rows()

    def refresh(self) -> None:
        """Nothing to read: the log is in memory."""

    def sync(self) -> None:
        """Nothing to write: memory has no disk."""

    def newest_entry(self) -> LedgerEntry | None:
        """The entry of the commit that moved it last."""
        return next((commit.entry for commit in reversed(self.log) if commit.moves_to is not None), None)

    def commits(self) -> Iterator[Commit]:
        for version in range(self.version, -1, -1):
            commit = self.log[version]
            yield Commit(version, commit.at, commit.operation, commit.changes_data, commit.entry)

    def holds(self, entry: LedgerEntry) -> bool:
        """True if the table has the entry's position; raises Fenced, LeaseLost and ForeignWrite."""
        at = self.position
        if at is not None and at.generation > entry.generation:
            raise Fenced(
                f"table {self.name} is at {at}, and this driver wants to write {entry.txn}",
                "stop this driver: another one, or a recovery, has replaced it",
            )
        refuse_later_epoch(self.name, self.epoch, self.lease)
        refuse_foreign(self.commits(), self._known, self.name, entry.stream)
        self._known = self.version
        return at is not None and at >= entry.txn

    def append(self, rows: pa.Table, entry: LedgerEntry) -> int | None:
        """Add a batch's rows once; returns the version, or None if the batch is in it. Raises as `holds` does."""
        return self._commit(entry, rows, self.content().plus([rows] if rows.num_rows else ()))

    def write_as_somebody_else(self, rows: pa.Table) -> int:
        """Add rows as another program would, without a ledger entry; returns the version."""
        self.log.append(MemoryCommit(None, rows, self.content().plus([rows]), at=_now()))
        return self.version

    def mark(self, entry: LedgerEntry) -> int | None:
        return self._commit(entry, NO_ROWS, self.content(), changes_data=False)

    def content(self, version: int | None = None) -> MemoryContent:
        if not self.log:
            return MemoryContent()
        return self.log[self.version if version is None else version].content

    def has_content(self, content: Content, version: int | None = None) -> bool:
        return self.content(version).same(memory_content(content))

    def no_rows(self) -> MemoryContent:
        return MemoryContent((), self.schema, self.partition_by)

    def replace_rows(self, content: Content, entry: LedgerEntry, place: str, new: Content | None = None) -> Replaced:
        now, wanted = self.content(), memory_content(content)
        here, there = set(map(id, now.parts)), set(map(id, wanted.parts))
        replaced = replace(now.plus(columns=wanted.schema), parts=wanted.parts)
        before = committed_as(self.commits(), entry) if self.holds(entry) else None
        done = before is not None and self.content(before.version).same(replaced)
        version = None if done else self._append(entry, wanted.rows(), replaced, changes_data=here != there)
        return Replaced(version, len(there - here), len(here - there), len(here & there), 0.0)

    def add_later_rows(self, now: Content, then: Content) -> LaterRows:
        """Add pieces of later rows; a piece with rows of `then` too is split row by row."""
        came, gone = now.without(then), then.without(now)
        counts = Counter(_rows_of(memory_content(gone).rows()))
        added, split = [], 0
        for part in memory_content(came).parts:
            rows = _rows_of(part)
            earlier = Counter(row for row in rows if row in counts) & counts
            counts -= earlier
            split += bool(earlier)
            later = [part.slice(at, 1) for at, row in enumerate(rows) if not _taken(earlier, row)]
            added += [part] if len(later) == part.num_rows else later
        if counts:
            raise PreflightRefused(
                f"{counts.total():,} rows of table {self.name} that came before are no longer in it",
                "plan again without --until",
            )
        content = self.content().plus(added, memory_content(now).schema)
        self.log.append(MemoryCommit(None, NO_ROWS, content, at=_now()))
        return LaterRows(memory_content(came).pieces - split, split)

    def complete(self, version: int) -> bool:
        """True for every existing version: memory loses no piece."""
        return 0 <= version <= self.version

    def readable(self, version: int | None = None) -> DeltaTable:
        """A version as a Delta table in a temporary folder."""
        return self.content(version).readable()

    def size(self) -> tuple[int, int]:
        """The number of its pieces, and their total bytes."""
        parts = self.content().parts
        return len(parts), sum(part.nbytes for part in parts)

    def check_one_commit(self) -> None:
        """Every content can be published in one commit."""

    def check_removable(self) -> None:
        """Rows can always be removed."""

    def for_batches(
        self,
        settings: StreamSettings,
        *,
        rules: RowRules = NO_RULES,
        quarantine: StoredTable | None = None,
        deletes_table: StoredTable | None = None,
    ) -> MemoryTable:
        self.rules, self.quarantine = rules, None if quarantine is None else memory_table(quarantine)
        return self

    def upkeep(
        self, settings: TableSettings, *, generation: int, forgets: timedelta | None = None, unread: Unread = no_readers
    ) -> MemoryUpkeep:
        return MemoryUpkeep(self.name)

    def fit(self, output: DataFrame, topics: Sequence[str]) -> DataFrame:
        """The output as it is, judged if there are rules."""
        return marked(output, self.name, self.rules) if self.rules else output

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> PendingWrite:
        made, before = evaluate(frame.toArrow(), self.rules), []
        if made.failing is not None:
            refuse(self.name, self.rules, made.failing, made.numbers, ())
        if made.quarantined is not None and self.quarantine is not None:
            place = (None, None, None)
            batch = (rows.generation, rows.batch)
            before.append(MemoryWrite(self.quarantine, set_aside(made.quarantined, self.rules, batch, place)))
        found = outcome(self.rules, made.numbers, made.dropped)
        return MemoryWrite(self, made.written, before=before, outcome=found)

    def prepare_letters(
        self,
        spark: SparkSession,
        refused: Sequence[tuple[Source, OffsetRange, int]],
        rejected: Sequence[pa.Table],
        rows: BatchOfRows,
    ) -> PendingWrite:
        """The refused records with their reasons, and the rejected rows as they are."""
        letters = []
        for source, offsets, count in refused:
            letters += source.bad_rows(spark, offsets, count).to_pylist()
        tables = [pa.Table.from_pylist(letters)] if letters else []
        return MemoryWrite(self, pa.concat_tables([*tables, *rejected], promote_options="default"))

    def _commit(
        self, entry: LedgerEntry, rows: pa.Table, content: MemoryContent, *, changes_data: bool = True
    ) -> int | None:
        return None if self.holds(entry) else self._append(entry, rows, content, changes_data=changes_data)

    def _append(self, entry: LedgerEntry, rows: pa.Table, content: MemoryContent, *, changes_data: bool) -> int:
        epoch = 0 if self.lease is None else self.lease.epoch
        self.log.append(MemoryCommit(entry, rows, content, "WRITE", changes_data, entry.txn, _now(), epoch))
        self._known = self.version
        return self.version


@dataclass
class MemoryWrite(PendingWrite):
    """Rows for a table in memory, not yet visible."""

    sink: MemoryTable
    table: pa.Table

    @property
    def name(self) -> str:
        return self.sink.name

    @property
    def rows(self) -> int:
        return int(self.table.num_rows)

    def commit(self, entry: LedgerEntry) -> int | None:
        """Make the rows visible once; raises Fenced if the table is in a newer generation."""
        return self.sink.append(self.table, entry)


def memory_table(table: StoredTable) -> MemoryTable:
    """The table as a `MemoryTable`; a store receives only tables that it has opened."""
    assert isinstance(table, MemoryTable)
    return table


def memory_content(content: Content) -> MemoryContent:
    """A content as a `MemoryContent`; a table receives only contents of its store."""
    assert isinstance(content, MemoryContent)
    return content


def _rows_of(rows: pa.Table) -> list[str]:
    """The rows as values that can be counted."""
    return [repr(sorted(row.items())) for row in rows.to_pylist()]


def _taken(earlier: Counter[str], row: str) -> bool:
    """True if the row is one of the earlier ones, of which there is then one less."""
    found = earlier[row] > 0
    earlier[row] -= found
    return found


def _now() -> int:
    return int(time.time() * 1000)


# A store of tables in memory (`sinks/stored.py`).
#
#     <tables>/<table>/in_memory     a name for the table's log, which this process holds
#
# So a table exists as long as its folder does, and moves with it: staging is made, renamed and removed as on disk.

_FILE = "in_memory"


@dataclass(frozen=True)
class MemoryDeclaration:
    """A table in memory as a sink of a stream: rows are appended."""

    name: str
    store: MemoryStore
    schema: StructType | None = None
    keys: Sequence[str] = ()
    partition_by: Sequence[str] = ()
    description: str = ""
    owners: Sequence[str] = ()
    fresh_within: str | None = None
    order_by: Sequence[str] = field(default=(), init=False)
    delete_when: str | None = field(default=None, init=False)
    deletes_kept: str = field(default="7 days", init=False)
    emit: Emit | None = field(default=None, init=False)

    @property
    def mode(self) -> Mode:
        """Rows are appended; `keys` say how rows are compared."""
        return "append"

    @property
    def deletes(self) -> DeclaredTable | None:
        return None


class MemoryStore:
    """Tables in this process's memory; another process sees their folders and none of their rows."""

    kind = "memory"
    faults: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self._logs: dict[str, list[MemoryCommit]] = {}
        self._owners: dict[str, str] = {}
        self._retained: dict[str, dict[str, MemoryContent]] = {}

    def open(self, settings: Settings, declared: DeclaredTable, stream: str) -> MemoryTable | None:
        file = settings.tables_folder / declared.name / _FILE
        if not file.exists():
            return None
        table_id = file.read_text(encoding="utf-8")
        if table_id not in self._logs:
            raise PreflightRefused(
                f"table {declared.name} was in the memory of a process that has ended", "begin with new folders"
            )
        return MemoryTable(declared.name, self._logs[table_id], table_id, self._owners[table_id])

    def commits(self, settings: Settings, declared: DeclaredTable, *, up_to: int | None = None) -> Iterator[Commit]:
        table = self.open(settings, declared, "")
        return (c for c in (table.commits() if table else ()) if up_to is None or c.version <= up_to)

    def check_output(self, settings: Settings, declared: DeclaredTable, stream: str, output: StructType) -> None:
        if (table := self.open(settings, declared, stream)) is None:
            return
        there = {column.name: column.dataType for column in output.fields}
        here = {column.name: column.dataType for column in table.schema.fields}
        renamed = bool(here.keys() - there.keys()) and bool(there.keys() - here.keys())
        if renamed or any(there.get(name, kind) != kind for name, kind in here.items()):
            raise OutputMismatch(f"table {table.name} cannot take the new output", "a table gains columns only")

    def ensure(
        self, settings: Settings, declared: DeclaredTable, stream: str, output: StructType, *, generation: int
    ) -> MemoryTable:
        table = self.open(settings, declared, stream)
        if table is None:
            begun = MemoryContent((), output, tuple(declared.partition_by))
            entry = LedgerEntry("schema", stream, declared.name, generation, -1, note="table made")
            return self._made(
                settings, declared, stream, MemoryCommit(entry, NO_ROWS, begun, "CREATE", False, entry.txn)
            )
        self.check_output(settings, declared, stream, output)
        now, wider = table.content(), table.content().plus(columns=output)
        if wider.schema != now.schema:
            entry = LedgerEntry("schema", stream, declared.name, generation, -1, note="columns added")
            table.log.append(MemoryCommit(entry, NO_ROWS, wider, "ADD COLUMNS", False))
        return self._opened(settings, declared, stream)

    def create(
        self, settings: Settings, declared: DeclaredTable, stream: str, content: Content, entry: LedgerEntry | None
    ) -> MemoryTable:
        """A table of the same pieces."""
        begun = memory_content(content)
        empty = MemoryContent((), begun.schema, begun.partition_by)
        table = self._made(settings, declared, stream, MemoryCommit(None, NO_ROWS, empty, "CREATE", False))
        table.log.append(MemoryCommit(entry, begun.rows(), begun, moves_to=None if entry is None else entry.txn))
        return self._opened(settings, declared, stream)

    def companion(
        self, name: str, description: str, *, owners: Sequence[str] = (), schema: StructType | None = None
    ) -> DeclaredTable:
        return MemoryDeclaration(name, self, schema, description=description, owners=owners)

    def retain(self, versions: Sequence[tuple[StoredTable, int]], saved: SavedAs) -> list[SavedTable]:
        """Hold the pieces of these versions."""
        held = {table.name: memory_table(table).content(version) for table, version in versions}
        self._retained[str(saved.folder)] = held
        return [
            SavedTable(
                name=table.name,
                table_id=table.table_id,
                version=version,
                schema=held[table.name].schema.json(),
                partition_by=held[table.name].partition_by,
                files=held[table.name].pieces,
            )
            for table, version in versions
        ]

    def retained(self, settings: Settings, tables: Sequence[SavedTable], saved: SavedAs) -> dict[str, MemoryContent]:
        return {table.name: self._retained[str(saved.folder)][table.name] for table in tables}

    def release(self, settings: Settings, saved: SavedAs) -> None:
        self._retained.pop(str(saved.folder), None)

    def retained_in(self, settings: Settings, table: str, saved: SavedAs) -> Sequence[Path]:
        """No folder: the pieces are in memory."""
        return ()

    def log_place(self, settings: Settings, declared: DeclaredTable) -> Path:
        """The file that names the log."""
        return settings.tables_folder / declared.name / _FILE

    def truncated_copies(self, settings: Settings, declared: DeclaredTable) -> Iterator[Path]:
        """None: no table in memory is left half written by a power cut."""
        return iter(())

    def truncated_end(
        self, settings: Settings, declared: DeclaredTable, stream: str, relied: ReliedOn
    ) -> TruncatedEnd | None:
        table = self.open(settings, declared, stream)
        return None if table is None else TruncatedEnd((), table.version)

    def _made(self, settings: Settings, declared: DeclaredTable, stream: str, first: MemoryCommit) -> MemoryTable:
        table_id = str(uuid4())
        self._logs[table_id], self._owners[table_id] = [first], stream
        write_atomic(private_folder(settings.tables_folder / declared.name) / _FILE, table_id)
        return self._opened(settings, declared, stream)

    def _opened(self, settings: Settings, declared: DeclaredTable, stream: str) -> MemoryTable:
        table = self.open(settings, declared, stream)
        assert table is not None
        return table


def _store(declared: DeclaredTable) -> MemoryStore:
    assert isinstance(declared, MemoryDeclaration)
    return declared.store


register(MemoryDeclaration, _store)
