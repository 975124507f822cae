"""For tests of streams: the seams of this package without a broker, a JVM or a disk behind them.

    table = MemoryTable("clean")    # a sink (`sinks/base.py`), ledger and all
    table.rows()                    # what readers would see, as Arrow
    table.commits                   # (ledger entry, its rows), the oldest first

A batch that is committed twice is there once, and a driver of an older generation is refused, as by a Delta table.

    queries = MemoryQueries(settings)
    Session(settings, [stream], runtime=MemoryRuntime(), queries=queries, leases=MemoryLeases()).run()

is a session from its leases to its end, in milliseconds. Its queries end as soon as they are started; a test that
wants more of them subclasses `MemoryQueries` and `MemoryQuery`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pyarrow as pa

from streaming_jobs.errors import Fenced, TransientError
from streaming_jobs.ledger import LedgerEntry, Txn
from streaming_jobs.platform.process_identity import is_alive, mark
from streaming_jobs.positions import OffsetRange
from streaming_jobs.preflight.snapshot import CheckpointSnapshot, StreamSnapshot
from streaming_jobs.preflight.take_snapshot import ledger_file
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchFiles, BatchHooks, BatchReport
from streaming_jobs.runtime.batch_path import DriverPathAttempts
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.lag import Ends
from streaming_jobs.runtime.query_plan import PlanTraits
from streaming_jobs.runtime.stream_queries import LaunchedQuery, Preflight, QueryHooks
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.base import BatchOfRows, Committer, PendingWrite, SinkSet
from streaming_jobs.sources.base import AHEAD
from streaming_jobs.state.lease import Owner, busy
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from streaming_jobs.sources.base import Source


@dataclass
class MemoryTable:
    """An append-only table in this process's memory; also one of dead letters."""

    name: str
    commits: list[tuple[LedgerEntry, pa.Table]] = field(default_factory=list)
    """What was committed, with its entry; a new one over the same list is what a restarted driver opens."""

    @property
    def position(self) -> Txn | None:
        """The newest batch in it; None if there is none."""
        return self.commits[-1][0].txn if self.commits else None

    @property
    def version(self) -> int:
        """The number of its last commit, -1 before the first one."""
        return len(self.commits) - 1

    def rows(self) -> pa.Table:
        """Every row that is visible, the oldest commit's first."""
        tables = [rows for _, rows in self.commits if rows.num_rows]
        return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})

    def refresh(self) -> None:
        """Nothing is kept aside."""

    def sync(self) -> None:
        """Memory has no disk behind it."""

    def newest_entry(self) -> LedgerEntry | None:
        """The entry of the last commit."""
        return self.commits[-1][0] if self.commits else None

    def prepare(self, frame: DataFrame, rows: BatchOfRows) -> PendingWrite:
        """Compute the frame's rows."""
        return MemoryWrite(self, frame.toArrow())

    def prepare_letters(
        self,
        spark: SparkSession,
        refused: Sequence[tuple[Source, OffsetRange, int]],
        null_keys: Sequence[pa.Table],
        rows: BatchOfRows,
    ) -> PendingWrite:
        """The refused records with their reasons, and the rows without a key as they are."""
        letters = []
        for source, offsets, _ in refused:
            for record in source.bad_records(spark, offsets).toArrow().to_pylist():
                ahead = record.pop(AHEAD, None)
                reason, detail = ("event_time_ahead", ahead) if ahead else source.diagnose(record["value"])
                letters.append({**record, "reason": reason, "detail": detail})
        tables = [pa.Table.from_pylist(letters)] if letters else []
        return MemoryWrite(self, pa.concat_tables([*tables, *null_keys], promote_options="default"))


