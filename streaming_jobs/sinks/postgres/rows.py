"""The rows of a batch for a table of PostgreSQL, judged and reduced without the database.

The engine is that of Delta tables (`sinks/delta/row_engine.py`): both kinds of table keep the same row of a key.
`DiscardedTable` is for replays beside the running stream, which write none.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from streaming_jobs.declare.columns import DETAIL_COLUMN, REASON_COLUMN
from streaming_jobs.declare.postgres_table import PostgresTable
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.platform.collected import to_arrow
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite
from streaming_jobs.sinks.delta.fitting import fitted, has_place
from streaming_jobs.sinks.delta.row_engine import RowEngine
from streaming_jobs.sinks.delta.upsert_order import EventOrder, order_of
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
    order: EventOrder


@dataclass
class JudgedTable(ABC):
    """The columns and rows of a table's batches, without the database."""

    declared: PostgresTable
    schema: StructType
    """The columns that the stream writes, `_position` among them."""
    folder: Path
    """The folder below which large batches wait in files."""

    @property
    def name(self) -> str:
        return self.declared.ledger_name

    def sync(self) -> None:  # noqa: B027 - of every sink
        """Nothing: the database has synced what it has committed."""

    def fit(self, output: DataFrame, topics: Sequence[str]) -> DataFrame:
        """The output in the table's columns, and the place of each row's record."""
        return fitted(self.declared, self.schema, output, topics)

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> JudgedWrite:
        """Compute and judge the rows; raises OutputMismatch as `judged` does."""
        prepared = self.judged(frame, rows)
        return JudgedWrite(output=self, prepared=prepared, rejected=prepared.rejected)

    @abstractmethod
    def write(self, entry: LedgerEntry, prepared: PreparedRows) -> bool:
        """Write a batch with its entry; False if the table has the batch already."""

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
        return PreparedRows(made.written, both, order)

    @property
    def waiting(self) -> WaitingRows:
        return WaitingRows(self.folder / _SCRATCH / self.declared.name)

    def _computed(self, frame: DataFrame, rows: BatchOfRows) -> pa.Table:
        """The rows in this process: through the JVM's memory, or, if there may be too many, through files."""
        if rows.driver:
            return to_arrow(frame)
        folder = self.waiting.write(frame, rows)
        try:
            files = listed(folder)
            return pa.Table.from_batches(read(files), pq.read_schema(files[0]))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class JudgedWrite(PendingWrite):
    """Judged rows of one batch for one table; none of them is written yet."""

    output: JudgedTable
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

    def write(self, entry: LedgerEntry, prepared: PreparedRows) -> bool:  # noqa: ARG002
        """True: nothing is kept; a double of tests keeps the rows."""
        return True


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
