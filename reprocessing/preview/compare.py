"""The comparison of a preview's tables with the published ones, at the cost of what differs.

Both sides share the files that the savepoint had and that neither has rewritten since: hard links of the same file.
Only the other files are read. That changes no result: a shared file has the same rows on both sides, so they cancel out
as multisets; and in a table with keys, a key of a shared file is in no other file of either side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from reprocessing.preview.folders import Folders
from reprocessing.rebuild.audit import Difference, compare
from reprocessing.rebuild.audit_sql import one, opened
from reprocessing.rebuild.publish import misfit
from streaming_jobs.declared_table import DeclaredTable
from streaming_jobs.sinks.stored import LATE, StoredTable
from streaming_jobs.sinks.tables import all_tables, existing_table, open_table, store_of
from streaming_jobs.stream import Stream


@dataclass(frozen=True)
class TableChange:
    """One table: the difference of its rows, columns that the code adds, and why its rows would not fit the table.

    The sums in `difference` are over `read` rows (published, rebuilt): those of files that are not the same.
    """

    difference: Difference
    read: tuple[int, int]
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
    here, there = published.content(), rebuilt.content()
    store = store_of(declared)
    old = store.create(folders.with_tables("differing_published"), declared, stream, here.without(there), None)
    new = store.create(folders.with_tables("differing_rebuilt"), declared, stream, there.without(here), None)
    difference = compare(declared.name, old.readable(), new.readable(), declared.keys)
    known = {column.name for column in published.schema.fields}
    return TableChange(
        replace(difference, old_rows=_rows(published), new_rows=_rows(rebuilt)),
        (difference.old_rows, difference.new_rows),
        tuple(column.name for column in rebuilt.schema.fields if column.name not in known),
        tuple(misfit(published, rebuilt)),
    )


def _rows(table: StoredTable) -> int:
    data = opened({"t": table.readable()})
    return int(one(data, 'SELECT count(*) AS n FROM "t"', table.name)["n"])
