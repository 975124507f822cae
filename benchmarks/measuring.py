"""What the smaller benchmarks share: figures as a table and as JSON, and streams run in this process."""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import structlog

from benchmarks.speed.results import machine
from streaming_jobs.platform.broker import Broker
from streaming_jobs.runtime.batch_hooks import BatchReport
from streaming_jobs.runtime.connection import Connection
from streaming_jobs.runtime.stream_queries import SparkQueries
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.settings import Settings
from streaming_jobs.sources.connection import client_config, client_file
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.lease import acquire
from streaming_jobs.state.status import Status
from streaming_jobs.stream import DeltaTable, Stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Figures = Mapping[str, Any]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def table(rows: Sequence[Figures]) -> str:
    """Rows of equal keys as a Markdown table."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([_shown(value) for value in row.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def save(out: Path | None, **figures: Any) -> None:
    """Write the figures, with the machine they were taken on."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")


def quiet() -> None:
    """Only warnings on standard error."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def megabytes(folder: Path) -> float:
    """Size of all files below a folder, MB."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20


def tree_rss_mb(pid: int | None = None) -> float:
    """Resident memory of a process and everything below it, MB."""
    process = psutil.Process(pid)
    return sum(_rss(each) for each in (process, *process.children(recursive=True))) / 2**20


def on_topic(stream: Stream, topic: str) -> Stream:
    """The same stream on another topic."""
    return replace(stream, sources={p: replace(source, name=topic) for p, source in stream.sources.items()})


def named(stream: Stream, name: str) -> Stream:
    """The same stream of one table under another name, with a table of that name."""
    assert isinstance(stream.primary, DeltaTable)
    return replace(stream, name=name, sinks={name: replace(stream.primary, name=name)})


@dataclass
class Started:
    """A stream that runs in this process, and what its batches reported."""

    running: StreamRunner
    reports: list[BatchReport] = field(default_factory=list)
    progress: dict[int, dict[str, Any]] = field(default_factory=dict)
    ended_at: float = 0.0

    def look(self, spark: SparkSession) -> bool:
        """Keep what Spark reports; whether the stream is over."""
        query = self.running.query
        for report in query.recentProgress if query is not None else ():
            if "addBatch" in report.durationMs:
                self.progress[report.batchId] = dict(report.durationMs)
        self.running.poll(spark)
        self.running.refresh_status()
        if self.running.ended and not self.ended_at:
            self.ended_at = time.monotonic()
        return self.running.ended


@dataclass
class Workshop:
    """A broker, a Spark session and streams in this very process, by the classes that a driver uses."""

    settings: Settings
    bootstrap: str
    spark: SparkSession

    def start(self, stream: Stream, settings: Settings | None = None, trigger: str = "available-now") -> Started:
        """Start a stream; as a rule over all that its topic holds."""
        settings = settings or self.settings
        kafka = settings.kafka
        quick = Topics(client_config(kafka, self.bootstrap), timedelta(seconds=2))
        connection = Connection(client_file(settings, self.bootstrap), Topics.of(kafka, self.bootstrap), quick)
        lease = acquire(settings, stream.name, purpose="benchmark", wait=5)
        queries = SparkQueries(settings, connection=connection)
        running = StreamRunner(stream, settings, queries, lease, Status(stream.name), trigger)
        started = Started(running)
        tell = running.batch_done

        def report(done: BatchReport) -> None:
            started.reports.append(done)
            tell(done)

        running.batch_done = report  # type: ignore[method-assign]
        running.preflight()
        running.start(self.spark)
        return started

    def finish(self, *started: Started, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for the streams' ends; raises RuntimeError when one failed or did not end."""
        deadline = time.monotonic() + seconds
        try:
            while sum(one.look(self.spark) for one in started) < len(started):
                meanwhile()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not done within {seconds:.0f} s")
                time.sleep(0.1)
        finally:
            for one in started:
                if one.running.query is not None:
                    one.running.query.stop()
                one.running.lease.release()
        for one in started:
            if one.running.status.state != "stopped":
                raise RuntimeError(f"stream {one.running.stream.name} failed: {one.running.status.error}")


@contextmanager
def workshop(flags: Mapping[str, Any]) -> Iterator[Workshop]:
    """A workshop in a folder of its own; everything ends with the block."""
    from streaming_jobs.platform.spark import start

    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        home = {"home": Path(folder) / "home", **flags}
        with Broker(Settings.load({"home": Path(folder) / "broker", "broker.heap_mb": 256})) as broker:
            bootstrap = broker.start()
            settings = Settings.load({**home, "kafka.bootstrap_servers": bootstrap})
            spark = start(settings, name="benchmark")
            try:
                yield Workshop(settings, bootstrap, spark)
            finally:
                spark.stop()
                process = spark.sparkContext._gateway.proc if spark.sparkContext._gateway else None
                if process is not None:
                    process.stdin.close()
                    process.wait(20)


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
