"""A store of tables in memory (`sinks/stored.py`).

    <tables>/<table>/in_memory     a name for the table's log, which this process holds

So a table exists as long as its folder does, and moves with it: staging is made, renamed and removed as on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from pyspark.sql.types import StructType

from streaming_jobs.declare.table import DeclaredTable, Emit, Mode
from streaming_jobs.errors import OutputMismatch, PreflightRefused
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.files import private_folder, write_atomic
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import (
    Commit,
    Content,
    SavedAs,
    SavedTable,
    StoredTable,
)
from streaming_jobs.sinks.tables import register
from streaming_jobs.sinks.truncated import ReliedOn, TruncatedEnd
from streaming_jobs.testing.tables import (
    NO_ROWS,
    MemoryCommit,
    MemoryContent,
    MemoryTable,
    memory_content,
    memory_table,
)

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
        self._retained: dict[Path, dict[str, MemoryContent]] = {}

    def open(self, settings: Settings, declared: DeclaredTable, stream: str) -> MemoryTable | None:
        file = settings.tables / declared.name / _FILE
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
        here = set(table.schema.fieldNames())
        added = [column for column in output.fields if column.name not in here]
        if added:
            now = table.content()
            wider = MemoryContent(now.parts, StructType([*now.schema.fields, *added]), now.partition_by)
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
        self._retained[saved.folder] = held
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
        return {table.name: self._retained[saved.folder][table.name] for table in tables}

    def release(self, settings: Settings, saved: SavedAs) -> None:
        self._retained.pop(saved.folder, None)

    def retained_in(self, settings: Settings, table: str, saved: SavedAs) -> Sequence[Path]:
        """No folder: the pieces are in memory."""
        return ()

    def log_place(self, settings: Settings, declared: DeclaredTable) -> Path:
        """The file that names the log."""
        return settings.tables / declared.name / _FILE

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
        write_atomic(private_folder(settings.tables / declared.name) / _FILE, table_id)
        return self._opened(settings, declared, stream)

    def _opened(self, settings: Settings, declared: DeclaredTable, stream: str) -> MemoryTable:
        table = self.open(settings, declared, stream)
        assert table is not None
        return table


def _store(declared: DeclaredTable) -> MemoryStore:
    assert isinstance(declared, MemoryDeclaration)
    return declared.store


register(MemoryDeclaration, _store)
