"""The driver's part of a topic sink with shards: large batches are written by the executors, shard by shard.

The driver's own marker stays the truth about whole batches: it is written last, once every shard has the batch. If the
driver ends in between, the next one finds shards that are ahead of it, and the batch takes the same way again: shards
that have it skip it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streaming_jobs.declare.topic_sink import KafkaSink
from streaming_jobs.errors import ConfigurationError, PermanentError
from streaming_jobs.ledger.entry import NO_CODE, CodeVersion, LedgerEntry, Txn
from streaming_jobs.ledger.positions import WrittenRange
from streaming_jobs.sinks.base import BatchOfRows, PendingWrite
from streaming_jobs.sinks.kafka import markers
from streaming_jobs.sinks.kafka.producer import BatchProducer, Header, Outgoing
from streaming_jobs.sinks.kafka.rows import KEY
from streaming_jobs.sinks.kafka.shards import COUNTED, WRITTEN, ShardTask, ShardWriter
from streaming_jobs.sinks.kafka.writer import TransactionWriter
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.storage.locations import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SHARD, _ORDER = "__recourse_shard", "__recourse_order"
_AT_ONCE = 4


@dataclass
class ShardedWriter(TransactionWriter):
    """The writer of a sink that may have shards; `client` is the file with the client's properties."""

    shards: int = 0
    """As declared; 0: none."""
    client: Location = Path()
    code: CodeVersion = NO_CODE
    """The code that computes the rows."""
    begun: Txn | None = field(default=None, init=False)
    """The batch that some shards may have, and the driver's marker does not."""
    _found: int = field(default=0, init=False)
    """The shards of the marker that was read last."""

    @property
    def owner(self) -> str:
        return self._owner

    def open(self, generation: int) -> None:
        """As TransactionWriter; every shard is fenced and claimed first, also shards of an earlier number.

        Raises ConfigurationError if the number has changed while some shards have a batch that others lack, and if a
        topic without a marker has shards with batches; PermanentError if the code has changed meanwhile.
        """
        found = self._repeated(lambda _: self._found)
        shards = [self._shard(number, count) for count in {found, self.shards} for number in range(count)]
        try:
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                list(threads.map(ShardWriter.look, shards))
                self._refuse_half_a_batch(self._ahead(shards), generation)
                list(threads.map(lambda shard: shard.claim(self.owner, generation), shards))
        finally:
            for shard in shards:
                shard.close()
        super().open(generation)
        ahead = self._ahead(shards)  # until its claim, a shard was open to processes of the driver before
        self._refuse_half_a_batch(ahead, generation)
        self.begun = next(iter(ahead), None)
        having = [shard.newest for shard in shards if shard.newest is not None and shard.newest.txn == self.begun]
        if 0 < len(having) < self.shards:
            self._refuse_other_code(having[0])

    def mark_all(self, entry: Callable[[LedgerEntry | None], LedgerEntry]) -> tuple[WrittenRange, ...]:
        """As `mark`, also for every shard that the topic has, each before the topic; the ranges of these markers.

        A process that works for an older driver finds another one's marker in its shard, and ends.
        """
        self.shards = self._repeated(lambda _: self._found)
        ranges: list[WrittenRange] = []
        for number in range(self.shards):
            shard = self._shard(number, self.shards)
            try:
                shard.mark(entry)
            finally:
                shard.close()
            ranges += () if shard.newest is None else shard.newest.written
        self.mark(entry)
        return merged([*ranges, *(() if self.newest is None else self.newest.written)])

    def by_shards(self, rows: BatchOfRows) -> bool:
        """True for a batch that does not pass through the driver, and for a batch that some shards may have."""
        return self.shards > 0 and (not rows.driver or self.begun == Txn(rows.generation, rows.batch))

    def write_shards(self, entry: LedgerEntry, task: ShardTask, frame: DataFrame, rows: Mapping[int, int]) -> bool:
        """Have every shard write its rows of the batch, then say in the marker that the topic has it."""
        self._refuse_older(entry)
        if self._has(entry):
            return False
        self.begun = entry.txn
        told = frame.mapInArrow(partial(task.written, entry, rows), WRITTEN).collect()
        if sorted(row["shard"] for row in told) != [*range(self.shards)]:
            raise PermanentError(
                f"{len(told)} of {self.shards} shards of topic {self.topic} answered for {entry.txn}",
                "start the stream again, which repeats the batch; please report it if it comes back",
            )
        ranges = (WrittenRange(*each) for row in told for each in json.loads(row["written"]))
        done = replace(entry, written=merged(ranges))

        def attempt(producer: BatchProducer) -> bool:
            self._refuse_older(done)
            if not self._has(done):
                before = partial(self.before_commit, entry.batch)
                producer.transact([], 0, {}, lambda _: self._marker(done), before)
                self.newest = done
            self.begun = None
            return True

        return self._repeated(attempt)

    def _ahead(self, shards: Iterable[ShardWriter]) -> dict[Txn, int]:
        """The batches that some shards have and the marker has not, each with the number of these shards."""
        newest = {shard.newest.txn: shard.shards for shard in shards if shard.newest is not None}
        at = self.position
        return {txn: count for txn, count in newest.items() if txn.batch >= 0 and (at is None or txn > at)}

    def _refuse_half_a_batch(self, ahead: Mapping[Txn, int], generation: int) -> None:
        if ahead and self.position is None:
            raise ConfigurationError(
                f"topic {self.topic} has no marker, and its shards have {', '.join(map(str, ahead))}",
                "start the stream again: preflight says which topics to delete",
            )
        for txn, count in ahead.items():
            if count != self.shards or txn.generation != generation or len(ahead) > 1:
                raise ConfigurationError(
                    f"some of the {count} shards of topic {self.topic} have {txn} and others do not; stream "
                    f"{self.stream} now has {self.shards} shards and generation {generation}",
                    f"start the stream once as it was, with shards={count}: it finishes the batch",
                )

    def _refuse_other_code(self, half: LedgerEntry) -> None:
        """Raise PermanentError if other code would write the shards' rest of a batch: before any table has it."""
        if not half.code.same_code(self.code):
            raise PermanentError(
                f"some of the {self.shards} shards of topic {self.topic} have {half.txn}, written by code "
                f"{half.code.hash}, and others do not; the code is {self.code.hash} now",
                f"start the stream once with code {half.code.hash}: it finishes the batch; then deploy the new code",
            )

    def _shard(self, shard: int, shards: int) -> ShardWriter:
        return ShardWriter(self.stream, self.name, self.topic, self.settings, self.clients, shard=shard, shards=shards)

    def _read(self) -> markers.Marker | None:
        marker = super()._read()
        self._found = 0 if marker is None else marker.shards
        return marker

    def _marker(self, entry: LedgerEntry) -> Outgoing:
        return markers.marker_record(self._markers, self.key, entry, self._owner, shards=self.shards)


