"""The table of batches of a stream that writes topics only, in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite
from streaming_jobs.testing.tables import NO_ROWS, MemoryTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass
class MemoryBatches(MemoryTable):
    """The primary table of a stream that writes topics only; `written` gives the offsets that a batch wrote."""

    written: Callable[[Txn], Sequence[WrittenRange]] = lambda _: ()

    def fit(self, output: DataFrame, topics: Sequence[str]) -> DataFrame:
        """The output as it is: it belongs to a topic."""
        return output

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> PendingWrite:
        """Rows that are known once the topics have the batch."""
        return MemoryBatch(self, Txn(rows.generation, rows.batch))


@dataclass
class MemoryBatch(PendingWrite):
    """The rows of one batch of a `MemoryBatches`."""

    sink: MemoryBatches
    txn: Txn

    @property
    def name(self) -> str:
        return self.sink.name

    @property
    def rows(self) -> int:
        """The number of partitions that the batch wrote to."""
        return len(self.sink.written(self.txn))

    def commit(self, entry: LedgerEntry) -> int | None:
        rows = [{"batch": self.txn.batch, **asdict(each)} for each in self.sink.written(self.txn)]
        return self.sink.append(pa.Table.from_pylist(rows) if rows else NO_ROWS, entry)
