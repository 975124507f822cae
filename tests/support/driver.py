"""Runs streams in tests: in this process on the shared Spark session, or as a driver process that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from streaming_jobs.ledger.entry import LedgerEntry
from streaming_jobs.runtime.crash_points import POINTS, TOPIC_POINTS
from streaming_jobs.runtime.group_offsets import GroupOffsets
from streaming_jobs.runtime.stream_queries import SparkQueries
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.settings import Settings
from streaming_jobs.sinks.delta.log import walk
from streaming_jobs.sinks.stored import entries
from streaming_jobs.sources.connection import Connection, client_file
from streaming_jobs.sources.topics import Topics
from streaming_jobs.state.lease import acquire
from streaming_jobs.state.status import Status
from streaming_jobs.storage.locations import delta_table
from streaming_jobs.stream import Stream
from tests.conftest import QUICK_START
from tests.support import ROOT
from tests.support.warm import Warm

log = structlog.get_logger()

CRASH = "RECOURSE_CRASH"
WARM: list[Warm] = []
"""What commands start from, while there is such a thing (the fixture `warm`)."""


def command(
    folder: Path, environment: Mapping[str, str], *arguments: str, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `recourse` in a folder as a person would; `prefix` is a command that wraps it.

    It starts warm, if it may: one that is to be killed, or to be wrapped, has a Python and a JVM of its own.
    """
    if WARM and not prefix and CRASH not in environment:
        return WARM[0].run(folder, environment, *arguments, seconds=200)
    return subprocess.run(
        [*prefix, sys.executable, "-m", "orchestration.cli", *arguments],
        cwd=folder,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def produce(bootstrap: str, topic: str, records: Iterable[tuple[bytes | None, bytes | None]], **options: Any) -> None:
    """Send records, and wait until the broker has all of them."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "partitioner": "murmur2_random"})
    for key, value in records:
        while True:
            try:
                producer.produce(topic, key=key, value=value, **options)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(30) == 0


def rows(settings: Settings, table: str) -> list[dict[str, Any]]:
    """All rows of a table."""
    return list(delta_table(settings.tables / table).to_pyarrow_table().to_pylist())


def ledger(settings: Settings, table: str) -> list[LedgerEntry]:
    """The table's batch entries, oldest first."""
    return [entry for _, entry in reversed(entries(walk(settings.tables / table), 10_000)) if entry.kind == "batch"]


def assert_chained(entries: Iterable[LedgerEntry]) -> None:
    """Batches without a gap, each starting where the one before ended."""
    before: LedgerEntry | None = None
    for entry in entries:
        if before is not None:
            assert entry.batch == before.batch + 1
            for now, then in zip(entry.offsets, before.offsets, strict=True):
                assert dict(now.start) == dict(then.end), (
                    f"batch {entry.batch} does not start where {before.batch} ends"
                )
        before = entry


def on_topic(stream: Stream, topic: str) -> Stream:
    """The same stream on the test's topic."""
    return replace(stream, sources={p: replace(source, name=topic) for p, source in stream.sources.items()})


@dataclass
class Bench:
    """One test's streams: settings with its own home, the shared broker, the shared session."""

    settings: Settings
    bootstrap: str
    spark: SparkSession

    def __post_init__(self) -> None:
        kafka = self.settings.kafka
        self.topics = Topics.of(kafka, self.bootstrap)
        self.shown = GroupOffsets.of(self.settings)
        quick = Topics.of(kafka, self.bootstrap, timedelta(seconds=2))
        self.connection = Connection(client_file(self.settings, self.bootstrap), self.topics, quick)

    def start(self, stream: Stream, trigger: str = "available-now") -> StreamRunner:
        """Start a stream; the caller ends it with `finish`."""
        lease = acquire(self.settings, stream.name, purpose="test", wait=5)
        queries = SparkQueries(self.settings, connection=self.connection, shown=self.shown)
        running = StreamRunner(stream, self.settings, queries, lease, Status(stream.name), trigger)
        try:
            running.preflight()
            running.start(self.spark)
        except BaseException:
            lease.release()
            raise
        return running

    def finish(self, running: StreamRunner, seconds: float = 240) -> StreamRunner:
        """Wait for the stream's end and release its lease."""
        try:
            deadline, look = time.monotonic() + seconds, 0.0
            while not running.ended:
                running.poll(self.spark)
                if (now := time.monotonic()) >= look:  # Spark makes a report of its progress anew for each look
                    running.refresh_status()
                    look = now + 0.5
                assert now < deadline, f"{running.stream.name} did not end within {seconds} s"
                time.sleep(0.02)
        finally:
            if running.query is not None:
                running.query.stop()
            running.lease.release()
        return running

    def run(self, stream: Stream) -> StreamRunner:
        """Run a stream over all records of its topics."""
        return self.finish(self.start(stream))

    def recourse(self, flows: str, *arguments: str, **further: str) -> str:
        """The output of a command on this home, which has to succeed; `further` variables of its environment."""
        done = command(
            self.settings.home, {**variables(self.settings.home, self.bootstrap, flows), **further}, *arguments
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def session_of(here: Bench, flows: str, *streams: str) -> Iterator[None]:
    """`recourse streams run` with these streams of a module, until the block ends."""
    session = subprocess.Popen(
        [sys.executable, "-m", "orchestration.cli", "streams", "run", *streams, "--trigger", "continuous"],
        cwd=here.settings.home,
        env=variables(here.settings.home, here.bootstrap, flows),
        stdout=subprocess.DEVNULL,
        stderr=(here.settings.home / "session.log").open("wb"),
        start_new_session=True,
    )
    try:
        yield
        session.send_signal(signal.SIGTERM)
        assert session.wait(60) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(session.pid, signal.SIGKILL)
        session.wait()


def variables(home: Path, bootstrap: str, flows: str) -> dict[str, str]:
    """The environment of a process of Recourse with this home and cluster, and the streams of a module."""
    return {
        **os.environ,
        "RECOURSE_HOME": str(home),
        "RECOURSE_KAFKA__BOOTSTRAP_SERVERS": bootstrap,
        "RECOURSE_FLOWS": f'["{flows}"]',
        "RECOURSE_SPARK__EXTRA": json.dumps(QUICK_START),
        "PYTHONPATH": str(ROOT),
    }


def driver(
    settings: Settings,
    bootstrap: str,
    *arguments: str,
    flows: str = "tests.support.things",
    environment: Mapping[str, str] = {},
    prefix: Sequence[str] = (),
    module: Sequence[str] = ("streaming_jobs.session",),
    folder: Path = ROOT,
) -> subprocess.Popen[str]:
    """A real driver process with its output on a pipe; `prefix` is a command that wraps it."""
    own = variables(settings.home, bootstrap, flows)
    command = [*prefix, sys.executable, "-m", *module, *arguments]
    return subprocess.Popen(
        command,
        env={**own, "RECOURSE_SPARK__DRIVER_MEMORY_MB": "1024", **environment},
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str]:
    """Exit code and output of a driver process; kills it at the deadline."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"the driver did not end within {seconds} s:\n{output[-3000:]}") from None
    return process.returncode, output


def other_kills(streams: str, kills: Sequence[str]) -> tuple[str, ...]:
    """A kill of each stream at each point of a batch that writes topics or databases too, without those in `kills`."""
    points = (*POINTS, *TOPIC_POINTS)
    each = (f"{stream}:{point}:{batch}" for stream in streams.split(",") for batch, point in enumerate(points))
    return tuple(kill for kill in each if kill not in kills)
