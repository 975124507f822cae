"""Where a benchmark works: a home and a broker of its own, streams in this very process, or commands beside it."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from benchmarks.processes import Child, clean_environment
from benchmarks.run import Row, in_turn, median, quantile, wait_until
from streaming_jobs.platform.broker import Broker
from streaming_jobs.runtime.stream_queries import SparkQueries
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.settings import Settings
from streaming_jobs.sources.connection import Connection, client_config, client_file
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.lease import acquire
from streaming_jobs.state.status import Status, read_status
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress

_START_SECONDS = 240.0


@dataclass(frozen=True)
class Place:
    """A folder that is empty at first, and the address of a broker."""

    folder: Path
    bootstrap: str

    def settings(self, flags: Mapping[str, Any] = MappingProxyType({})) -> Settings:
        return Settings.load({"home": self.folder / "home", "kafka.bootstrap_servers": self.bootstrap, **flags})

    def environment(self, flows: Sequence[str], **variables: str) -> dict[str, str]:
        """The environment of a process of the product that works in the home with these flows."""
        return clean_environment(
            RECOURSE_HOME=str(self.folder / "home"),
            RECOURSE_KAFKA__BOOTSTRAP_SERVERS=self.bootstrap,
            RECOURSE_FLOWS=json.dumps(list(flows)),
            **variables,
        )

    def topics(self) -> Topics:
        return Topics.of(self.settings().kafka, self.bootstrap)


@contextmanager
def place(heap_mb: int = 256) -> Iterator[Place]:
    """A folder of its own and a broker; both go with the block."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        with Broker(Settings.load({"home": folder / "broker", "broker.heap_mb": heap_mb})) as broker:
            yield Place(folder, broker.start())


def wait_for_batches(
    settings: Settings,
    streams: Sequence[str],
    session: Child,
    ready: Callable[[Status], bool] = lambda status: status.batch is not None,
) -> None:
    """Wait until the streams of a session in another process have done a batch, or until `ready` says so of each."""

    def all_ready() -> bool:
        return all((status := read_status(settings, name)) is not None and ready(status) for name in streams)

    wait_until(all_ready, _START_SECONDS, "the streams at work", every=0.5, check=session.check)


@dataclass
class Started:
    """A stream that runs in this process, and what its batches reported."""

    running: StreamRunner
    progress: dict[int, StreamingQueryProgress] = field(default_factory=dict)
    """What Spark reported of each batch, by its number."""

    def look(self, spark: SparkSession) -> bool:
        """Keep what Spark reports; whether the stream is over."""
        query = self.running.query
        for report in query.recentProgress if query is not None else ():
            if "addBatch" in report.durationMs:
                self.progress[report.batchId] = report
        self.running.poll(spark)
        self.running.refresh_status()
        return self.running.ended

    def batch_ms(self, batches: Iterable[int]) -> list[float]:
        """Milliseconds of whole batches, without those that had no records."""
        reports = (self.progress[batch] for batch in sorted(batches))
        return [float(report.durationMs["triggerExecution"]) for report in reports if report.numInputRows]


@dataclass
class Workshop:
    """A place with a Spark session, and streams in this very process by the classes that a driver uses."""

    place: Place
    settings: Settings
    spark: SparkSession

    def connection(self) -> Connection:
        kafka, bootstrap = self.settings.kafka, self.place.bootstrap
        quick = Topics(client_config(kafka, bootstrap), timedelta(seconds=2))
        return Connection(client_file(self.settings, bootstrap), Topics.of(kafka, bootstrap), quick)

    def start(self, stream: Stream, trigger: str = "available-now") -> Started:
        """Start a stream; as a rule over all that its topic holds."""
        lease = acquire(self.settings, stream.name, purpose="benchmark", wait=5)
        queries = SparkQueries(self.settings, connection=self.connection())
        running = StreamRunner(stream, self.settings, queries, lease, Status(stream.name), trigger)
        running.preflight()
        running.start(self.spark)
        return Started(running)

    def wait(self, started: Started, seconds: float) -> None:
        until = time.monotonic() + seconds
        look = partial(started.look, self.spark)
        wait_until(lambda: time.monotonic() > until, seconds + 60, "the time of a stream", check=look)

    def batches_during(self, started: Started, task: Callable[[], object]) -> list[float]:
        """Milliseconds of each whole batch with records that ended while the task ran; the task has to look."""
        started.look(self.spark)
        before = set(started.progress)
        task()
        return started.batch_ms(started.progress.keys() - before)

    def beside(self, started: Started, tasks: Mapping[str, Callable[[], object]], rounds: int) -> list[Row]:
        """What each task does to the batches of a stream beside it, in turns; they are compared with the first one."""
        windows: dict[str, list[list[float]]] = {name: [] for name in tasks}
        for number in range(rounds):
            for name in in_turn(list(tasks), number):
                windows[name].append(self.batches_during(started, tasks[name]))
        batches = {name: [*chain.from_iterable(parts)] for name, parts in windows.items()}
        if empty := [name for name, ms in batches.items() if not ms]:
            raise RuntimeError(f"no batch ended beside {', '.join(empty)}: the windows are too short")
        plain = median(next(iter(batches.values())))
        return [
            {"beside": name, "batches": len(ms), "median ms": median(ms), "p90 ms": quantile(ms, 0.9),
             "to the first": median(ms) / plain,
             "median of each window": " ".join(f"{median(window):.0f}" for window in windows[name])}
            for name, ms in batches.items()
        ]  # fmt: skip

    def finish(self, started: Started, seconds: float, *, stop: bool = False) -> None:
        """Wait for a stream's end, with `stop` after a request for it; raises if it failed or did not end."""
        running = started.running
        if stop:
            running.request_stop()
        try:
            wait_until(lambda: started.look(self.spark), seconds, running.stream.name)
        finally:
            if running.query is not None:
                running.query.stop()
            running.lease.release()
        if running.status.state != "stopped":
            raise RuntimeError(f"stream {running.stream.name} failed: {running.status.error}")


@contextmanager
def workshop(flags: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Workshop]:
    """A workshop with these settings; everything ends with the block."""
    with place() as here:
        settings = here.settings(flags)
        with spark_session(settings) as spark:
            yield Workshop(here, settings, spark)


@contextmanager
def spark_session(settings: Settings) -> Iterator[SparkSession]:
    """The product's Spark session in this process; its JVM has ended with the block."""
    from streaming_jobs.platform.spark import start

    spark = start(settings, name="benchmark")
    try:
        yield spark
    finally:
        spark.stop()
        process = spark.sparkContext._gateway.proc if spark.sparkContext._gateway else None
        if process is not None:
            process.stdin.close()
            process.wait(20)


def megabytes(folder: Path) -> float:
    """Size of all files below a folder, MB."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
