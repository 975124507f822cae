"""The comparison of a preview's tables with the published ones."""

from __future__ import annotations

from dataclasses import dataclass

from reprocessing.preview.folders import Folders
from reprocessing.rebuild.audit import Difference, compare_stored
from reprocessing.rebuild.publish import misfit
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.sinks.stored import LATE, StoredTable
from streaming_jobs.sinks.tables import all_tables, existing_table, open_table
from streaming_jobs.stream import Stream


@dataclass(frozen=True)
class TableChange:
    """One table: the difference of its rows, columns that the code adds, and why its rows would not fit the table."""

    difference: Difference
    new_columns: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows that are corrected, new or gone."""
        return self.difference.corrected + self.difference.new + self.difference.gone

    @property
    def equal(self) -> bool:
        """True if the change leaves rows and columns as they are."""
        return not self.rows and not self.new_columns and not self.misfits


def compare_tables(folders: Folders, stream: Stream) -> tuple[TableChange, ...]:
    """Compare each table of the stream with the published one as of the border."""
    changes = []
    for declared, role in all_tables(stream):
        if role in LATE:
            continue
        published = open_table(folders.with_tables("published"), declared, stream.name)
        if published is None:  # a table that the stream does not have yet
            continue
        rebuilt = existing_table(folders.own(), declared, stream.name)
        changes.append(_change(folders, declared, stream.name, published, rebuilt))
    return tuple(changes)


def _change(
    folders: Folders, declared: DeclaredTable, stream: str, published: StoredTable, rebuilt: StoredTable
) -> TableChange:
    known = {column.name for column in published.schema.fields}
    return TableChange(
        compare_stored(folders.settings, folders.tables / "differing", declared, stream, published, rebuilt),
        tuple(column.name for column in rebuilt.schema.fields if column.name not in known),
        tuple(misfit(published, rebuilt)),
    )
