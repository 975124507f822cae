"""Where a benchmark works: a home and a broker of its own, a Spark session in this process, or commands beside it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from benchmarks.processes import Child, clean_environment
from benchmarks.run import wait_until
from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.platform.broker import Broker
from streaming_jobs.runtime.group_offsets import GroupOffsets
from streaming_jobs.runtime.stream_queries import SparkQueries
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.log import walk
from streaming_jobs.sinks.stored import entries
from streaming_jobs.sources.connection import Connection, client_config, client_file
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.lease import acquire
from streaming_jobs.state.status import Status, read_status
from streaming_jobs.stream import Stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_START_SECONDS, _BACKLOG_SECONDS = 240.0, 600.0


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
class Workshop:
    """A place with a Spark session in this very process."""

    place: Place
    settings: Settings
    spark: SparkSession

    def connection(self) -> Connection:
        kafka, bootstrap = self.settings.kafka, self.place.bootstrap
        quick = Topics(client_config(kafka, bootstrap), timedelta(seconds=2))
        return Connection(client_file(self.settings, bootstrap), Topics.of(kafka, bootstrap), quick)

    def batches(self, stream: Stream) -> list[tuple[LedgerEntry, int]]:
        """Run a stream over its backlog: its batches but the first, each with the ms since the commit before."""
        lease = acquire(self.settings, stream.name, purpose="benchmark", wait=5)
        queries = SparkQueries(self.settings, connection=self.connection(), shown=GroupOffsets.of(self.settings))
        runner = StreamRunner(stream, self.settings, queries, lease, Status(stream.name), "available-now")

        def ended() -> bool:
            runner.poll(self.spark)
            return runner.ended

        try:
            runner.preflight()
            runner.start(self.spark)
            wait_until(ended, _BACKLOG_SECONDS, f"the end of {stream.name}", every=0.02)
        finally:
            if runner.query is not None:
                runner.query.stop()
            lease.release()
        commits = reversed(entries(walk(self.settings.tables / stream.name), 10_000))
        found = [(commit.at, entry) for commit, entry in commits if entry.kind == "batch"]
        return [(entry, at - before) for (before, _), (at, entry) in pairwise(found)]


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
