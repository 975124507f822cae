"""A session without Spark and Kafka: a runtime and queries in memory.

    queries = MemoryQueries(settings)
    Session(settings, [stream], runtime=MemoryRuntime(), queries=queries, leases=MemoryLeases()).run()

runs a session from its leases to its end, in milliseconds. Its queries end as soon as they are started; a test that
needs more of them subclasses `MemoryQueries` and `MemoryQuery`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from streaming_jobs.errors import LeaseLost, TransientError
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.processes.identity import mark
from streaming_jobs.preflight.snapshot import CheckpointSnapshot, StreamSnapshot, ledger_file
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.batch_hooks import BatchFiles, BatchHooks, BatchReport, DriverPathAttempts
from streaming_jobs.runtime.code_version import loaded_code
from streaming_jobs.runtime.lag import Ends
from streaming_jobs.runtime.spark_plan import PlanTraits
from streaming_jobs.runtime.stream_queries import LaunchedQuery, Preflight, QueryHooks
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.base import SinkSet
from streaming_jobs.state.lease import Owner, busy, this_process
from streaming_jobs.state.stream_folder import StreamFolder, attempt_file
from streaming_jobs.stream import Stream
from streaming_jobs.testing.tables import MemoryTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class MemoryRuntime:
    """A runtime without a JVM; its session is an empty object."""

    jvm: int | None = None
    """A process that a test uses in place of the JVM."""
    names: list[str] = field(default_factory=list)
    """The names of the sessions that were started."""
    ends: list[str] = field(default_factory=list)
    """The calls of `stop` and `kill`, in order."""
    failed: TransientError | None = None
    """The error that ended the session; a test sets it."""

    def begin(self, name: str, inherited: Sequence[int] = ()) -> None:
        """Nothing: it takes no time."""

    def start(self, name: str, inherited: Sequence[int] = ()) -> SparkSession:
        """Return an object in place of a session."""
        self.names.append(name)
        return cast("SparkSession", SimpleNamespace())

    def failure(self, patience: float = 0.0) -> TransientError | None:
        """The error that a test has set."""
        return self.failed

    def stop(self) -> None:
        """Record the call; afterwards nothing runs in the process."""
        self.ends.append("stop")
        self.jvm = None

    def kill(self) -> None:
        self.ends.append("kill")


@dataclass
class MemoryQuery:
    """A query without Spark, as a session sees it; the names are from Spark's `StreamingQuery`."""

    active: bool = True
    progress: list[Mapping[str, Any]] = field(default_factory=list)
    """Progress as Spark writes it, oldest first."""
    failure: Exception | None = None
    thread_lives: bool = False
    """True if its thread does not end when it is stopped."""
    stops: int = 0

    @property
    def isActive(self) -> bool:  # noqa: N802
        """False once it was stopped, has failed or has finished."""
        return self.active

    def reports(self, after: int) -> list[Mapping[str, Any]]:
        """All of its progress."""
        del after
        return self.progress

    @property
    def ended(self) -> bool:
        """True once it is not active and its thread has ended too."""
        return not self.active and not self.thread_lives

    def exception(self) -> Exception | None:
        return self.failure

    def stop(self) -> None:
        """As Spark: no longer active at once, even if its thread still runs; raises if the thread does not end."""
        self.stops += 1
        self.active = False
        if self.thread_lives:
            raise RuntimeError("Stream Execution thread failed to stop within 5000 milliseconds")