@dataclass
class MemoryWrite:
    """Rows for a table in memory, not yet visible."""

    committer: ClassVar[Committer] = "direct"
    sink: MemoryTable
    table: pa.Table
    null_keys: ClassVar[None] = None
    deletes: ClassVar[None] = None

    @property
    def rows(self) -> int:
        """How many rows are prepared."""
        return int(self.table.num_rows)

    def commit(self, entry: LedgerEntry) -> int | None:
        """Make them visible once; raises Fenced when the table is in a newer generation."""
        at = self.sink.position
        if at is not None and at.generation > entry.generation:
            raise Fenced(
                f"table {self.sink.name} is at {at}, and this driver wants to write {entry.txn}",
                "stop this driver: another one, or a recovery, has replaced it",
            )
        if at is not None and at >= entry.txn:
            return None
        self.sink.commits.append((entry, self.table))
        return self.sink.version

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class MemoryLeases:
    """Leases among the drivers in this process. A JVM is any process: it holds the lease as long as it lives."""

    held: dict[str, MemoryLease] = field(default_factory=dict)
    """By stream the newest lease that was taken and not unlocked."""
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def acquire(self, stream: str, *, purpose: str, wait: float = 10.0) -> MemoryLease:
        """Take the stream's lease; raises LeaseBusy after `wait` seconds."""
        deadline = time.monotonic() + wait
        lease = MemoryLease(stream, Owner(os.getpid(), mark(), None, None, time.time(), purpose), self)
        while not self.taken_by(lease):
            if time.monotonic() > deadline:
                raise busy(stream, self.holder(stream))
            time.sleep(0.01)
        return lease

    def taken_by(self, lease: MemoryLease) -> bool:
        """Give the stream to a lease, if nobody holds it."""
        with self._one_at_a_time:
            free = self.holder(lease.stream) is None
            if free:
                self.held[lease.stream] = lease
            return free

    def holder(self, stream: str) -> Owner | None:
        """The holder of the stream's lease now; None when it is free."""
        lease = self.held.get(stream)
        return lease.owner if lease is not None and lease.holds() else None


@dataclass(eq=False)
class MemoryLease:
    """A lease in this process's memory."""

    stream: str
    owner: Owner
    leases: MemoryLeases
    released: bool = False

    @property
    def inherited(self) -> tuple[int, ...]:
        """No descriptor holds it."""
        return ()

    def holds(self) -> bool:
        """True if its driver or its JVM holds it."""
        jvm, started = self.owner.jvm, self.owner.jvm_started
        return not self.released or (jvm is not None and started is not None and is_alive(jvm, started))

    def record_jvm(self, pid: int) -> None:
        """Name the JVM."""
        self.owner = replace(self.owner, jvm=pid, jvm_started=mark(pid))

    def unlock(self) -> None:
        """Let go, for the JVM too."""
        self.owner = replace(self.owner, jvm=None, jvm_started=None)
        if self.leases.held.get(self.stream) is self:
            del self.leases.held[self.stream]

    def lock_again(self) -> bool:
        """Take back what `unlock` let go; False while somebody else holds it."""
        if not self.leases.taken_by(self):
            return False
        self.owner = replace(self.owner, since=time.time())
        return True

    def release(self) -> None:
        """Let go; the JVM, if it was recorded, holds it until its end."""
        self.released = True


@dataclass
class MemoryRuntime:
    """A runtime without a JVM: the session that it gives knows nothing and does nothing."""

    jvm: int | None = None
    """A process that a test lets stand for the JVM."""
    names: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """`stop` or `kill`, as it was called."""
    failed: TransientError | None = None

    def start(self, name: str, inherited: Sequence[int] = ()) -> SparkSession:
        """Give something where a session is wanted."""
        self.names.append(name)
        return cast("SparkSession", SimpleNamespace())

    def failure(self, patience: float = 0.0) -> TransientError | None:
        """The error that a test has set."""
        return self.failed

    def stop(self) -> None:
        """Note it."""
        self.ends.append("stop")

    def kill(self) -> None:
        """Note it."""
        self.ends.append("kill")


