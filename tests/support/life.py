"""A stream's life on disk without Spark: checkpoint, ledger and Delta tables, batch by batch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.types import LongType, StringType, StructField, StructType

from reprocessing.executor import recovery_of
from reprocessing.planning.planner import Request, make_plan
from reprocessing.planning.snapshot import PlanningSnapshot
from reprocessing.planning.targets import Target
from reprocessing.plans.plan import Checks, StreamPlan
from reprocessing.plans.plan_file import load
from reprocessing.rebuild.context import Recovery, RecoveryContext, RecoveryEvents
from reprocessing.stages.stage import Findings, OfOneStream
from reprocessing.undo import plan_undo
from streaming_jobs.formats import Json
from streaming_jobs.ledger import CodeVersion, LedgerEntry, Txn
from streaming_jobs.positions import OffsetBounds, OffsetRange
from streaming_jobs.preflight.take_snapshot import ledger_file
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.sink import DeltaSink, open_sink
from streaming_jobs.sinks.delta.stored_table import DeltaStoredTable
from streaming_jobs.sinks.schemas import DEAD_LETTERS
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.sinks.tables import all_tables, existing_table, store_of
from streaming_jobs.sources.topics import TopicInfo
from streaming_jobs.state import stream_record
from streaming_jobs.state.checkpoint import Checkpoint
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_record import BoundTable, BoundTopic, CodeSince, StreamRecord
from streaming_jobs.stream import DeltaTable as Declared
from streaming_jobs.stream import KafkaTopic, Stream
from streaming_jobs.testing import MemoryTable

TOPIC, TOPIC_ID = "things", "topic-1"
ROWS = StructType([StructField("id", LongType()), StructField("place", StringType())])
PLACES = ("plain", "two words", "a/b", "50%", "über:all")
PER_BATCH = 10


def things(value: object) -> object:
    """The stream's function; nobody calls it here."""
    return value


STREAM = Stream(
    "things",
    things,
    {"value": KafkaTopic(TOPIC, Json(ROWS))},
    {"things": Declared("things", partition_by=["place"])},
)

OTHERS = Stream(
    "others",
    things,
    {"value": KafkaTopic(TOPIC, Json(ROWS))},
    {"others": Declared("others", partition_by=["place"])},
)
"""A second stream of the same topic."""


