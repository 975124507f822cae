"""A table of PostgreSQL as a sink of a stream's batches (`sinks/base.py`).

    output = PostgresOutput(declared, stream, generation, schema, settings, lease, folder)
    output.open()                                  makes the table, fences every older driver
    pending = output.prepare(output.fit(frame, topics), rows)
    pending.commit(entry)                          one transaction: rows and entry, or neither

Rows are judged and reduced by the engine of Delta tables (`sinks/delta/row_engine.py`), before the transaction begins:
both kinds of table keep the same row of a key. `DiscardedTable` is for replays beside the running stream.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from streaming_jobs.declare.columns import DETAIL_COLUMN, REASON_COLUMN
from streaming_jobs.declare.postgres_table import PostgresTable
from streaming_jobs.errors import LedgerConflict
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.settings import PostgresSettings
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite, WriteLease
from streaming_jobs.sinks.delta.fitting import fitted, has_place
from streaming_jobs.sinks.delta.row_engine import RowEngine
from streaming_jobs.sinks.delta.upsert_order import order_of
from streaming_jobs.sinks.postgres.database import Database
from streaming_jobs.sinks.postgres.ledger import DatabaseLedger, LedgerRow, has, refuse_older, refuse_other_stream
from streaming_jobs.sinks.postgres.statements import TableWriter
from streaming_jobs.sinks.postgres.tables import ensure_tables
from streaming_jobs.sinks.waiting_rows import WaitingRows, listed, read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_SCRATCH = "_postgres"
NUL = "nul_character"
_DETAIL = "a text of the output row has the character NUL, which PostgreSQL does not store"


@dataclass
class PreparedRows:
    """Judged rows of one batch, of an upsert one event per key; `rejected` become dead letters."""

    written: pa.Table
    rejected: pa.Table | None
    engine: RowEngine


@dataclass
class PostgresWrite(PendingWrite):
    """Rows of one batch for one table; nothing of them is sent yet."""

    output: PostgresOutput
    prepared: PreparedRows

    @property
    def name(self) -> str:
        return self.output.name

    @property
    def rows(self) -> int:
        """The number of rows, deletes included."""
        return int(self.prepared.written.num_rows)

    def commit(self, entry: LedgerEntry) -> int | None:
        """Write rows and entry once; the position's number, or None if the batch was there already."""
        with self.writing():
            wrote = self.output.write(entry, self.prepared)
        return entry.txn.version if wrote else None


@dataclass
class JudgedTable:
    """The columns and rows of a table's batches, without the database."""

    declared: PostgresTable
    schema: StructType
    """The columns that the stream writes, `_position` among them."""
    folder: Path
    """The folder below which large batches wait in files."""

    @property
    def name(self) -> str:
        return self.declared.ledger_name

    def sync(self) -> None:
        """Nothing: the database has synced what it has committed."""

    def fit(self, output: DataFrame, topics: Sequence[str]) -> DataFrame:
        """The output in the table's columns, and the place of each row's record."""
        return fitted(self.declared, self.schema, output, topics)

    def judged(self, frame: DataFrame, rows: BatchOfRows) -> PreparedRows:
        """Compute the rows; raises OutputMismatch for a key with several rows of which none is the last."""
        order = order_of(self.schema, self.declared.order_by, by_position=has_place(frame))
        batch = (rows.generation, rows.batch)
        engine = RowEngine(self.declared, self.schema, order, batch=batch, topics=tuple(rows.topics))
        table, refused = _without_nul(self._computed(frame, rows))
        made = engine.divide(table)
        rejected = [] if made.rejected is None else [made.rejected]
        if refused is not None:
            rejected.append(engine.returned(refused))
        both = pa.concat_tables(rejected, promote_options="default") if rejected else None
        return PreparedRows(made.written, both, engine)

    @property
    def waiting(self) -> WaitingRows:
        return WaitingRows(self.folder / _SCRATCH / self.declared.name)

    def _computed(self, frame: DataFrame, rows: BatchOfRows) -> pa.Table:
        """The rows in this process: through the JVM's memory, or, if there may be too many, through files."""
        if rows.driver:
            return frame.toArrow()
        folder = self.waiting.write(frame, rows)
        try:
            return pa.Table.from_batches(read(listed(folder)))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


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
            if self.lease is not None and row.epoch > self.lease.epoch:
                self.lease.exceed(row.epoch)  # leases were lost, or the table comes from a copy
            refuse_older(row, self.generation, self.declared.name, self.lease)
            ensure_tables(connection, self._database, self.declared, self.schema)
            entry = row.entry if row.entry.generation == self.generation else first
            self._ledger.save(connection, entry, max(row.epoch, self._epoch))
        self.newest = entry

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

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> PostgresWrite:
        prepared = self.judged(frame, rows)
        return PostgresWrite(output=self, prepared=prepared, rejected=prepared.rejected)

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
            writer = TableWriter(self._database, self.declared, self.schema, prepared.engine.order)
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


@dataclass
class DiscardedTable(JudgedTable):
    """Judges every row and writes none."""

    @property
    def position(self) -> Txn | None:
        return None

    @property
    def version(self) -> int:
        return -1

    def refresh(self) -> None:
        """Nothing is read."""

    def newest_entry(self) -> LedgerEntry | None:
        return None

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> DiscardedWrite:
        prepared = self.judged(frame, rows)
        return DiscardedWrite(output=self, prepared=prepared, rejected=prepared.rejected)

    def take(self, entry: LedgerEntry, prepared: PreparedRows) -> None:
        """What a double that keeps rows does with them."""


@dataclass
class DiscardedWrite(PendingWrite):
    """Rows that go nowhere."""

    output: DiscardedTable
    prepared: PreparedRows

    @property
    def name(self) -> str:
        return self.output.name

    @property
    def rows(self) -> int:
        return int(self.prepared.written.num_rows)

    def commit(self, entry: LedgerEntry) -> int | None:
        self.output.take(entry, self.prepared)
        return entry.txn.version


def _without_nul(rows: pa.Table) -> tuple[pa.Table, pa.Table | None]:
    """Rows without the character NUL in a text, and the others with their reason; None if there are none."""
    bad = None
    for column in rows.columns:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            found = pc.fill_null(pc.match_substring(column, "\0"), False)
            bad = found if bad is None else pc.or_(bad, found)
    if bad is None or not pc.any(bad, min_count=0).as_py():
        return rows, None
    refused = rows.filter(bad)
    for name, text in ((REASON_COLUMN, NUL), (DETAIL_COLUMN, _DETAIL)):
        refused = refused.append_column(name, pa.array([text] * refused.num_rows, pa.string()))
    return rows.filter(pc.invert(bad)), refused
