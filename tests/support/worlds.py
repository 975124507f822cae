"""Streams for the tests of decisions: as a `StreamSnapshot` in memory, and on disk as a driver leaves them.

Both tell the same story of the stream `parity`: batch n reads ten offsets of partition 0 and five of partition 1,
and writes its two tables; one record of batch 0 is a dead letter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry, Txn
from streaming_jobs.ledger.positions import OffsetBounds, OffsetRange, TopicOffsets
from streaming_jobs.preflight.findings import StartFinding
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import (
    CheckpointSnapshot,
    StreamSnapshot,
    TableSnapshot,
    TopicSnapshot,
    take_snapshot,
)
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.sink import DeltaSink
from streaming_jobs.sinks.stored import Commit, Role
from streaming_jobs.sinks.tables import all_tables
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state.stream_record import BoundTable, BoundTopic, Generation, StreamRecord
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import KafkaTopic, Stream, stream
from tests.support.stream_on_disk import StreamOnDisk, lay_commit, lay_offsets
from tests.support.stream_on_disk import append as append_rows

STREAM = "parity"
TOPIC = "things"
TOPIC_ID = "q2Fxt25LSjKInOzlgP-Hyw"
PRIMARY, SECONDARY, DEAD_LETTERS = "evens", "odds", "parity_dead_letters"
DELETES = "evens_deletes"
"""Where the primary table's deletes are remembered, if they are."""
ASIDE = "evens_quarantine"
"""Where rows of the primary table are set aside, if they are."""
CODE = CodeVersion("fd2f87f71956", "0.1.0")
PER_BATCH = {0: 10, 1: 5}
RECORDS = 1000
"""Records in each partition of the topic, of which batches 0 to 10 are far from the end."""

OUTPUT = StructType([StructField("k", StringType()), StructField("n", LongType())])
TIMED = StructType([StructField("n", LongType()), StructField("at", TimestampType())])


@dataclass(frozen=True)
class NoBytes:
    """A format that is declared and never decodes."""

    schema: StructType = OUTPUT
    reasons: frozenset[str] = frozenset()

    def reader(self, fields: object = None) -> Any:
        raise AssertionError("nothing is decoded here")


THINGS = KafkaTopic(TOPIC, value=NoBytes())


@stream(source=THINGS, sink={PRIMARY: Declared(PRIMARY), SECONDARY: Declared(SECONDARY)})
def parity(things: Any) -> Any:
    """Two tables from one topic."""
    return {PRIMARY: things.where("n % 2 = 0"), SECONDARY: things.where("n % 2 = 1")}


@stream(source=THINGS, sink=Declared("plain"))
def plain(things: Any) -> Any:
    """One table."""
    return things


def ends(batch: int) -> TopicOffsets:
    """The end of a batch; for -1 the start of the stream."""
    return {TOPIC: {partition: count * (batch + 1) for partition, count in PER_BATCH.items()}}


def offsets(batch: int) -> OffsetRange:
    """The offsets that a batch reads."""
    return OffsetRange(TOPIC, TOPIC_ID, ends(batch - 1)[TOPIC], ends(batch)[TOPIC])


def entry(batch: int, table: str = PRIMARY, **changes: Any) -> LedgerEntry:
    """The ledger entry of a batch; the primary's names the other tables' transactions."""
    txns = {SECONDARY: Txn(1, batch).version, DEAD_LETTERS: Txn(1, 0).version} if table == PRIMARY else {}
    made = LedgerEntry("batch", STREAM, table, 1, batch, (offsets(batch),), {"written": 1}, txns, CODE)
    return replace(made, **changes)


def record(**changes: Any) -> StreamRecord:
    """The stream's record once it has its tables and its topic."""
    tables = tuple(BoundTable(n, f"id of {n}", r) for n, r in ((PRIMARY, "primary"), *_others()))
    topic = BoundTopic(TOPIC, TOPIC_ID, {0: 0, 1: 0})
    made = StreamRecord(STREAM, (Generation(1, 1.7e9, "first start"),), tables=tables, topics=(topic,))
    return replace(made, **changes)


def _others() -> list[tuple[str, str]]:
    return [(SECONDARY, "secondary"), (DEAD_LETTERS, "secondary")]


def fresh() -> StreamSnapshot:
    """Before the first start: a topic with records, and nothing else."""
    tables = tuple(TableSnapshot(n, r, None, None, None) for n, r in ((PRIMARY, "primary"), *_others()))  # type: ignore[arg-type]
    return StreamSnapshot(STREAM, None, CheckpointSnapshot(), tables, (topic_world(),))


