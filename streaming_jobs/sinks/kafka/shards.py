"""Shards of a topic sink: the part of it that runs in Spark's Python processes, one transaction for each shard.

A shard has a transactional id and a partition of markers of its own, and writes as the driver does (`writer.py`): its
producer fences every older one, reads the marker, and writes the batch only if the marker does not have it. The driver
claims every shard when it opens the sink. A process that works for another driver finds that driver's claim and ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import pyarrow as pa
import structlog

from streaming_jobs.declare.names import cluster_of, in_cluster, kafka_name
from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import LedgerConflict, PermanentError, TransientError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.settings import TopicSinkSettings
from streaming_jobs.sinks.kafka import markers
from streaming_jobs.sinks.kafka.clients import ClientLost
from streaming_jobs.sinks.kafka.producer import Header
from streaming_jobs.sinks.kafka.rows import BatchRecords, KnownTopics, RowBlock, RowJudge
from streaming_jobs.sinks.kafka.writer import Clients, TransactionWriter
from streaming_jobs.sources.connection import read_client_file
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.storage.locations import Location

log = structlog.get_logger()

COUNTED = "shard int, rows long, refused long"
"""What `ShardTask.counted` yields."""
WRITTEN = "shard int, written string"
"""What `ShardTask.written` yields: the ranges of a shard as JSON."""
_ROWS = "written"


def shards_topic(prefix: str, stream: str, topic: str, shards: int) -> str:
    """The name of the topic of the shards' markers; another number of shards has another topic."""
    of_shards = in_cluster(f"{kafka_name(topic)}.shards-{shards}", cluster_of(topic))
    return markers.marker_topic(prefix, stream, of_shards)


def shard_key(prefix: str, stream: str, topic: str, shard: int, shards: int) -> str:
    """The transactional id of a shard, which is the key of its markers too."""
    return markers.transactional_id(prefix, stream, f"{topic}.shard-{shard}-of-{shards}")


def read_shards(
    client: Mapping[str, Any], stream: str, topic: str, settings: TopicSinkSettings, shards: int
) -> dict[int, LedgerEntry | None]:
    """The newest batch of each shard, None without a marker; raises as `read_marker`."""
    name, timeout = shards_topic(settings.prefix, stream, topic, shards), settings.transaction_timeout
    keys = [shard_key(settings.prefix, stream, topic, shard, shards) for shard in range(shards)]
    read = [markers.read_marker(client, name, key, timeout, partition=shard) for shard, key in enumerate(keys)]
    return {shard: None if marker is None else marker.entry for shard, marker in enumerate(read)}


@dataclass
class ShardWriter(TransactionWriter):
    """The writer of one shard. With an `owner`, it works for that driver, which has claimed the shard before."""

    shard: int = 0
    shards: int = 1
    owner: str = ""

    def __post_init__(self) -> None:
        if self.owner:
            self._owner, self._owners = self.owner, frozenset({self.owner})

    @property
    def key(self) -> str:
        """The transactional id."""
        return shard_key(self.settings.prefix, self.stream, self.topic, self.shard, self.shards)

    def look(self) -> LedgerEntry | None:
        """Fence every older producer of the shard, and read its newest batch."""
        return self._repeated(lambda _: self.newest)

    def claim(self, owner: str, generation: int) -> None:
        """Fence as `look`, and write the shard's marker in the name of this driver."""
        self._owner = owner
        self.open(generation)

    def renew(self) -> None:
        """Let go of a producer that another process has fenced since, by writing the shard's next batch."""
        if self._producer is None:
            return
        try:
            marker = self._read()
        except ClientLost as lost:  # the next producer reads it again, and repeats that if need be
            log.warning("marker not read", stream=self.stream, topic=self.topic, shard=self.shard, reason=str(lost))
            marker = None
        if marker is None or marker.entry.txn != self.position:
            self.close()
            self.newest = None

    def _refuse_other_driver(self, marker: markers.Marker | None) -> None:
        if marker is None and self.owner:
            raise PermanentError(
                f"topic {self._markers} had a marker of shard {self.shard}, and now has none: nobody knows which "
                f"batches of stream {self.stream} this shard of topic {self.topic} has",
                "find out who deleted it or its records; then put it back from a copy",
            )
        super()._refuse_other_driver(marker)

    @property
    def _markers(self) -> str:
        return shards_topic(self.settings.prefix, self.stream, self.topic, self.shards)

    @property
    def _partition(self) -> int:
        return self.shard