@dataclass
class MemoryQuery:
    """A query without Spark, as a session sees it; the names are those of Spark's `StreamingQuery`."""

    active: bool = True
    reports: list[Mapping[str, Any]] = field(default_factory=list)
    """Progress as Spark writes it, the oldest first."""
    failure: Exception | None = None
    thread_lives: bool = False
    """True if its thread does not end when it is stopped."""
    stops: int = 0

    @property
    def isActive(self) -> bool:  # noqa: N802
        """False once it was stopped, has failed or has come to its end."""
        return self.active

    @property
    def recentProgress(self) -> list[SimpleNamespace]:  # noqa: N802
        """The reports as objects."""
        return [SimpleNamespace(json=json.dumps(report), **report) for report in self.reports]

    @property
    def lastProgress(self) -> SimpleNamespace | None:  # noqa: N802
        """The newest report."""
        return self.recentProgress[-1] if self.reports else None

    @property
    def ended(self) -> bool:
        """True once it is not active and its thread has ended too."""
        return not self.active and not self.thread_lives

    def exception(self) -> Exception | None:
        """The failure."""
        return self.failure

    def stop(self) -> None:
        """As Spark: terminated at once, whatever its thread still does; an error when the thread does not end."""
        self.stops += 1
        self.active = False
        if self.thread_lives:
            raise RuntimeError("Stream Execution thread failed to stop within 5000 milliseconds")


@dataclass
class MemoryQueries:
    """Queries without Spark and Kafka, over tables in memory; each one ends as soon as it is started.

    `launched` names the streams whose query was started, in that order; `hooks` are those of the newest query of each.
    """

    settings: Settings
    launched: list[str] = field(default_factory=list)
    hooks: dict[str, QueryHooks] = field(default_factory=dict)

    def open(self, streams: Iterable[Stream]) -> None:
        """Nothing is needed."""

    def preflight(self, stream: Stream) -> Preflight:
        """Every stream may start, as if for the first time."""
        return Preflight(StreamSnapshot(stream.name, None, CheckpointSnapshot(), (), ()), [])

    def query(self, stream: Stream) -> MemoryQuery:
        """The query of a stream that is started: one that has come to its end."""
        return MemoryQuery(active=False)

    def launch(self, spark: SparkSession, stream: Stream, snapshot: StreamSnapshot, hooks: QueryHooks) -> LaunchedQuery:
        """Start the stream's query."""
        self.launched.append(stream.name)
        self.hooks[stream.name] = hooks
        return LaunchedQuery(self.query(stream), self.pipeline(stream, hooks), 1, {})

    def pipeline(self, stream: Stream, hooks: QueryHooks) -> BatchPipeline:
        """The real pipeline of the stream, which no query calls here."""
        folder = StreamFolder.of(self.settings, stream.name)
        primary, *secondary = (MemoryTable(sink.name) for sink in stream.sinks.values())
        return BatchPipeline(
            stream=stream,
            generation=1,
            topic_ids={},
            sources=[],
            sinks=SinkSet(primary, secondary, MemoryTable(stream.dead_letters)),
            files=BatchFiles(
                folder.checkpoint(1), ledger_file(self.settings, stream.name), DriverPathAttempts(folder.attempt)
            ),
            hooks=BatchHooks(hooks.stop, lambda: None, hooks.report, lambda _: None),
            code=loaded_code(stream, self.settings.flows),
            settings=self.settings.for_stream(stream.name),
            traits=PlanTraits(stateful=False, multiplies=False),
        )

    def batch_done(self, stream: Stream, batch: int) -> None:
        """Have the stream's query report a batch without records."""
        entry = LedgerEntry("batch", stream.name, stream.primary.name, 1, batch)
        self.hooks[stream.name].report(BatchReport(entry, "driver", "direct", 1, batch))

    def ends(self, stream: Stream) -> Ends | None:
        """Nobody has seen them."""
        return None

    def close(self) -> None:
        """Nothing is held."""