def opened() -> StreamSnapshot:
    """Started and stopped before the first batch: tables are made and hold nothing."""
    tables = tuple(_table(name, role, -1, None) for name, role in ((PRIMARY, "primary"), *_others()))
    return StreamSnapshot(STREAM, record(), CheckpointSnapshot(), tables, (topic_world(),))


def settled(batch: int) -> StreamSnapshot:
    """After a batch that all tables and Spark have."""
    tables = (
        _table(PRIMARY, "primary", batch, entry(batch)),
        _table(SECONDARY, "secondary", batch, entry(batch, SECONDARY)),
        _table(DEAD_LETTERS, "secondary", 0, entry(0, DEAD_LETTERS)),
    )
    return StreamSnapshot(STREAM, record(), checkpoint_world(batch, batch), tables, (topic_world(),))


def checkpoint_world(planned: int, committed: int | None) -> CheckpointSnapshot:
    """Spark has planned a batch and has committed one."""
    known = {planned} | ({committed} if committed is not None else set())
    return CheckpointSnapshot(planned, committed, {b: ends(b) for b in known}, {planned: ends(planned - 1)})


def topic_world(**changes: Any) -> TopicSnapshot:
    """The topic with all its records."""
    made = TopicSnapshot(TOPIC, TOPIC_ID, {0: 0, 1: 0}, {0: RECORDS, 1: RECORDS})
    return replace(made, **changes)


def _table(name: str, role: Any, batch: int, newest: LedgerEntry | None) -> TableSnapshot:
    return TableSnapshot(name, role, f"id of {name}", STREAM, Txn(1, batch), newest)


def with_table(snapshot: StreamSnapshot, name: str, **changes: Any) -> StreamSnapshot:
    """The snapshot with one table changed."""
    return replace(snapshot, tables=tuple(replace(t, **changes) if t.name == name else t for t in snapshot.tables))


def with_topic(snapshot: StreamSnapshot, **changes: Any) -> StreamSnapshot:
    """The snapshot with its topic changed."""
    return replace(snapshot, topics=tuple(replace(t, **changes) for t in snapshot.topics))


def crashed(planned: int, *, secondary: int, primary: int) -> StreamSnapshot:
    """Killed inside a batch that Spark has planned: the tables are at these batches."""
    snapshot = replace(settled(planned - 1), checkpoint=checkpoint_world(planned, planned - 1))
    snapshot = with_table(snapshot, SECONDARY, txn=Txn(1, secondary), entry=entry(secondary, SECONDARY))
    return with_table(snapshot, PRIMARY, txn=Txn(1, primary), entry=entry(primary))


def crashed_first(*, secondary: int, primary: int) -> StreamSnapshot:
    """Killed inside the very first batch; -1: the table is made and has nothing."""
    snapshot = replace(opened(), checkpoint=checkpoint_world(0, None))
    for name, batch in ((SECONDARY, secondary), (PRIMARY, primary)):
        snapshot = with_table(snapshot, name, txn=Txn(1, batch), entry=entry(batch, name) if batch >= 0 else None)
    return snapshot


def remembering(snapshot: StreamSnapshot, at: Txn | None, *, listed: bool, bound: bool) -> StreamSnapshot:
    """The snapshot of a stream that remembers deletes, in a table at position `at`, which the record may know."""
    return _beside(snapshot, DELETES, "deletes", at, listed=listed, bound=bound)


def quarantining(snapshot: StreamSnapshot, at: Txn | None, *, listed: bool, bound: bool) -> StreamSnapshot:
    """The same of a stream that sets rows aside."""
    return _beside(snapshot, ASIDE, "quarantine", at, listed=listed, bound=bound)


def _beside(
    snapshot: StreamSnapshot, name: str, role: Role, at: Txn | None, *, listed: bool, bound: bool
) -> StreamSnapshot:
    primary = next(t for t in snapshot.tables if t.name == PRIMARY)
    table = replace(primary, name=name, role=role, table_id=at and "kept", txn=at, entry=None)
    table = replace(table, owner=primary.owner if at else None)
    if listed:
        assert primary.entry is not None and at is not None
        txns = {**primary.entry.txns, name: at.version}
        snapshot = with_table(snapshot, PRIMARY, entry=replace(primary.entry, txns=txns))
    if bound:
        assert snapshot.record is not None
        bindings = (*snapshot.record.tables, BoundTable(name, "kept", role))
        snapshot = replace(snapshot, record=replace(snapshot.record, tables=bindings))
    return replace(snapshot, tables=(*snapshot.tables, table))


