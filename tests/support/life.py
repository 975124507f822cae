"""A stream's life on disk without Spark: checkpoint, ledger and Delta tables, batch by batch."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from reprocessing.executor import recovery_of
from reprocessing.plan.plan import Checks, StreamRecoveryPlan
from reprocessing.plan.plan_file import load
from reprocessing.plan.planner import RecoveryRequest, make_plan, plan_undo
from reprocessing.plan.snapshot import PlanningSnapshot, planning_snapshot
from reprocessing.plan.targets import Target
from reprocessing.stages.recovery import Recovery, RecoveryContext, RecoveryEvents
from reprocessing.stages.stages import OfOneStream, Result, stages_of
from streaming_jobs.ledger.entry import CodeVersion, LedgerEntry
from streaming_jobs.platform.table_rows import dataset
from streaming_jobs.preflight.findings import StartFinding
from streaming_jobs.preflight.rules import check_start
from streaming_jobs.preflight.snapshot import take_snapshot
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.sink import DeltaSink, open_sink
from streaming_jobs.sinks.stored import StoredTable
from streaming_jobs.state import savepoints
from streaming_jobs.state.savepoints import Savepoint
from streaming_jobs.state.stream_record import Accepted, CodeSince
from streaming_jobs.stream import Stream
from streaming_jobs.testing import MemoryDeclaration, MemoryStore
from tests.support.life_flows import OTHERS, ROWS, STREAM, TOPIC, TOPIC_ID
from tests.support.stream_on_disk import OnePartition, StreamOnDisk, append

_STREAMS = {stream.name: stream for stream in (STREAM, OTHERS)}
PLACES = ("plain", "two words", "a/b", "50%", "über:all")
PER_BATCH = 10


def in_memory() -> Stream:
    """The stream with two tables in memory."""
    store = MemoryStore()
    return replace(STREAM, sinks={name: MemoryDeclaration(name, store) for name in ("things", "copies")})


class Topics(OnePartition):
    """A record of 100 bytes a second, from the epoch on."""

    def mean_size(self, _: str, starts: Mapping[int, int]) -> float:
        assert all(self.first <= offset < self.end for offset in starts.values())
        return 100.0

    def offsets_for_time(self, _: str, ms: int) -> dict[int, int]:
        return {0: min(ms // 1000, self.end)}


class Killed(BaseException):
    """The process ends here."""


class Life(StreamOnDisk):
    """A stream on disk; `batch` adds one to everything."""

    topic, topic_id, per_batch, columns = TOPIC, TOPIC_ID, {0: PER_BATCH}, ROWS

    def __init__(self, settings: Settings, stream: Stream = STREAM, topics: Any = None) -> None:
        """`topics` are what the broker says, unless a test says otherwise."""
        super().__init__(settings, stream)
        self.topics = topics or Topics()

    @classmethod
    def begin(cls, home: Path, stream: Stream = STREAM, topics: Any = None, flags: Any = None) -> Life:
        """The stream's first start, up to where Spark is started."""
        return cls(Settings.load({"home": home, **(flags or {})}), stream, topics).make(
            [CodeSince("a", "1", 1, 0, time.time())]
        )

    @classmethod
    def of_batches(
        cls, home: Path, count: int, stream: str = STREAM.name, *, wrong: range = range(0), code: str = ""
    ) -> Life:
        """One of the two streams after so many batches, all right and of code `a` unless `wrong` or `code` says more.

        `code` has a letter for each batch; x is the code `bug`. The process makes such a stream once: this is a copy.
        """
        shutil.copytree(_made(count, stream, wrong, code or "a" * count).name, home, dirs_exist_ok=True)
        return cls(Settings.load({"home": home}), _STREAMS[stream])

    def run(self, *numbers: int, wrong: range = range(0), bug: range = range(0), **options: Any) -> Life:
        """Batches, those in `wrong` with wrong rows, and those in `bug` by the code of that name."""
        for number in numbers:
            code = {"code": "bug"} if number in bug else {}
            self.batch(number, wrong=number in wrong, **{**options, **code})
        return self

    def run_three_codes(self, then: Callable[[int], None] = lambda _: None) -> Life:
        """Nine batches, which the record knows too: 0 to 2 by code `a`, 3 to 5 wrong by `bug`, 6 to 8 by `b`."""
        for number in range(9):
            self.batch(number, wrong=number in range(3, 6), code=("a", "bug", "b")[number // 3])
            then(number)
        return self.know_codes()

    def know_codes(self) -> Life:
        now = time.time()
        codes = (CodeSince("bug", "1", 1, 3, now), CodeSince("b", "1", 1, 6, now))
        self.change(code=(*self.record.code, *codes))
        return self

    def change(self, **fields: Any) -> None:
        """Change fields of the stream's record."""
        self.save(replace(self.record, **fields))

    def savepoint(self, batch: int, reason: str = "time") -> Savepoint:
        """Take the savepoint of a batch."""
        return savepoints.take(self.settings, self.stream, self.record, batch, reason)  # type: ignore[arg-type]

    def snapshot(self, topics: Any = None) -> PlanningSnapshot:
        """What planning sees."""
        return planning_snapshot(self.settings, self.stream, topics or self.topics)

    def plan_to(self, target: Target, *checks: Checks, topics: Any = None, **more: Any) -> StreamRecoveryPlan:
        """The stream's part of a plan of it alone."""
        return plan_one(self.snapshot(topics), target, *checks, **more)

    def meddle(self) -> int:
        """Somebody else appends a row to the primary table; returns the table's version."""
        write_deltalake(self.table, pa.table({"id": [7], "place": ["two words"]}), mode="append")
        return DeltaTable(self.table).version()

    def accept(self, version: int, table: str = "things", why: str = "right") -> None:
        """Somebody's change of a table is accepted."""
        self.change(accepted=(Accepted(table, version, why, 1.0),))

    @property
    def table(self) -> Path:
        """The primary table."""
        return self.settings.tables_folder / self.stream.primary.name

    def sink(self) -> DeltaSink:
        """The primary table, opened anew."""
        sink = open_sink(self.settings, self.stream.primary, self.stream.name)
        assert sink is not None
        return sink

    def links(self, savepoint: str) -> Path:
        """The folder of a savepoint's links to the primary table's files."""
        return self.table / "_savepoints" / f"{self.stream.name}-{savepoint}"

    def entry(self, batch: int, generation: int = 1, code: str = "a") -> LedgerEntry:
        """A batch's ledger entry."""
        rows = {"written": PER_BATCH}
        return LedgerEntry(
            "batch",
            self.stream.name,
            self.stream.primary.name,
            generation,
            batch,
            (self.offsets(batch),),
            rows,
            code=CodeVersion(code, "1"),
        )

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
        self.ledger_file.append(entry, {table.name: table.version})
        if commit:
            self.finish(number, generation=generation)

    def refused(self, topics: Any = None) -> list[StartFinding]:
        """Why the stream cannot start."""
        found = check_start(take_snapshot(self.settings, self.stream, topics or self.topics))
        return [finding for finding in found if finding.severity == "refuse"]

    def forget(self, last: int) -> None:
        """Spark's log no longer reaches back to this batch."""
        for log in ("offsets", "commits"):
            for number in range(last + 1):
                (self.checkpoint().folder / log / str(number)).unlink(missing_ok=True)

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
        return ids_of(self.stored(name))


@cache
def _made(count: int, stream: str, wrong: range, code: str) -> TemporaryDirectory[str]:
    """A home with one stream; it is removed when the process ends."""
    home = TemporaryDirectory(prefix="life-")
    life = Life.begin(Path(home.name), _STREAMS[stream])
    for number in range(count):
        life.batch(number, wrong=number in wrong, code="bug" if code[number] == "x" else code[number])
    return home


def ids_of(table: StoredTable) -> list[int]:
    """The ids in a table of any store, sorted."""
    readable = table.readable()
    rows = dataset(readable, table.path).to_table() if isinstance(table, DeltaSink) else readable.to_pyarrow_table()
    return sorted(rows["id"].to_pylist())


def plan_one(
    snapshot: PlanningSnapshot, target: Target, *checks: Checks, undoes: str | None = None, **more: Any
) -> StreamRecoveryPlan:
    """The stream's part of the plan of a recovery of one stream."""
    request = RecoveryRequest(snapshot, target, *checks, **more)
    return make_plan(snapshot.settings, [request], undoes=undoes).streams[0]


def recovery(life: Life, plan: str, topics: Any = None, events: RecoveryEvents | None = None, **more: Any) -> Recovery:
    """A plan of the stream, to be carried out."""
    events = events or RecoveryEvents()
    return recovery_of(life.settings, [life.stream], topics or life.topics, load(life.settings, plan), events, **more)


def replayed(context: RecoveryContext) -> Mapping[str, Any]:
    """Batches 3 to 5 after the savepoint, as a session with the right code would write them."""
    staged = Life(context.replay_settings, context.stream)
    position = staged.at()
    assert position is not None
    for number in range(position.batch + 1, 6):
        staged.batch(number, generation=context.plan.generation, code="right")
    return {"batch": 5, "seconds": 0.1, "records": 30, "since": 0}


def run_stage(context: RecoveryContext, kind: type[OfOneStream]) -> Result:
    """Run a stage of the stream, as the executor does."""
    plan = load(context.settings, context.plan.id)
    whole = recovery_of(context.settings, [context.stream], context.topics, plan, context.events)
    return kind(context.plan).run(whole)


def run_stages(whole: Recovery, until: str = "") -> RecoveryContext:
    """The stages that are not done, up to one that is not run; each as the executor runs it. The first stream's."""
    for stage in stages_of(whole.plan):
        if stage.name == until:
            break
        if whole.journal.done(stage.name, stage.stream) is None:
            whole.journal.write(stage.name, "begun", stream=stage.stream)
            whole.journal.write(stage.name, "done", stage.run(whole), stream=stage.stream)
    return whole.of(whole.plan.names[0])


def undo_one(life: Life, plan: str, topics: Any = None) -> StreamRecoveryPlan:
    """The plan that undoes a plan of the stream."""
    made = plan_undo(life.settings, {life.stream.name: life.stream}, topics or life.topics, load(life.settings, plan))
    return made.streams[0]
