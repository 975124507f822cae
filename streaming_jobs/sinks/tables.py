"""The tables of a stream, in order and with their roles, each opened by the store that keeps it."""

from __future__ import annotations

from streaming_jobs.declare.columns import checked_order
from streaming_jobs.declare.table import DeclaredTable
from streaming_jobs.errors import PreflightRefused
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.stored import Role, StoredTable, TableStore
from streaming_jobs.stream import Stream


def store_of(declared: DeclaredTable) -> TableStore:
    """The store of a declared table, as a `TableStore`."""
    store: TableStore = declared.store
    return store


def all_tables(stream: Stream) -> list[tuple[DeclaredTable, Role]]:
    """Every table of a stream with its role, the primary first and the dead letters last."""
    letters = store_of(stream.primary).dead_letters(stream.dead_letters, stream.name)
    return [
        (stream.primary, "primary"),
        *((table, "secondary") for table in stream.secondary),
        *((table, "deletes") for table in stream.deletes),
        *((table, "quarantine") for table in quarantines(stream).values()),
        (letters, "secondary"),
    ]


def quarantines(stream: Stream) -> dict[str, DeclaredTable]:
    """The quarantines of a stream's tables, by the name of the table whose rows they take."""
    declared = {sink.name: sink for sink in stream.sinks.values()}
    return {
        table: store_of(declared[table]).quarantine(name, declared[table], stream.name)
        for table, name in stream.quarantines.items()
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


def begin_late(settings: Settings, stream: Stream, *, generation: int) -> None:
    """Make the remembered deletes and quarantines that a stream has not made since they are declared."""
    # Their types are PySpark's, which takes long to import.
    from streaming_jobs.sinks.schemas import quarantine_of, tombstones

    aside = quarantines(stream)
    for declared in stream.sinks.values():
        table = open_table(settings, declared, stream.name)
        if table is None:
            continue
        deletes, quarantine = declared.deletes, aside.get(declared.name)
        if deletes is not None and open_table(settings, deletes, stream.name) is None:
            checked_order(declared.name, declared.order_by, table.schema)
            output = tombstones(declared, table.schema)
            store_of(deletes).ensure(settings, deletes, stream.name, output, generation=generation)
        if quarantine is not None and open_table(settings, quarantine, stream.name) is None:
            output = quarantine_of(declared.name, table.schema)
            store_of(quarantine).ensure(settings, quarantine, stream.name, output, generation=generation)