@dataclass
class ShardedWrite(PendingWrite):
    """Judged rows of one batch, kept by the executors; nothing of them is sent yet. `counts`: rows by shard."""

    writer: ShardedWriter
    task: ShardTask
    frame: DataFrame
    counts: Mapping[int, int]

    @property
    def name(self) -> str:
        return self.writer.name

    @property
    def rows(self) -> int:
        return sum(self.counts.values())

    def commit(self, entry: LedgerEntry) -> int | None:
        """Write every shard once; the position's number, or None if the batch was there already."""
        with self.writing():
            wrote = self.writer.write_shards(entry, self.task, self.frame, self.counts)
        return entry.txn.version if wrote else None

    def close(self) -> None:
        """Let the executors forget the rows."""
        self.frame.unpersist()


def prepare_shards(
    writer: ShardedWriter, sink: KafkaSink, info: TopicInfo | None, fixed: Sequence[Header], fitted: DataFrame
) -> ShardedWrite:
    """Compute the rows once, in shards, and judge them; raises as the judge does."""
    task = ShardTask(
        sink, writer.stream, writer.settings, info, tuple(fixed), writer.client, writer.owner, writer.shards
    )
    frame = in_shards(fitted, task.shards).persist()
    try:
        told = frame.mapInArrow(task.counted, COUNTED).collect()
        refused = sum(row["refused"] for row in told)
        rows = frame.mapInArrow(task.refused, f"{_ddl(fitted)}, __reason string, __detail string") if refused else None
        letters = None if rows is None else rows.toArrow()
    except BaseException:
        frame.unpersist()
        raise
    return ShardedWrite(writer, task, frame, {row["shard"]: row["rows"] for row in told}, rejected=letters)


def in_shards(fitted: DataFrame, shards: int) -> DataFrame:
    """One partition per shard, in the order of the rows. A key's rows are in one shard; without keys, equal rows."""
    from pyspark.sql import functions as F

    names = [KEY] if KEY in fitted.columns else fitted.columns
    shard = F.pmod(F.hash(*(F.col(f"`{name}`") for name in names)), F.lit(shards))
    numbered = fitted.withColumn(_ORDER, F.monotonically_increasing_id()).withColumn(_SHARD, shard)
    return numbered.repartitionById(shards, _SHARD).sortWithinPartitions(_ORDER).drop(_SHARD, _ORDER)


def merged(ranges: Iterable[WrittenRange]) -> tuple[WrittenRange, ...]:
    """The ranges of all shards as one for each partition."""
    whole: dict[tuple[str, int], WrittenRange] = {}
    for each in ranges:
        place = (each.topic, each.partition)
        known = whole.get(place, each)
        records = each.records + (known.records if place in whole else 0)
        whole[place] = replace(known, first=min(known.first, each.first), end=max(known.end, each.end), records=records)
    return tuple(whole[place] for place in sorted(whole))


def _ddl(frame: DataFrame) -> str:
    return ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in frame.schema.fields)
