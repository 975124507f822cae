"""Fixtures of the tests of running streams, without Spark: a stream in its session, and the driver of its batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streaming_jobs.runtime.stream_queries import QueryHooks, SparkQueries
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.sources.connection import Connection
from streaming_jobs.state.status import Status
from streaming_jobs.testing import MemoryLeases, MemoryQuery
from tests.conftest import SettingsFactory
from tests.support.batch_driver import Driver, Start
from tests.support.runners import Clock, Make, Queries
from tests.support.without_spark import FLOW
from tests.support.worlds import STREAM, Disk, parity


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(settings: SettingsFactory, clock: Clock) -> Make:
    """A running stream with a query, without Spark; with `topics` its preflight is the real one."""

    def make(*, topics: Any = None, **flags: Any) -> StreamRunner:
        loaded = settings({f"stream.{name}": value for name, value in flags.items()})
        queries = Queries(loaded) if topics is None else SparkQueries(loaded, connection=Connection({}, topics, topics))
        lease = MemoryLeases().acquire(STREAM, purpose="session")
        made = StreamRunner(parity, loaded, queries, lease, Status(STREAM, state="running"), clock=clock)
        made.query = MemoryQuery()
        hooks = QueryHooks("continuous", made.stop.requested, made._built, made.batch_done)
        made.pipeline = Queries(loaded).pipeline(parity, hooks)
        return made

    return make


@pytest.fixture
def disk(settings: SettingsFactory) -> Disk:
    return Disk(settings()).open()


@pytest.fixture
def start(disk: Disk) -> Start:
    return lambda **options: Driver(disk, **options)


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module with two streams in the working directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "watched_flow.py"
    file.write_text(FLOW)
    monkeypatch.setattr("streaming_jobs.runtime.code_watch._LOOK_EVERY", 0.1)
    yield file
    sys.modules.pop("watched_flow", None)
    sys.path[:] = [each for each in sys.path if each != str(tmp_path)]
