"""A Delta table at rest (`sinks/stored.py`): its rows and its history, over the open table that batches commit to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deltalake import DeltaTable
from pyspark.sql.types import StructType

from streaming_jobs.errors import PreflightRefused, UsageError
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.sinks.delta.content import DeltaContent, content_of, has_content
from streaming_jobs.sinks.delta.later_rows import add_later_rows
from streaming_jobs.sinks.delta.log import walk
from streaming_jobs.sinks.delta.replace_rows import replace_rows
from streaming_jobs.sinks.delta.sink import STREAM_PROPERTY, DeltaSink
from streaming_jobs.sinks.delta.table_files import on_disk, table_files
from streaming_jobs.sinks.sliced import SlicedTable
from streaming_jobs.sinks.stored import Commit, Content, LaterRows, Replaced


class DeltaStoredTable:
    def __init__(self, sink: DeltaSink) -> None:
        self.sink = sink

    @property
    def name(self) -> str:
        return self.sink.name

    @property
    def path(self) -> Path:
        return self.sink.path

    @property
    def table_id(self) -> str:
        return self.sink.table_id

    @property
    def owner(self) -> str | None:
        return self.sink.handle.metadata().configuration.get(STREAM_PROPERTY)

    @property
    def version(self) -> int:
        return int(self.sink.handle.version())

    @property
    def position(self) -> Txn | None:
        return self.sink.position

    @property
    def schema(self) -> StructType:
        return self.sink.schema

    @property
    def partition_by(self) -> tuple[str, ...]:
        return tuple(self.sink.handle.metadata().partition_columns)

    def commits(self) -> Iterator[Commit]:
        return walk(self.path)

    def holds(self, entry: LedgerEntry) -> bool:
        """True if the table has the entry's transaction or a later one."""
        return self.sink.holds(entry)

    def mark(self, entry: LedgerEntry) -> int | None:
        """One commit with the entry's transaction and no action."""
        return self.sink.commit(entry, lambda *_: None)

    def content(self, version: int | None = None) -> DeltaContent:
        return content_of(self.path, version)

    def has_content(self, content: Content, version: int | None = None) -> bool:
        return has_content(self.path, delta_content(content), version)

    def no_rows(self) -> DeltaContent:
        return DeltaContent({}, self.path, self.sink.handle.schema().to_json(), self.partition_by)

    def replace_rows(self, content: Content, entry: LedgerEntry, place: str, new: Content | None = None) -> Replaced:
        return replace_rows(
            self.sink, delta_content(content), entry, place, None if new is None else delta_content(new)
        )

    def add_later_rows(self, now: Content, then: Content) -> LaterRows:
        """Add files of later rows, in commits of their own."""
        return add_later_rows(self.sink, delta_content(now), delta_content(then))

    def sliced(self) -> SlicedTable:
        """The table as one whose slices can be replaced."""
        from streaming_jobs.sinks.delta.slice_staging import DeltaSlices  # it needs PySpark

        return DeltaSlices(self.sink)

    def complete(self, version: int) -> bool:
        """True if the files of a version are all there."""
        try:
            for path in table_files(self.path, version):
                on_disk(self.path, path)
        except PreflightRefused:
            return False
        return True

    def readable(self, version: int | None = None) -> DeltaTable:
        return DeltaTable(self.path, version=version)

    def size(self) -> tuple[int, int]:
        """The number of its files, and their total bytes."""
        sizes = self.sink.handle.get_add_actions()["size_bytes"].to_pylist()
        return len(sizes), sum(sizes)

    def check_one_commit(self) -> None:
        """Raise UsageError for a table with features outside of the profile."""
        if not self.sink.direct:
            raise UsageError(
                f"table {self.name} has constraints or features that a publish in one commit cannot keep",
                "a recovery of such a table is not offered; see docs/recover.md",
            )

    def check_removable(self) -> None:
        """Raise UsageError for a table that is append-only."""
        if self.sink.handle.metadata().configuration.get("delta.appendOnly") == "true":
            raise UsageError(
                f"table {self.name} is append-only (delta.appendOnly): a publish takes the wrong rows out, and the "
                "table refuses that",
                f"let it take rows out: ALTER TABLE delta.`{self.path}` UNSET TBLPROPERTIES ('delta.appendOnly')",
            )


def delta_content(content: Content) -> DeltaContent:
    """A content as files; a table receives only contents of its store."""
    assert isinstance(content, DeltaContent)
    return content
