"""The Delta table of a stream that writes topics only: a row for each batch and partition, with its offsets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.settings import StreamSettings
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite
from streaming_jobs.sinks.delta.output import DeltaOutput
from streaming_jobs.sinks.delta.pending_writes import ArrowAppend, DeltaWrite
from streaming_jobs.sinks.delta.sink import DeltaSink

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


class BatchesTable(DeltaOutput):
    """The table as the primary sink; its rows are known once the topics have the batch."""

    def __init__(self, sink: DeltaSink, settings: StreamSettings, written: WrittenBy) -> None:
        super().__init__(sink, settings)
        self.written = written

    def fit(self, output: DataFrame, topics: Sequence[str]) -> DataFrame:  # noqa: ARG002 - of every sink
        """The output as it is: it belongs to a topic."""
        return output

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> PendingWrite:  # noqa: ARG002
        return BatchesWrite(self.sink, Txn(rows.generation, rows.batch), self.written)


@dataclass
class BatchesWrite(DeltaWrite):
    """The rows of one batch; asked for when its topics have been written."""

    txn: Txn
    written: WrittenBy

    @property
    def rows(self) -> int:
        """The number of partitions that the batch wrote to."""
        return len(self.written(self.txn))

    def commit(self, entry: LedgerEntry) -> int | None:
        return ArrowAppend(self.sink, batches_rows(self.txn, self.written(self.txn))).commit(entry)


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
