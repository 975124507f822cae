"""The tables of a stream, in order and with their roles, each opened by the store that keeps it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from streaming_jobs.declare.columns import checked_order
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import Content, Role, StoredTable, TableStore
from streaming_jobs.storage.locations import Location, remove_tree
from streaming_jobs.stream import Stream

_DELTA = "streaming_jobs.sinks.delta.store"
"""Imported with the first table that is opened: whoever only reads declarations needs no deltalake."""
_STORES: dict[type, Callable[[DeclaredTable], TableStore]] = {}


def register(declaration: type, store: Callable[[DeclaredTable], TableStore]) -> None:
    """Have tables of this kind of declaration opened by the store that the function returns."""
    _STORES[declaration] = store


def store_of(declared: DeclaredTable) -> TableStore:
    """The store that keeps a declared table: the one of Delta tables, unless another is registered."""
    if (registered := _STORES.get(type(declared))) is not None:
        return registered(declared)
    delta: TableStore = importlib.import_module(_DELTA).STORE
    return delta


def all_tables(stream: Stream) -> list[tuple[DeclaredTable, Role]]:
    """Every table of a stream with its role, the primary first and the dead letters last."""
    return [
        (stream.primary, "primary"),
        *((table, "secondary") for table in stream.secondary),
        *((table, "deletes") for table in stream.deletes),
        *((table, "quarantine") for table in quarantines(stream).values()),
        *((table, "late") for table in late_tables(stream).values()),
        (dead_letters(stream), "secondary"),
    ]


def dead_letters(stream: Stream) -> DeclaredTable:
    """The table of the records that a stream refuses, in the store of its primary table."""
    # Its types are PySpark's, which takes long to import.
    from streaming_jobs.sinks.schemas import DEAD_LETTERS

    description = f"Records that the stream {stream.name} refused, and why"
    return store_of(stream.primary).companion(stream.dead_letters, description, schema=DEAD_LETTERS)


def quarantines(stream: Stream) -> dict[str, DeclaredTable]:
    """The quarantines of a stream's tables, by the name of the table whose rows they take."""
    declared = {sink.name: sink for sink in stream.sinks.values()}
    return {
        table: store_of(declared[table]).companion(
            name, f"Rows that stream {stream.name} did not write to {table}, and why", owners=declared[table].owners
        )
        for table, name in stream.quarantines.items()
    }


def late_tables(stream: Stream) -> dict[str, DeclaredTable]:
    """The tables of a stream's late records, by the name of the table whose windows lack them."""
    if not stream.late_tables:
        return {}
    # Its types are PySpark's, which takes long to import.
    from streaming_jobs.sinks.schemas import LATE_RECORDS

    declared = {sink.name: sink for sink in stream.sinks.values()}
    return {
        table: store_of(declared[table]).companion(
            name,
            f"Records that came too late for a window of {table}",
            owners=declared[table].owners,
            schema=LATE_RECORDS,
        )
        for table, name in stream.late_tables.items()
    }


def stores(stream: Stream) -> list[TableStore]:
    """The stores of a stream's tables, each once."""
    return list({id(store): store for store in (store_of(declared) for declared, _ in all_tables(stream))}.values())


def open_table(settings: Settings, declared: DeclaredTable, stream: str) -> StoredTable | None:
    """One table; None if it does not exist."""
    return store_of(declared).open(settings, declared, stream)


def open_tables(settings: Settings, stream: Stream) -> dict[str, StoredTable]:
    """The stream's tables that exist, by name, in order."""
    opened = (open_table(settings, declared, stream.name) for declared, _ in all_tables(stream))
    return {table.name: table for table in opened if table is not None}


def existing_table(settings: Settings, declared: DeclaredTable, stream: str) -> StoredTable:
    """One table; raises PreflightRefused if it does not exist."""
    table = open_table(settings, declared, stream)
    if table is None:
        raise PreflightRefused(f"table {declared.name} is gone", "put it back from a copy")
    return table


def copied_table(
    settings: Settings, folder: Location, declared: DeclaredTable, stream: str, content: Content
) -> StoredTable:
    """A table with a content of the declared one, in another folder; it has no ledger entry."""
    return store_of(declared).create(settings.with_tables(folder), declared, stream, content, None)


def remove_tables(folder: Location, stream: Stream) -> None:
    """Remove the stream's tables at a location: of a folder, the folder; on a store, their logs alone.

    Their files there may have become files of the tables beside which they were staged.
    """
    if isinstance(folder, Path):
        remove_tree(folder)
        return
    for declared, _ in all_tables(stream):
        remove_tree(folder / declared.name / "_delta_log")


def begin_late(settings: Settings, stream: Stream, *, generation: int) -> None:
    """Make the tables of remembered deletes, quarantined rows and late records that a stream has not made yet."""
    # Their types are PySpark's, which takes long to import.
    from streaming_jobs.sinks.schemas import LATE_RECORDS, deletes_of, quarantine_of

    aside, late = quarantines(stream), late_tables(stream)
    for declared in stream.sinks.values():
        table = open_table(settings, declared, stream.name)
        if table is None:
            continue
        deletes, quarantine = declared.deletes, aside.get(declared.name)
        if deletes is not None and open_table(settings, deletes, stream.name) is None:
            checked_order(declared.name, declared.order_by, table.schema)
            output = deletes_of(declared, table.schema)
            store_of(deletes).ensure(settings, deletes, stream.name, output, generation=generation)
        if quarantine is not None and open_table(settings, quarantine, stream.name) is None:
            output = quarantine_of(declared.name, table.schema)
            store_of(quarantine).ensure(settings, quarantine, stream.name, output, generation=generation)
        kept = late.get(declared.name)
        if kept is not None and open_table(settings, kept, stream.name) is None:
            store_of(kept).ensure(settings, kept, stream.name, LATE_RECORDS, generation=generation)