class Topics:
    """A topic of one partition, as an admin client would describe it."""

    def __init__(self, first: int = 0, end: int = 90, topic_id: str = TOPIC_ID) -> None:
        self.first, self.end, self.topic_id = first, end, topic_id

    def describe(self, name: str) -> TopicInfo:
        return TopicInfo(name, self.topic_id, 1, -1, "delete")

    def offsets(self, _: str) -> OffsetBounds:
        return OffsetBounds({0: self.first}, {0: self.end})

    def latest(self, name: str) -> dict[int, int]:
        return self.offsets(name).latest

    def mean_size(self, _: str, starts: Mapping[int, int]) -> float:
        assert all(self.first <= offset < self.end for offset in starts.values())
        return 100.0

    def offsets_for_time(self, _: str, ms: int) -> dict[int, int]:
        return {0: min(ms // 1000, self.end)}


def append(table: StoredTable, rows: pa.Table, entry: LedgerEntry) -> int | None:
    """A batch's rows into a table of any store."""
    if isinstance(table, MemoryTable):
        return table.append(rows, entry)
    assert isinstance(table, DeltaStoredTable)
    return table.sink.commit(
        entry, lambda handle, how: write_deltalake(handle, rows, mode="append", commit_properties=how)
    )


class Life:
    """A stream on disk; `batch` adds one to everything, as the pipeline and Spark would."""

    def __init__(self, settings: Settings, stream: Stream = STREAM) -> None:
        self.settings, self.stream = settings, stream

    @classmethod
    def begin(cls, home: Path, stream: Stream = STREAM) -> Life:
        """The stream's first start, up to where Spark is started."""
        life = cls(Settings.load({"home": home}), stream)
        life._begin()
        return life

    def _begin(self) -> None:
        record = stream_record.first(self.stream.name)
        tables = []
        for declared, role in all_tables(self.stream):
            output = DEAD_LETTERS if declared.name == self.stream.dead_letters else ROWS
            table = store_of(declared).ensure(self.settings, declared, self.stream.name, output, generation=1)
            tables.append(BoundTable(declared.name, table.table_id, role))
        self.save(
            replace(
                record,
                tables=tuple(tables),
                topics=(BoundTopic(TOPIC, TOPIC_ID, {0: 0}),),
                code=(CodeSince("a", "1", 1, 0, time.time()),),
            )
        )
        folder = self.checkpoint(1).folder
        (folder / "sources" / "0").mkdir(parents=True)
        (folder / "sources" / "0" / "0").write_text("\0v1\n" + json.dumps({TOPIC: {"0": 0}}))
        (folder / "metadata").write_text('{"id":"x"}')
        for log in ("offsets", "commits"):
            (folder / log).mkdir()

    def checkpoint(self, generation: int) -> Checkpoint:
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
    def table(self) -> Path:
        """The primary table."""
        return self.settings.tables / self.stream.primary.name

    def sink(self) -> DeltaSink:
        """The primary table, opened anew."""
        sink = open_sink(self.settings, self.stream.primary, self.stream.name)
        assert sink is not None
        return sink

    def stored(self, name: str | None = None) -> StoredTable:
        """A table at rest, opened anew; the primary one, if none is named."""
        declared = {each.name: each for each, _ in all_tables(self.stream)}
        return existing_table(self.settings, declared[name or self.stream.primary.name], self.stream.name)

    def links(self, savepoint: str) -> Path:
        """The folder of a savepoint's links to the primary table's files."""
        return self.table / "_savepoints" / f"{self.stream.name}-{savepoint}"

    def entry(self, batch: int, generation: int = 1, code: str = "a") -> LedgerEntry:
        """A batch's ledger entry."""
        ends = OffsetRange(TOPIC, TOPIC_ID, {0: batch * PER_BATCH}, {0: (batch + 1) * PER_BATCH})
        rows = {"written": PER_BATCH}
        return LedgerEntry(
            "batch",
            self.stream.name,
            self.stream.primary.name,
            generation,
            batch,
            (ends,),
            rows,
            code=CodeVersion(code, "1"),
        )

    def plan(self, number: int, *, generation: int = 1) -> None:
        """Spark writes the planned end of a batch."""
        ends = json.dumps({TOPIC: {"0": (number + 1) * PER_BATCH}})
        (self.checkpoint(generation).folder / "offsets" / str(number)).write_text("v1\n{}\n" + ends)

    def batch(
        self,
        number: int,
        *,
        generation: int = 1,
        code: str = "a",
        wrong: bool = False,
        commit: bool = True,
        late: int = 0,
    ) -> None:
        """One batch: offsets, rows, ledger line, and, by default, Spark's commit."""
        folder = self.checkpoint(generation).folder
        end = (number + 1) * PER_BATCH
        self.plan(number, generation=generation)
        ids = list(range(number * PER_BATCH, end))
        rows = pa.table({"id": [-i if wrong else i for i in ids], "place": [PLACES[i % len(PLACES)] for i in ids]})
        entry = self.entry(number, generation, code)
        for declared in self.stream.secondary:
            append(self.stored(declared.name), rows, replace(entry, table=declared.name))
        others = {each.name: entry.txn.version for each in self.stream.secondary}
        entry = replace(entry, txns=others, rows={**entry.rows, "late": late} if late else entry.rows)
        table = self.stored()
        append(table, rows, entry)
        ledger_file(self.settings, self.stream.name).append(entry, {table.name: table.version})
        if commit:
            (folder / "commits" / str(number)).write_text("v1\n{}")

    def rows(self, table: Path | None = None) -> list[int]:
        """The ids in a table, sorted."""
        table_rows = DeltaTable(table or self.table).to_pyarrow_table()
        assert all(
            PLACES[abs(i) % len(PLACES)] == place
            for i, place in zip(table_rows["id"].to_pylist(), table_rows["place"].to_pylist(), strict=True)
        )
        return sorted(table_rows["id"].to_pylist())

    def ids(self, name: str | None = None) -> list[int]:
        """The ids in a table of any store, sorted; in the primary one, if none is named."""
        return sorted(self.stored(name).readable().to_pyarrow_table()["id"].to_pylist())

    def at(self) -> Txn | None:
        """The position of the primary table."""
        return self.stored().position


def plan_one(
    snapshot: PlanningSnapshot, target: Target, *checks: Checks, undoes: str | None = None, **more: Any
) -> StreamPlan:
    """The stream's part of the plan of a recovery of one stream."""
    request = Request(snapshot, target, *checks, **more)
    return make_plan(snapshot.settings, [request], undoes=undoes).streams[0]


def recovery(life: Life, plan: str, topics: Any = None, events: RecoveryEvents | None = None, **more: Any) -> Recovery:
    """A plan of the stream, to be carried out."""
    events = events or RecoveryEvents()
    return recovery_of(life.settings, [STREAM], topics or Topics(), load(life.settings, plan), events, **more)


def run_stage(context: RecoveryContext, kind: type[OfOneStream]) -> Findings:
    """Run a stage of the stream, as the executor does."""
    plan = load(context.settings, context.plan.id)
    whole = recovery_of(context.settings, [context.stream], context.topics, plan, context.events)
    return kind(context.plan).run(whole)


def undo_one(life: Life, plan: str, topics: Any = None) -> StreamPlan:
    """The plan that undoes a plan of the stream."""
    made = plan_undo(life.settings, {STREAM.name: STREAM}, topics or Topics(), load(life.settings, plan))
    return made.streams[0]