@dataclass(frozen=True)
class OneTopic:
    """The only topic that a shard writes, as the driver has seen it."""

    info: TopicInfo | None

    def describe(self, name: str) -> TopicInfo | None:
        return self.info if self.info is not None and self.info.name == name else None

    def names(self, cluster: str = "") -> set[str]:  # noqa: ARG002 - of every `TopicLookup`
        return set() if self.info is None else {self.info.name}


@dataclass(frozen=True)
class ShardTask:
    """What Spark's Python processes do with the rows of a shard; picklable. The shard is the number of the task.

    `client` is the file with the client's properties, `owner` the driver that has claimed the shards.
    """

    sink: KafkaSink
    stream: str
    settings: TopicSinkSettings
    info: TopicInfo | None
    fixed: tuple[Header, ...]
    client: Location
    owner: str
    shards: int

    def counted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the number of rows that will be written, and of refused ones."""
        judge = self._judge()
        rows = sum(len(block.written) for block in judge.blocks(iter(batches)))
        refused = sum(table.num_rows for table in judge.refused)
        numbers = {"shard": [_shard()], "rows": [rows], "refused": [refused]}
        types = {"shard": pa.int32(), "rows": pa.int64(), "refused": pa.int64()}
        yield pa.RecordBatch.from_pydict(numbers, pa.schema(types))

    def refused(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the refused rows, with `__reason` and `__detail`."""
        judge = self._judge()
        for _ in judge.blocks(iter(batches)):
            for table in judge.refused:
                yield from table.to_batches()
            judge.refused.clear()

    def written(
        self, entry: LedgerEntry, rows: Mapping[int, int], batches: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Write the shard's part of the batch, unless its marker has it; yields where it lies.

        `rows` has the number of rows by shard. Raises Fenced if another driver has claimed the shard.
        """
        shard, judge = _shard(), self._judge()
        blocks: list[RowBlock] = list(judge.blocks(iter(batches)))
        count, topics = sum(len(block.written) for block in blocks), judge.topics
        _ = topics[self.sink.name]  # also if the shard has no rows: its request size is the topic's
        records = BatchRecords(judge, blocks, count, topics.ids, topics.smallest_batch)
        if records.count != rows[shard]:
            raise TransientError(
                f"shard {shard} of topic {self.sink.name} has {records.count} rows of {entry.txn}, and had "
                f"{rows[shard]} when they were judged",
                "the batch is repeated; if this comes back, make the function give the same rows for the same records",
            )
        writer = self._writer(shard)
        writer.renew()
        writer.write(replace(entry, rows={_ROWS: records.count}), records)
        newest = writer.newest
        assert newest is not None
        if newest.rows[_ROWS] != records.count:
            raise LedgerConflict(
                f"shard {shard} of topic {self.sink.name} has {newest.rows[_ROWS]} rows of {entry.txn}, which an "
                f"earlier attempt wrote, and has {records.count} now",
                f"start the stream once with code {newest.code.hash}, which wrote them"
                if not newest.code.same_code(entry.code)
                else "make the function give the same rows for the same records, then rebuild the topic from before it",
            )
        text = json.dumps([astuple(each) for each in newest.written])
        yield pa.RecordBatch.from_pydict({"shard": pa.array([shard], pa.int32()), "written": [text]})

    def _judge(self) -> RowJudge:
        topics = KnownTopics(OneTopic(self.info), self.settings, cluster=cluster_of(self.sink.name))
        return RowJudge(self.sink, topics, self.fixed)

    def _writer(self, shard: int) -> ShardWriter:
        """The writer that this process has used for the shard before, or a new one."""
        place = (self.owner, self.stream, self.sink.name, shard)
        if (known := _WRITERS.get(place)) is None:
            for old in [other for other in _WRITERS if other[0] != self.owner and other[1:] == place[1:]]:
                _WRITERS.pop(old).close()
            config, _ = read_client_file(self.client, self.sink.name)
            known = _WRITERS[place] = ShardWriter(
                self.stream,
                self.sink.ledger_name,
                self.sink.name,
                self.settings,
                Clients(config),
                shard=shard,
                shards=self.shards,
                owner=self.owner,
            )
        return known


_WRITERS: dict[tuple[str, str, str, int], ShardWriter] = {}
"""The writers of this process, by driver, stream, topic and shard: opening one takes 20 to 500 ms."""


def _shard() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return context.partitionId()
