"""The ledger in the database: one row for each table that a stream writes, with the entry of its newest batch.

The row is locked before a batch is written and changed in the transaction that writes it, so the entry says of a batch
that it is in the table if and only if its rows are. Generation and epoch in the row fence older drivers: the driver
whose lease is of an earlier epoch finds a later one there, and ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from psycopg import sql

from streaming_jobs.declare.postgres_table import LEDGER_TABLE
from streaming_jobs.errors import Fenced, LedgerConflict
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import PostgresSettings
from streaming_jobs.sinks.base import WriteLease, refuse_later_epoch
from streaming_jobs.sinks.postgres.database import Connection, Database

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAKE = sql.SQL(
    """CREATE TABLE IF NOT EXISTS {ledger} (
    table_name text PRIMARY KEY,
    stream text NOT NULL,
    generation integer NOT NULL,
    batch bigint NOT NULL,
    epoch bigint NOT NULL,
    entry text NOT NULL,
    changed_at timestamptz NOT NULL DEFAULT now()
)"""
)
_READ = sql.SQL("SELECT stream, epoch, entry FROM {ledger} WHERE table_name = %s")
_LOCK = sql.SQL("SELECT stream, epoch, entry FROM {ledger} WHERE table_name = %s FOR UPDATE")
_BEGIN = sql.SQL(
    """INSERT INTO {ledger} (table_name, stream, generation, batch, epoch, entry) VALUES (%s, %s, %s, %s, %s, %s)
ON CONFLICT (table_name) DO NOTHING"""
)
_SAVE = sql.SQL(
    """UPDATE {ledger} SET generation = %s, batch = %s, epoch = %s, entry = %s, changed_at = now()
WHERE table_name = %s"""
)
_MAKING = 7203466
"""The advisory lock under which the ledger is made: of two sessions that make it at the same time one would fail."""


@dataclass(frozen=True)
class LedgerRow:
    """The newest batch in a table, and the epoch of the lease under which the row was written last."""

    stream: str
    epoch: int
    entry: LedgerEntry


def exists(connection: Connection, database: Database, table: str) -> bool:
    """True if the schema has a table of this name that the user may see."""
    row = connection.execute("SELECT to_regclass(%s) IS NOT NULL", [database.name(table).as_string(connection)])
    return row.fetchone() == (True,)


@dataclass(frozen=True)
class DatabaseLedger:
    """The row of one table. Every method needs an open transaction."""

    database: Database
    stream: str
    table: str

    def begin(self, connection: Connection, entry: LedgerEntry) -> LedgerRow:
        """The locked row, made with this entry and epoch 0 if there is none; the ledger is created if it is missing."""
        if not exists(connection, self.database, LEDGER_TABLE):  # an existing one needs no right to create tables
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
            connection.execute(self._about(_MAKE))
        values = (self.table, self.stream, entry.generation, entry.batch, 0, entry.encode())
        connection.execute(self._about(_BEGIN), values)
        row = self.lock(connection)
        assert row is not None
        return row

    def read(self, connection: Connection) -> LedgerRow | None:
        return self._row(connection, _READ) if exists(connection, self.database, LEDGER_TABLE) else None

    def lock(self, connection: Connection) -> LedgerRow | None:
        """The row, which no other transaction can lock or change until this one ends; waits for another one."""
        return self._row(connection, _LOCK)

    def save(self, connection: Connection, entry: LedgerEntry, epoch: int) -> None:
        """Change the locked row."""
        values = (entry.generation, entry.batch, epoch, entry.encode(), self.table)
        connection.execute(self._about(_SAVE), values)

    def _row(self, connection: Connection, statement: sql.SQL) -> LedgerRow | None:
        row = cast("Sequence[object] | None", connection.execute(self._about(statement), [self.table]).fetchone())
        if row is None:
            return None
        stream, epoch, text = row
        entry = LedgerEntry.decode(str(text))
        if entry is None:
            raise LedgerConflict(
                f"the entry of table {self.table} in {LEDGER_TABLE} cannot be read",
                "put the table and its ledger back from one copy",
            )
        return LedgerRow(str(stream), int(cast("int", epoch)), entry)

    def _about(self, statement: sql.SQL) -> sql.Composed:
        return statement.format(ledger=self.database.name(LEDGER_TABLE))


def refuse_other_stream(row: LedgerRow, stream: str, table: str) -> None:
    """Raise LedgerConflict if another stream writes the table."""
    if row.stream != stream:
        raise LedgerConflict(
            f"stream {row.stream} writes the PostgreSQL table {table}, says {LEDGER_TABLE}",
            f"give stream {stream} a table of its own",
        )


def exceed(lease: WriteLease | None, epoch: int, name: str) -> None:
    """Make the lease's epoch greater than the table's, as `StoredTable.under` does; `name` is the ledger's."""
    if lease is None:
        return
    # Of the same epoch it is another session's: both have taken the lease (docs/fencing.md).
    doubled = lease.expires and epoch == lease.epoch and (name, epoch) not in lease.fenced
    if epoch > lease.epoch or doubled:
        lease.exceed(epoch)