@dataclass
class MemoryQueries:
    """Queries without Spark and Kafka, over tables in memory; each one ends as soon as it is started."""

    settings: Settings
    launched: list[str] = field(default_factory=list)
    """The streams whose query was started, in that order."""
    hooks: dict[str, QueryHooks] = field(default_factory=dict)
    """stream -> the hooks of its newest query"""

    def open(self, streams: Iterable[Stream]) -> None:
        """Nothing is needed."""

    def preflight(self, stream: Stream) -> Preflight:
        """Every stream may start, as if for the first time."""
        return Preflight(StreamSnapshot(stream.name, None, CheckpointSnapshot(), (), ()), [])

    def query(self, stream: Stream) -> MemoryQuery:
        """The query of a started stream, which has finished already."""
        return MemoryQuery(active=False)

    def launch(
        self,
        spark: SparkSession,
        stream: Stream,
        snapshot: StreamSnapshot,
        hooks: QueryHooks,
    ) -> LaunchedQuery:
        self.launched.append(stream.name)
        self.hooks[stream.name] = hooks
        hooks.built(self.pipeline(stream, hooks))
        return LaunchedQuery(self.query(stream), 1, {})

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
                folder.checkpoint(1),
                ledger_file(self.settings, stream.name),
                DriverPathAttempts(attempt_file(self.settings, stream.name)),
            ),
            hooks=BatchHooks(
                hooks.stop,
                lambda: None,
                hooks.report,
                lambda _: None,
                check_lease=hooks.lease.check if hooks.lease is not None else lambda: None,
            ),
            code=loaded_code(stream, self.settings.flows),
            settings=self.settings.for_stream(stream.name),
            traits=PlanTraits(stateful=False, multiplies=False),
        )

    def batch_done(self, stream: Stream, batch: int) -> None:
        """Have the stream's query report a batch without records."""
        entry = LedgerEntry("batch", stream.name, stream.primary.name, 1, batch)
        self.hooks[stream.name].report(BatchReport(entry, "driver", "direct", 1, batch))

    def ends(self, stream: Stream) -> Ends | None:
        """None: the ends of its topics are unknown."""
        return None

    def close(self) -> None:
        """Nothing is held."""


# Leases in memory: among the drivers of one process (`state/lease.py`).


@dataclass
class MemoryLeases:
    """Leases among the drivers in this process. A JVM may be any process: it holds the lease as long as it runs."""

    held: dict[str, MemoryLease] = field(default_factory=dict)
    """stream -> the newest lease that was taken and not unlocked"""
    epochs: dict[str, int] = field(default_factory=dict)
    """stream -> the epoch of the newest lease"""
    expires: bool = False
    """True for leases after which the holder before may still run."""
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def acquire(self, stream: str, *, purpose: str, wait: float = 10.0) -> MemoryLease:
        """Take the stream's lease; raises LeaseBusy after `wait` seconds."""
        deadline = time.monotonic() + wait
        lease = MemoryLease(stream, this_process(purpose, 0), self)
        while not self.taken_by(lease):
            if time.monotonic() > deadline:
                raise busy(stream, self.holder(stream))
            time.sleep(0.01)
        return lease

    def taken_by(self, lease: MemoryLease) -> bool:
        """Give the stream to a lease if nobody holds it; returns True if it was given."""
        with self._one_at_a_time:
            free = self.held.get(lease.stream) is lease or self.holder(lease.stream) is None
            if free and self.held.get(lease.stream) is not lease:
                self.held[lease.stream] = lease
                lease.exceed(self.epochs.get(lease.stream, 0))
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
    lost: bool = False
    """True once it has run out; a test sets it."""
    fenced: set[tuple[str, int]] = field(default_factory=set)

    @property
    def epoch(self) -> int:
        return self.owner.epoch

    @property
    def expires(self) -> bool:
        return self.leases.expires

    def check(self) -> None:
        if self.lost:
            raise LeaseLost(f"the lease of stream {self.stream} has run out", "end this driver")

    def exceed(self, epoch: int) -> None:
        if self.leases.held.get(self.stream) is not self:
            raise LeaseLost(f"the lease of stream {self.stream} is another driver's", "end this driver")
        self.owner = replace(self.owner, epoch=epoch + 1)
        self.leases.epochs[self.stream] = epoch + 1

    @property
    def inherited(self) -> tuple[int, ...]:
        """Empty: no descriptor holds it."""
        return ()

    def holds(self) -> bool:
        """True if its driver or its JVM holds it."""
        return not self.released or self.owner.jvm_alive()

    def record_jvm(self, pid: int) -> None:
        self.owner = replace(self.owner, jvm=pid, jvm_started=mark(pid))

    def unlock(self) -> None:
        """Release it for the JVM too."""
        self.owner = replace(self.owner, jvm=None, jvm_started=None)
        if self.leases.held.get(self.stream) is self:
            del self.leases.held[self.stream]

    def lock_again(self) -> bool:
        """Take it back after `unlock`; False while another lease holds the stream, and after `release`."""
        if self.released or not self.leases.taken_by(self):
            return False
        self.owner = replace(self.owner, since=time.time())
        return True

    def release(self) -> None:
        """Release it; the JVM, if it was recorded, holds it until it ends."""
        self.released = True
