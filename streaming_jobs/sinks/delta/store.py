"""The store of Delta tables: opens them, makes them, retains their files for savepoints (`sinks/stored.py`).

    <tables>/<table>/_delta_log/...                               the table's own log
    <tables>/<table>/_savepoints/<stream>-g0001-b000000041/...    hard links of the files that a savepoint retains
    <the savepoint's folder>/files.json.gz                        these files, as the table's log adds them

A link keeps a file's bytes when its name is removed, by compaction, maintenance, or a VACUUM by hand.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql.types import StructType

from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.ledger.entry import LedgerEntry, app_id
from streaming_jobs.platform.files import hard_link, sync, sync_names
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta import truncated_commits
from streaming_jobs.sinks.delta.commit_properties import moving
from streaming_jobs.sinks.delta.content import DeltaContent, delta_content, make_table
from streaming_jobs.sinks.delta.log import walk
from streaming_jobs.sinks.delta.sink import DeltaSink, delta_sink, open_sink
from streaming_jobs.sinks.delta.table_files import TableFile, on_disk, table_files
from streaming_jobs.sinks.delta.table_setup import check_output, ensure_sink
from streaming_jobs.sinks.stored import (
    Commit,
    Content,
    SavedAs,
    SavedTable,
    StoredTable,
)
from streaming_jobs.sinks.truncated import ReliedOn, TruncatedEnd
from streaming_jobs.stream import DeltaTable as Declared

_FILES = "files.json.gz"


class DeltaStore:
    """Delta tables on a local file system."""

    kind = "deltalake"
    faults: tuple[type[Exception], ...] = (DeltaError,)

    def open(self, settings: Settings, declared: DeclaredTable, stream: str) -> DeltaSink | None:
        return open_sink(settings, declared, stream)

    def commits(self, settings: Settings, declared: DeclaredTable, *, up_to: int | None = None) -> Iterator[Commit]:
        return walk(settings.tables / declared.name, up_to)

    def ensure(
        self, settings: Settings, declared: DeclaredTable, stream: str, output: StructType, *, generation: int
    ) -> DeltaSink:
        return ensure_sink(settings, declared, stream, output, generation=generation)

    def check_output(self, settings: Settings, declared: DeclaredTable, stream: str, output: StructType) -> None:
        check_output(settings, declared, stream, output)

    def create(
        self, settings: Settings, declared: DeclaredTable, stream: str, content: Content, entry: LedgerEntry | None
    ) -> DeltaSink:
        """A table of hard links."""
        properties = CommitProperties() if entry is None else moving(entry, app_id(stream, declared.name))
        path = settings.tables / declared.name
        make_table(path, declared.name, delta_content(content), stream, properties)
        return DeltaSink(path, declared, stream, DeltaTable(path))

    def companion(
        self, name: str, description: str, *, owners: Sequence[str] = (), schema: StructType | None = None
    ) -> DeclaredTable:
        return Declared(name, schema=schema, description=description, owners=owners)

    def retain(self, versions: Sequence[tuple[StoredTable, int]], saved: SavedAs) -> list[SavedTable]:
        """Link the files of these versions, and write their `add` actions into the savepoint's folder."""
        files: dict[str, list[TableFile]] = {}
        tables = []
        for table, version in versions:
            path = delta_sink(table).path
            files[table.name] = list(table_files(path, version).values())
            _link(path, files[table.name], _links(path, saved))
            handle = DeltaTable(path, version=version)
            tables.append(
                SavedTable(
                    name=table.name,
                    table_id=str(handle.metadata().id),
                    version=version,
                    schema=handle.schema().to_json(),
                    partition_by=tuple(handle.metadata().partition_columns),
                    files=len(files[table.name]),
                )
            )
        with gzip.open(saved.folder / _FILES, "wt", encoding="utf-8") as packed:
            json.dump({table: [asdict(file) for file in listed] for table, listed in files.items()}, packed)
        sync(saved.folder / _FILES)
        return tables

    def retained(self, settings: Settings, tables: Sequence[SavedTable], saved: SavedAs) -> dict[str, DeltaContent]:
        with gzip.open(saved.folder / _FILES, "rt", encoding="utf-8") as packed:
            listed = json.load(packed)
        return {
            table.name: DeltaContent(
                {file["path"]: TableFile(**file) for file in listed[table.name]},
                _links(settings.tables / table.name, saved),
                table.schema,
                table.partition_by,
            )
            for table in tables
        }

    def release(self, settings: Settings, saved: SavedAs) -> None:
        if settings.tables.is_dir():
            for links in settings.tables.glob(f"*/_savepoints/{saved.stream}-{saved.name}"):
                shutil.rmtree(links, ignore_errors=True)

    def retained_in(self, settings: Settings, table: str, saved: SavedAs) -> Sequence[Path]:
        return (_links(settings.tables / table, saved),)

    def log_place(self, settings: Settings, declared: DeclaredTable) -> Path:
        return settings.tables / declared.name / "_delta_log"

    def truncated_copies(self, settings: Settings, declared: DeclaredTable) -> Iterator[Path]:
        """Remove truncated checkpoints of the log."""
        return truncated_commits.truncated_copies(settings.tables / declared.name)

    def truncated_end(
        self, settings: Settings, declared: DeclaredTable, stream: str, relied: ReliedOn
    ) -> TruncatedEnd | None:
        return truncated_commits.truncated_end(settings.tables / declared.name, stream, relied)


STORE = DeltaStore()


def _links(table: Path, saved: SavedAs) -> Path:
    return table / "_savepoints" / f"{saved.stream}-{saved.name}"


def _link(table: Path, files: Iterable[TableFile], target: Path) -> None:
    """Link a table's files, and have the links on disk; the files were synced with the commits that added them."""
    made = []
    for file in files:
        source = on_disk(table, file.path)
        made.append(target / source.relative_to(table))
        hard_link(source, made[-1])
    sync_names(made, table)
