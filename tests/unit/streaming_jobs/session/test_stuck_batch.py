"""A batch that never ends, or a JVM that is gone: the lease is held as long as a batch may still commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from pyspark.sql import SparkSession

from streaming_jobs.errors import PermanentError, TransientError
from streaming_jobs.platform.runtime import LocalSpark
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.stream_queries import QueryHooks
from streaming_jobs.session import Patience
from streaming_jobs.settings import Settings
from streaming_jobs.state.lease import holder
from streaming_jobs.state.status import read_status
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import Stream
from streaming_jobs.testing import MemoryQuery, MemoryRuntime
from tests.support import ROOT
from tests.support.launched import launched
from tests.support.sessions import Queries, session_of, state
from tests.support.worlds import parity, plain

pytestmark = pytest.mark.slow


class Stuck(Queries):
    """Queries whose batch never ends, while Spark says that they have."""

    def pipeline(self, stream: Stream, hooks: QueryHooks) -> BatchPipeline:
        pipeline = super().pipeline(stream, hooks)
        pipeline.in_batch = True
        return pipeline


class StartFails(Stuck):
    """Queries whose start fails while their first batch is at work."""

    def query(self, stream: Stream) -> MemoryQuery:
        raise ConnectionError("Answer from Java side is empty")


@dataclass
class Launch:
    """Starts a process that sleeps in the place of a JVM."""

    stops: int = 0
    inherited: tuple[int, ...] = ()

    def __call__(self, settings: Settings, *, keep_open: Sequence[int], **_: Any) -> Any:
        self.inherited = tuple(keep_open)
        return launched(subprocess.Popen(["sleep", "60"], pass_fds=tuple(keep_open)), self.stop)

    def stop(self) -> None:
        self.stops += 1


def test_a_batch_that_never_ends_ends_the_session_and_its_jvm_and_keeps_the_lease_until_the_process_is_gone(
    home: Settings,
) -> None:
    launch = Launch()
    runtime = LocalSpark(home, launch=launch)
    patience = Patience(lease=0, look=0.001, jvm=0, batch=0.05)
    session = session_of(home, [plain], runtime=runtime, queries=Stuck(home), patience=patience)
    with pytest.raises(TransientError, match=r"stream plain did not end within 0.05 s"):
        session.run()
    assert runtime.exit_code == -9 and not launch.stops, "an orderly stop would wait for the batch"
    assert state(home, "plain") == "failed" and session.in_batch
    assert holder(home, "plain") is not None, "the batch may still commit"
    assert launch.inherited == session.running[0].lease.inherited != (), "the JVM holds the lease too"


@pytest.mark.parametrize("restarts", [0, 5])
def test_a_start_that_fails_while_its_first_batch_is_at_work_keeps_the_lease(home: Settings, restarts: int) -> None:
    """As where the JVM is killed: the first batch can come before the query's start returns."""
    home = home.model_copy(update={"stream": home.stream.model_copy(update={"max_restarts": restarts})})
    runtime = MemoryRuntime()

    class Fails(Stuck):
        def query(self, stream: Stream) -> MemoryQuery:
            runtime.failed = TransientError("the JVM is gone", "start again")
            raise ConnectionError("Answer from Java side is empty")

    session = session_of(home, [plain], runtime=runtime, queries=Fails(home))
    if restarts:
        with pytest.raises(TransientError, match="the JVM is gone"):
            session.run()
    else:
        assert session.run() == 1
    assert session.in_batch and runtime.ends == ["kill"]
    assert holder(home, "plain") is not None, "the batch may still commit"


def test_a_stream_whose_batch_is_at_work_is_not_detached_while_others_go_on(home: Settings) -> None:
    looks: list[int] = []

    class Fails(Queries):
        def pipeline(self, stream: Stream, hooks: QueryHooks) -> BatchPipeline:
            pipeline = super().pipeline(stream, hooks)
            pipeline.in_batch = stream is plain
            return pipeline

        def query(self, stream: Stream) -> MemoryQuery:
            if stream is plain:
                raise PermanentError("a table is gone", "put it back")
            return super().query(stream)

    def goes_on(query: MemoryQuery) -> None:
        looks.append(1)
        assert holder(home, "plain") is not None, "the batch may still commit"
        query.active = len(looks) < 5

    session = session_of(home, [plain, parity], queries=Fails(home, look={"parity": goes_on}))
    assert session.run() == 78 and len(looks) == 5
    assert holder(home, "plain") is not None and holder(home, "parity") is None


STUCK = """
import os, sys, threading
from streaming_jobs.session import Patience, main
from tests.support.sessions import session_of
from tests.unit.streaming_jobs.session import test_stuck_batch

def make(settings, streams, **options):
    patience = Patience(lease=0, look=0.001, jvm=0, batch=0.05)
    queries = getattr(test_stuck_batch, os.environ["QUERIES"])(settings)
    return session_of(settings, streams, queries=queries, patience=patience, **options)

threading.Thread(target=threading.Event().wait).start()  # the batch: the end of the interpreter would wait for it
sys.exit(main(make=make))
"""


@pytest.mark.parametrize(("queries", "logged"), [(Stuck, "did not end within 0.05 s"), (StartFails, "stream failed")])
def test_a_process_with_a_batch_that_never_ends_ends_at_once(
    home: Settings, queries: type[Queries], logged: str
) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RECOURSE_HOME": str(home.home),
        "RECOURSE_FLOWS": '["tests.support.worlds"]',
        "RECOURSE_STREAM__MAX_RESTARTS": "0",
        "QUERIES": queries.__name__,
    }
    command = [sys.executable, "-c", STUCK, "--streams", "plain"]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1, ended.stderr
    assert logged in ended.stderr
    assert holder(home, "plain") is None


def test_a_jvm_that_is_gone_is_told_as_that(home: Settings) -> None:
    runtime = LocalSpark(home, launch=Launch())

    def dies(_: MemoryQuery) -> None:
        assert runtime.process is not None
        runtime.process.kill()
        raise RuntimeError("An error occurred while calling o87.isActive")

    session = session_of(
        home, [plain], runtime=runtime, queries=Queries(home, look={"plain": dies}), patience=Patience(lease=0)
    )
    with pytest.raises(TransientError, match="Spark's JVM is gone: killed by signal 9, perhaps because memory ran out"):
        session.run()
    status = read_status(home, "plain")
    assert status is not None and status.error is not None
    assert status.error["found"].startswith("Spark's JVM is gone") and holder(home, "plain") is None


@pytest.mark.parametrize(("queries", "named"), [(Queries, False), (Stuck, True)])
def test_a_jvm_that_runs_on_after_the_session_holds_no_stream_unless_a_batch_is_in_it(
    home: Settings, queries: type[Queries], named: bool
) -> None:
    class RunsOn(MemoryRuntime):
        """A Spark that was there before: it is this process that stands for it."""

        def start(self, name: str, inherited: Sequence[int] = ()) -> SparkSession:
            self.jvm = os.getpid()
            return super().start(name, inherited)

        def stop(self) -> None:
            super().stop()
            self.jvm = None

    patience = Patience(lease=0, look=0.001, jvm=0, batch=0.05)
    session = session_of(home, [plain], runtime=RunsOn(), queries=queries(home), patience=patience)
    try:
        session.run()
    except TransientError:
        assert named
    lease = json.loads(StreamFolder.of(home, "plain").lease.read_text())
    assert (lease["jvm"] is not None) == named
    assert (holder(home, "plain") is not None) == named