def refuse_older(row: LedgerRow, generation: int, table: str, lease: WriteLease | None) -> None:
    """Raise Fenced if the table is in a newer generation or a later epoch, LeaseLost if the lease has run out."""
    if (at := row.entry.generation) > generation:
        raise Fenced(
            f"table {table} is in generation {at}, this driver belongs to {generation}",
            "let this driver end; the newer generation continues without it",
        )
    refuse_later_epoch(table, row.epoch, lease)


def has(row: LedgerRow, entry: LedgerEntry, table: str) -> bool:
    """True if the table's newest batch is this one; raises LedgerConflict for a later batch, or other offsets."""
    at = row.entry
    if at.txn < entry.txn:
        return False
    if at.txn != entry.txn or not at.same_offsets(entry):
        how = f"is at {at.txn}" if at.txn != entry.txn else "has it with other offsets"
        raise LedgerConflict(
            f"{entry.txn} is to be written to the PostgreSQL table {table}, which {how}",
            "put the checkpoint back that belongs to the table; look for a second driver with another state folder",
        )
    return True


def take_over(
    settings: PostgresSettings, stream: str, table: str, lease: WriteLease | None, at: LedgerEntry | None = None
) -> LedgerRow | None:
    """Fence the drivers of earlier leases; returns the table's row as it was, None if it has none.

    The table stays at its batch, or continues at `at`, which may be of a later generation. May be repeated. Raises
    Fenced for a table in a newer generation than that, LeaseLost, LedgerConflict for a later batch or another stream.
    """
    database = Database(settings, stream)
    ledger = DatabaseLedger(database, stream, table)
    try:
        with database.transaction(f"fencing table {table}") as connection:
            row = ledger.lock(connection) if exists(connection, database, LEDGER_TABLE) else None
            if row is None:
                return None
            refuse_other_stream(row, stream, table)
            entry = at or row.entry
            exceed(lease, row.epoch, entry.table)
            refuse_older(row, entry.generation, table, lease)
            if row.entry.txn > entry.txn:
                raise LedgerConflict(
                    f"the PostgreSQL table {table} is to continue at {entry.txn}, and is at {row.entry.txn}",
                    "look for a driver of the stream with another state folder",
                )
            ledger.save(connection, entry, row.epoch if lease is None else lease.epoch)
        if lease is not None:
            lease.fenced.add((entry.table, lease.epoch))
        return row
    finally:
        database.close()


def look(settings: PostgresSettings, stream: str, table: str) -> tuple[bool, LedgerRow | None]:
    """Whether a table exists, and its row, by a connection of its own. Changes nothing."""
    database = Database(settings, stream)
    try:
        with database.transaction(f"reading the ledger of table {table}") as connection:
            return exists(connection, database, table), DatabaseLedger(database, stream, table).read(connection)
    finally:
        database.close()
