"""A table of PostgreSQL as a sink of a stream's batches (`sinks/base.py`).

    output = PostgresOutput(declared, schema, folder, stream, generation, settings, lease)
    output.open()                                  makes the table, fences every older driver
    pending = output.prepare(output.fit(frame, topics), rows)
    pending.commit(entry)                          one transaction: rows and entry, or neither

All rows are computed and judged (`rows.py`) before the transaction begins, which lasts only as long as writing takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from streaming_jobs.errors import LedgerConflict
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.settings import PostgresSettings
from streaming_jobs.sinks.base import WriteLease
from streaming_jobs.sinks.postgres.database import Database
from streaming_jobs.sinks.postgres.ledger import (
    DatabaseLedger,
    LedgerRow,
    exceed,
    has,
    refuse_older,
    refuse_other_stream,
)
from streaming_jobs.sinks.postgres.rows import JudgedTable, PreparedRows
from streaming_jobs.sinks.postgres.statements import TableWriter
from streaming_jobs.sinks.postgres.tables import ensure_tables


@dataclass
class PostgresOutput(JudgedTable):
    """The table itself. Not for two threads at once."""

    stream: str
    generation: int
    settings: PostgresSettings
    lease: WriteLease | None = None
    before_commit: Callable[[int], None] = lambda _: None
    newest: LedgerEntry | None = field(default=None, init=False)
    """The entry of the newest batch, as of the last `open`, `refresh` or commit."""
    _database: Database = field(init=False)
    _ledger: DatabaseLedger = field(init=False)

    def __post_init__(self) -> None:
        self._database = Database(self.settings, self.stream)
        self._ledger = DatabaseLedger(self._database, self.stream, self.declared.name)

    def open(self) -> None:
        """Make or widen the table, and put generation and epoch into the ledger: older drivers are fenced.

        Raises Fenced, LeaseLost, LedgerConflict for a table of another stream, OutputMismatch, DatabaseRefused and
        DatabaseUnavailable.
        """
        self.waiting.remove_leftovers()
        first = LedgerEntry("batch", self.stream, self.name, self.generation, -1)
        with self._database.transaction(f"opening table {self.declared.name}") as connection:
            row = self._ledger.begin(connection, first)
            refuse_other_stream(row, self.stream, self.declared.name)
            exceed(self.lease, row.epoch, self.name)
            refuse_older(row, self.generation, self.declared.name, self.lease)
            ensure_tables(connection, self._database, self.declared, self.schema)
            entry = row.entry if row.entry.generation == self.generation else first
            self._ledger.save(connection, entry, max(row.epoch, self._epoch))
        self.newest = entry
        if self.lease is not None:
            self.lease.fenced.add((self.name, self.lease.epoch))

    @property
    def position(self) -> Txn | None:
        return None if self.newest is None else self.newest.txn

    @property
    def version(self) -> int:
        at = self.position
        return -1 if at is None else at.version

    def refresh(self) -> None:
        """Read the newest entry: after a failed commit nobody else knows whether it was made."""
        with self._database.transaction(f"reading the ledger of table {self.declared.name}") as connection:
            row = self._ledger.read(connection)
        self.newest = None if row is None else row.entry

    def newest_entry(self) -> LedgerEntry | None:
        return self.newest

    def write(self, entry: LedgerEntry, prepared: PreparedRows) -> bool:
        """Write the batch in one transaction with its entry; False if it is there already.

        Raises Fenced, LeaseLost, LedgerConflict, DatabaseRefused and DatabaseUnavailable.
        """
        table = self.declared.name
        with self._database.transaction(f"writing batch {entry.batch} to table {table}") as connection:
            row = self._there(self._ledger.lock(connection))
            refuse_older(row, entry.generation, table, self.lease)
            if has(row, entry, table):
                self.newest = row.entry
                return False
            writer = TableWriter(self._database, self.declared, self.schema, prepared.order)
            if self.declared.mode == "upsert":
                writer.upsert(connection, prepared.written)
            else:
                writer.append(connection, prepared.written)
            self._ledger.save(connection, entry, max(row.epoch, self._epoch))
            self.before_commit(entry.batch)
        self.newest = entry
        return True

    def close(self) -> None:
        self._database.close()

    @property
    def _epoch(self) -> int:
        return 0 if self.lease is None else self.lease.epoch

    def _there(self, row: LedgerRow | None) -> LedgerRow:
        if row is None:
            raise LedgerConflict(
                f"the ledger has no row of table {self.declared.name} any more: nobody knows which batches it has",
                "put the table and its ledger back from one copy",
            )
        return row
