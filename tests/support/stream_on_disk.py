"""The simulator of a stream on disk: what pipeline and Spark leave there, batch by batch, without either.

Tables are real ones, of any store; the checkpoint is laid out as Spark 4.2 does. A subclass says which offsets and rows
its batches have: `life.Life` (one table or two, of ids that may be wrong) and `worlds.Disk` (a table, another, and dead
letters).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

import pyarrow as pa
from deltalake import write_deltalake
from pyspark.sql.types import StructType

from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetBounds, OffsetRange, TopicOffsets
from streaming_jobs.preflight.snapshot import ledger_file
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.schemas import DEAD_LETTERS, LATE_RECORDS
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.sinks.tables import all_tables, existing_table, store_of
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state import stream_record
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.ledger_file import LedgerFile
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import BoundTable, BoundTopic, CodeSince, StreamRecord
from streaming_jobs.stream import Stream
from streaming_jobs.testing import MemoryTable


class OnePartition:
    """A topic of one partition, as an admin client would describe it."""

    def __init__(self, first: int = 0, end: int = 90, topic_id: str = "topic-1") -> None:
        self.first, self.end, self.topic_id = first, end, topic_id

    def describe(self, name: str) -> TopicInfo:
        return TopicInfo(name, self.topic_id, 1, -1, "delete")

    def offsets(self, _: str) -> OffsetBounds:
        return OffsetBounds({0: self.first}, {0: self.end})

    def latest(self, name: str) -> dict[int, int]:
        return self.offsets(name).latest

    def high_watermarks(self, name: str) -> dict[int, int]:
        return self.latest(name)


class StreamOnDisk:
    """One stream, from its first start on. Every batch reads `per_batch` offsets of each partition, by its number."""

    topic: ClassVar[str]
    topic_id: ClassVar[str]
    per_batch: ClassVar[Mapping[int, int]]
    columns: ClassVar[StructType]

    def __init__(self, settings: Settings, stream: Stream) -> None:
        self.settings, self.stream = settings, stream

    @abstractmethod
    def entry(self, batch: int, generation: int = 1) -> LedgerEntry:
        """The primary table's ledger entry of a batch."""

    def make(self, code: Iterable[CodeSince] = ()) -> Self:
        """The first start, up to where Spark is started: tables and record."""
        tables = []
        for declared, role in all_tables(self.stream):
            own = {
                self.stream.dead_letters: DEAD_LETTERS,
                **dict.fromkeys(self.stream.late_tables.values(), LATE_RECORDS),
            }
            columns = own.get(declared.name, self.columns)
            table = store_of(declared).ensure(self.settings, declared, self.stream.name, columns, generation=1)
            tables.append(BoundTable(declared.name, table.table_id, role))
        topic = BoundTopic(self.topic, self.topic_id, dict.fromkeys(self.per_batch, 0))
        first = stream_record.first(self.stream.name)
        self.save(replace(first, tables=tuple(tables), topics=(topic,), code=tuple(code), tag=None))
        return self

    def ends(self, batch: int) -> TopicOffsets:
        """The end of a batch; -1 gives where the stream begins."""
        return {self.topic: {partition: count * (batch + 1) for partition, count in self.per_batch.items()}}

    def offsets(self, batch: int) -> OffsetRange:
        """The range that a batch reads."""
        return OffsetRange(self.topic, self.topic_id, self.ends(batch - 1)[self.topic], self.ends(batch)[self.topic])

    def checkpoint(self, generation: int = 1) -> Checkpoint:
        """The checkpoint of a generation."""
        return StreamFolder.of(self.settings, self.stream.name).checkpoint(generation)

    @property
    def record(self) -> StreamRecord:
        """The record on disk."""
        record = stream_record.load(self.settings, self.stream.name)
        assert record is not None
        return record

    def save(self, record: StreamRecord) -> None:
        """Write the record."""
        stream_record.save(self.settings, record)

    @property
    def ledger_file(self) -> LedgerFile:
        """The ledger beside the state."""
        return ledger_file(self.settings, self.stream.name)

    def stored(self, name: str | None = None) -> StoredTable:
        """A table at rest, opened anew; the primary one, if none is named."""
        declared = {each.name: each for each, _ in all_tables(self.stream)}
        return existing_table(self.settings, declared[name or self.stream.primary.name], self.stream.name)

    def at(self) -> Txn | None:
        """The position of the primary table."""
        return self.stored().position

    def plan(self, batch: int, *, generation: int = 1) -> None:
        """Spark logs where a batch is to end."""
        lay_offsets(self.checkpoint(generation).folder, batch, self.ends(batch), starts=self.ends(-1))

    def finish(self, batch: int, *, generation: int = 1) -> None:
        """Spark notes that the batch is done."""
        lay_commit(self.checkpoint(generation).folder, batch)


def append(table: StoredTable, rows: pa.Table, entry: LedgerEntry) -> int | None:
    """A batch's rows into a table of any store, as a batch on the driver path does."""
    if isinstance(table, MemoryTable):
        return table.append(rows, entry)
    assert isinstance(table, DeltaSink)
    return table.commit(
        entry,
        lambda handle, how: write_deltalake(handle, rows, mode="append", schema_mode="merge", commit_properties=how),
    )


def lay_offsets(folder: Path, batch: int, ends: TopicOffsets, *, starts: TopicOffsets, watermark: int = 0) -> None:
    """Add `offsets/<batch>` to a checkpoint, as Spark 4.2 writes it; what is there already stays."""
    for name in ("offsets", "commits", "sources/0"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    metadata = {
        "batchWatermarkMs": watermark,
        "batchTimestampMs": 1_795_255_789_437,
        "conf": {"spark.sql.shuffle.partitions": "2"},
    }
    _write_once(folder / "metadata", '{"id":"d1232a21-48ec-49aa-80a3-815ce12b0714"}')
    _write_once(folder / "sources" / "0" / "0", f"\0v1\n{as_json(starts)}")
    _write_once(folder / "offsets" / str(batch), f"v1\n{json.dumps(metadata)}\n{as_json(ends)}")


def lay_commit(folder: Path, batch: int) -> None:
    """Add `commits/<batch>` to a checkpoint."""
    _write_once(folder / "commits" / str(batch), 'v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{}}')


def as_json(value: TopicOffsets) -> str:
    """Offsets as Spark's Kafka source writes them."""
    return json.dumps(value, separators=(",", ":"))


def _write_once(path: Path, text: str) -> None:
    if not path.exists():
        path.write_text(text)
