"""A topic as a sink of a stream's batches (`sinks/base.py`).

All rows are computed and judged before the transaction begins, which lasts only as long as sending takes. Rows that may
pass through the driver are held in its memory; others wait in Parquet files beside the stream's primary table, which
the executors write and the driver reads block by block; or, with shards, the executors keep and write them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.ledger.entry import LedgerEntry, Txn
from streaming_jobs.platform.collected import to_arrow
from streaming_jobs.settings import TopicSinkSettings
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite
from streaming_jobs.sinks.kafka.producer import Header
from streaming_jobs.sinks.kafka.rows import BatchRecords, KnownTopics, RowBlock, RowJudge, fitted
from streaming_jobs.sinks.kafka.sharded import ShardedWrite, ShardedWriter, prepare_shards
from streaming_jobs.sinks.kafka.writer import Writer
from streaming_jobs.sinks.waiting_rows import WaitingRows, listed, read
from streaming_jobs.sources.record_blocks import FIRST_READ

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SCRATCH = "_topics"


@dataclass
class TopicWrite(PendingWrite):
    """Judged rows of one batch for one topic; nothing of them is sent yet."""

    writer: Writer
    records: BatchRecords
    scratch: Path | None = None
    table: pa.Table | None = None

    @property
    def name(self) -> str:
        return self.records.judge.sink.ledger_name

    @property
    def rows(self) -> int:
        return self.records.count

    def commit(self, entry: LedgerEntry) -> int | None:
        """Write the records once; the position's number, or None if the batch was there already."""
        with self.writing():
            wrote = self.writer.write(entry, self.records)
        return entry.txn.version if wrote else None

    def close(self) -> None:
        """Remove the files that the executors have written."""
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)


@dataclass
class TopicOutput:
    """A stream's topic; `folder` is that of its primary table, where large batches wait in files."""

    declared: KafkaSink
    stream: str
    settings: TopicSinkSettings
    writer: Writer
    topics: KnownTopics
    folder: Path

    @property
    def name(self) -> str:
        return self.declared.ledger_name

    @property
    def position(self) -> Txn | None:
        """The newest batch in the topic; None if it delivers at least once, since the topic does not say."""
        return self.writer.position

    @property
    def version(self) -> int:
        at = self.position
        return -1 if at is None else at.version

    def refresh(self) -> None:
        """Nothing: until this producer is fenced, no other producer can write."""

    def newest_entry(self) -> LedgerEntry | None:
        return self.writer.newest

    def sync(self) -> None:
        """Nothing: the broker has acknowledged it."""

    def fit(self, output: DataFrame, topics: Sequence[str]) -> DataFrame:  # noqa: ARG002 - of every sink
        """The output in the topic's columns; raises OutputMismatch."""
        return fitted(self.declared, output)

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> TopicWrite | ShardedWrite:
        """Compute and judge the rows; raises PermanentError for a topic that does not exist, by choice."""
        self.topics.forget()
        if isinstance(self.writer, ShardedWriter) and self.writer.by_shards(rows):
            headers = tuple(self._headers(rows))
            return prepare_shards(self.writer, self.declared, self.topics[self.declared.name], headers, frame)
        judge = RowJudge(self.declared, self.topics, self._headers(rows))
        if rows.driver:
            answer = None if self.declared.route else self.topics.ask_ahead(self.declared.name)
            table = to_arrow(frame)  # the broker answers meanwhile
            if answer is not None and table.num_rows:
                answer()
            blocks = list(judge.blocks(iter([table])))
            count = _written(blocks)
            records = BatchRecords(judge, blocks, count, self.topics.ids, self.topics.smallest_batch)
            return TopicWrite(self.writer, records, table=table, rejected=judge.refused_rows())
        scratch = self.waiting.write(frame, rows)
        files = listed(scratch)
        count = _written(judge.blocks(read(files)))
        again = RowJudge(self.declared, self.topics, judge.fixed)
        repeated = _Repeated(partial(_blocks, again, files))
        records = BatchRecords(again, repeated, count, self.topics.ids, self.topics.smallest_batch)
        return TopicWrite(self.writer, records, scratch, rejected=judge.refused_rows())

    @property
    def waiting(self) -> WaitingRows:
        """The files in which large batches wait."""
        return WaitingRows(self.folder / _SCRATCH / self.declared.name)

    def remove_leftovers(self) -> None:
        """Remove the files of attempts that died."""
        self.waiting.remove_leftovers()

    def close(self) -> None:
        self.writer.close()

    def _headers(self, rows: BatchOfRows) -> list[Header]:
        if not self.settings.headers:
            return []
        numbers = (("stream", self.stream), ("generation", rows.generation), ("batch", rows.batch))
        headers: list[Header] = [(f"recourse.{name}", str(value).encode()) for name, value in numbers]
        return headers if rows.first_read is None else [*headers, (FIRST_READ, str(rows.first_read).encode())]


class _Repeated:
    """An iterable that restarts each time."""

    def __init__(self, begin: partial[Iterator[RowBlock]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[RowBlock]:
        return self._begin()


def _blocks(judge: RowJudge, files: Sequence[Path]) -> Iterator[RowBlock]:
    for block in judge.blocks(read(files)):
        judge.refused.clear()  # they are dead letters already
        yield block


def _written(blocks: Iterable[RowBlock]) -> int:
    return sum(len(block.written) for block in blocks)
