"""The primary table of a stream that writes no other Delta table: a ledger entry for each batch.

For the topics of the stream, it has a row for each batch and partition, with its offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite
from streaming_jobs.sinks.stored import StoredTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_COLUMNS = pa.schema(
    [
        ("generation", pa.int32()),
        ("batch", pa.int64()),
        ("topic", pa.string()),
        ("topic_id", pa.string()),
        ("partition", pa.int32()),
        ("first_offset", pa.int64()),
        ("end_offset", pa.int64()),
        ("records", pa.int64()),
    ]
)

WrittenBy = Callable[[Txn], Sequence[WrittenRange]]
"""The offsets that a batch wrote, once it is in its topics."""


@dataclass
class BatchesSink:
    """The table as the primary sink; its rows are known once the topics have the batch."""

    table: StoredTable
    written: WrittenBy

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def position(self) -> Txn | None:
        return self.table.position

    @property
    def version(self) -> int:
        return self.table.version

    def refresh(self) -> None:
        self.table.refresh()

    def newest_entry(self) -> LedgerEntry | None:
        return self.table.newest_entry()

    def sync(self) -> None:
        self.table.sync()

    def fit(self, output: DataFrame, topics: Sequence[str]) -> DataFrame:  # noqa: ARG002 - of every sink
        """The output as it is: it belongs to a sink outside of the store of tables."""
        return output

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> PendingWrite:  # noqa: ARG002
        return BatchesWrite(self, Txn(rows.generation, rows.batch))


@dataclass
class BatchesWrite(PendingWrite):
    """The rows of one batch; called after its topics have been written."""

    sink: BatchesSink
    txn: Txn

    @property
    def name(self) -> str:
        return self.sink.name

    @property
    def rows(self) -> int:
        """The number of partitions that the batch wrote to."""
        return len(self.sink.written(self.txn))

    def commit(self, entry: LedgerEntry) -> int | None:
        return self.sink.table.append(batches_rows(self.txn, self.sink.written(self.txn)), entry)


def batches_rows(txn: Txn, written: Sequence[WrittenRange]) -> pa.Table:
    rows = [
        {
            "generation": txn.generation,
            "batch": txn.batch,
            "topic": r.topic,
            "topic_id": r.topic_id,
            "partition": r.partition,
            "first_offset": r.first,
            "end_offset": r.end,
            "records": r.records,
        }
        for r in written
    ]
    return pa.Table.from_pylist(rows, schema=_COLUMNS)