def foreign(version: int, operation: str) -> Commit:
    """A commit of somebody else that changes rows."""
    return Commit(version, 1_700_000_000_000, operation, changes_data=True, entry=None)


@dataclass
class FakeTopics:
    """Answers for one topic as a broker would; `info` None: there is no such topic."""

    info: TopicInfo | None = field(default_factory=lambda: TopicInfo(TOPIC, TOPIC_ID, 2, -1, "delete"))
    found: OffsetBounds = field(default_factory=lambda: OffsetBounds({0: 0, 1: 0}, {0: RECORDS, 1: RECORDS}))
    asked_ms: list[int] = field(default_factory=list)

    def describe(self, name: str) -> TopicInfo | None:
        return self.info if name == TOPIC else None

    def offsets(self, name: str) -> OffsetBounds:
        assert name == TOPIC
        return self.found

    def latest(self, name: str) -> dict[int, int]:
        return self.offsets(name).latest

    def high_watermarks(self, name: str) -> dict[int, int]:
        return self.latest(name)

    def mean_size(self, name: str, starts: Mapping[int, int]) -> float | None:
        return None

    def offsets_for_time(self, name: str, ms: int) -> dict[int, int]:
        assert name == TOPIC
        self.asked_ms.append(ms)
        return {0: 70, 1: 35}


class Disk(StreamOnDisk):
    """A stream on disk, driven step by step."""

    topic, topic_id, per_batch, columns = TOPIC, TOPIC_ID, PER_BATCH, OUTPUT

    def __init__(self, settings: Settings, stream: Stream = parity) -> None:
        super().__init__(settings, stream)
        self.topics = FakeTopics()
        self.sinks: dict[str, DeltaSink] = {}

    @property
    def folder(self) -> Path:
        """The checkpoint."""
        return self.checkpoint().folder

    def table(self, name: str) -> Path:
        """A table's folder."""
        return self.settings.tables / name

    def open(self) -> Disk:
        """The first start; the tables are open."""
        self.make()
        for declared, _ in all_tables(self.stream):
            table = self.stored(declared.name)
            assert isinstance(table, DeltaSink)
            self.sinks[declared.name] = table
        return self

    def entry(self, batch: int, generation: int = 1) -> LedgerEntry:
        """The primary table's ledger entry of a batch."""
        return entry(batch, self.stream.primary.name, stream=self.stream.name, generation=generation)

    def plan(self, batch: int, *, generation: int = 1) -> None:
        """Spark logs the offsets of a batch; the batches before it are done."""
        for earlier in range(batch):
            super().plan(earlier, generation=generation)
            self.finish(earlier, generation=generation)
        super().plan(batch, generation=generation)

    def write(self, table: str, batch: int) -> int | None:
        """One table gets its rows of a batch: one row, or one dead letter."""
        sink = self.sinks[table]
        rows = pa.table({"k": ["x"], "n": [batch]})
        if table == self.stream.dead_letters:
            rows = pa.table({"topic": [TOPIC], "offset": [batch], "reason": ["not_json"]})
        made = entry(batch, table, stream=self.stream.name)
        if table == self.stream.primary.name:
            others = {n: s.position.version for n, s in self.sinks.items() if n != table and s.position is not None}
            made = replace(made, txns=others)
        return append(sink, made, rows)

    def run(self, *batches: int) -> Disk:
        """Whole batches."""
        for batch in batches:
            self.plan(batch)
            if batch == 0:
                self.write(self.stream.dead_letters, batch)
            for declared in self.stream.secondary:
                self.write(declared.name, batch)
            self.write(self.stream.primary.name, batch)
            versions = {name: sink.handle.version() for name, sink in self.sinks.items()}
            self.ledger_file.append(self.entry(batch), versions)
            self.finish(batch)
        return self

    def snapshot(self) -> StreamSnapshot:
        """The snapshot that preflight takes."""
        return take_snapshot(self.settings, self.stream, self.topics)

    def findings(self) -> list[StartFinding]:
        """The findings of preflight."""
        return check_start(self.snapshot())


def append(sink: DeltaSink, made: LedgerEntry, rows: pa.Table) -> int | None:
    """Append through the sink, as a batch on the driver path does."""
    return append_rows(sink, rows, made)


def lay_checkpoint(folder: Path, *, planned: int, committed: int | None) -> None:
    """Add to a checkpoint what Spark writes for batches up to these."""
    for batch in range(planned + 1):
        lay_offsets(folder, batch, ends(batch), starts=ends(-1))
    for batch in range(0 if committed is None else committed + 1):
        lay_commit(folder, batch)
