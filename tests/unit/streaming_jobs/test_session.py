"""The session around its streams: whatever goes wrong with one thing, leases are released and the others continue."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from streaming_jobs.errors import LeaseBusy, PermanentError, PreflightRefused, TransientError
from streaming_jobs.platform.runtime import LocalSpark
from streaming_jobs.runtime import session_options
from streaming_jobs.runtime.batch import BatchPipeline
from streaming_jobs.runtime.handover import Handover
from streaming_jobs.runtime.lag import Ends
from streaming_jobs.runtime.restart_in_place import STOP_SIGNALS
from streaming_jobs.runtime.stream_queries import Preflight, QueryHooks
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.session import Patience, Session, main
from streaming_jobs.settings import Settings
from streaming_jobs.state import stop_request
from streaming_jobs.state.lease import acquire, holder, take
from streaming_jobs.state.status import read_status
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.stream import Stream
from streaming_jobs.testing import MemoryLease, MemoryLeases, MemoryQueries, MemoryQuery, MemoryRuntime
from tests.conftest import SettingsFactory
from tests.support import ROOT
from tests.support.worlds import parity, plain

QUICK = Patience(lease=0, look=0.001, jvm=0)


@pytest.fixture
def home(settings: SettingsFactory) -> Settings:
    return settings({"kafka.bootstrap_servers": "127.0.0.1:1"})


class LookedAt(MemoryQuery):
    """A query that runs until the test ends it, and calls the test whenever the session looks at it."""

    def __init__(self, look: Callable[[MemoryQuery], None]) -> None:
        super().__init__()
        self._look = look

    @property
    def isActive(self) -> bool:
        self._look(self)
        return super().isActive


@dataclass
class Queries(MemoryQueries):
    """Queries that end as soon as they are started, or run for those streams that `look` has something for."""

    at_preflight: Callable[[Stream], object] = lambda _: None
    look: dict[str, Callable[[MemoryQuery], None]] = field(default_factory=dict)

    def preflight(self, stream: Stream) -> Preflight:
        self.at_preflight(stream)
        return super().preflight(stream)

    def query(self, stream: Stream) -> MemoryQuery:
        return LookedAt(self.look[stream.name]) if stream.name in self.look else super().query(stream)


def session_of(home: Settings, streams: Sequence[Stream], **options: Any) -> Session:
    """A session without Spark."""
    options = {"runtime": MemoryRuntime(), "queries": Queries(home), "patience": QUICK, **options}
    return Session(home, streams, **options)


def marker(home: Settings) -> Path:
    path = home.state / "plain" / "stop"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def state(home: Settings, stream: str) -> str:
    status = read_status(home, stream)
    assert status is not None
    return status.state


def unwritable(home: Settings, stream: str) -> None:
    """From now on the stream's status cannot be written."""
    path = StreamFolder.of(home, stream).status
    if path.is_file():
        path.unlink()
        path.mkdir()


def writable(home: Settings, stream: str) -> None:
    StreamFolder.of(home, stream).status.rmdir()


def test_a_table_that_cannot_be_read_fails_its_stream_alone(home: Settings) -> None:
    def preflight(stream: Stream) -> None:
        if stream is plain:
            raise RuntimeError("the log is garbled")

    home = home.model_copy(update={"stream": home.stream.model_copy(update={"max_restarts": 0})})
    assert session_of(home, [plain, parity], queries=Queries(home, at_preflight=preflight)).run() == 1
    assert (state(home, "plain"), state(home, "parity")) == ("failed", "stopped")


def test_a_full_disk_stops_no_stream_and_is_told_once(home: Settings) -> None:
    runtime = MemoryRuntime()
    queries = Queries(home, at_preflight=lambda stream: unwritable(home, stream.name))
    with capture_logs() as logs:
        assert session_of(home, [plain, parity], runtime=runtime, queries=queries).run() == 0
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == ["the status could not be written"]
    assert runtime.ends == ["stop"]
    assert holder(home, "plain") is None


def test_whatever_fails_at_the_end_spark_is_ended_and_the_leases_are_released(home: Settings) -> None:
    class Gone(Queries):
        def ends(self, stream: Stream) -> Ends | None:
            raise ConnectionError("the JVM is gone")

    class EndsBadly(MemoryRuntime):
        def stop(self) -> None:
            super().stop()
            raise ConnectionError("the JVM is gone")

    runtime = EndsBadly()
    with pytest.raises(ConnectionError):
        session_of(home, [plain, parity], runtime=runtime, queries=Gone(home)).run()
    assert runtime.ends == ["stop"]
    assert (holder(home, "plain"), holder(home, "parity")) == (None, None)


@pytest.fixture
def start(home: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs the entry point with options, on the streams of this test's home and without Spark."""
    monkeypatch.setenv("RECOURSE_FLOWS", '["tests.support.worlds"]')
    handlers, level = {number: signal.getsignal(number) for number in STOP_SIGNALS}, logging.getLogger("py4j").level

    def start(*options: str, make: Callable[..., Session] = session_of) -> int:
        places = (f"home={home.home}", f"kafka.bootstrap_servers={home.kafka.bootstrap_servers}")
        return main([*options, *(part for each in places for part in ("--set", each))], make)

    yield start
    structlog.reset_defaults()
    logging.getLogger("py4j").setLevel(level)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_start_that_is_refused_leaves_a_stop_on_purpose_as_it_is(home: Settings, start: Callable[..., int]) -> None:
    path = marker(home)
    with take(home, "plain", purpose="session"):
        assert start("--streams", "plain") == LeaseBusy.exit_code
    assert path.exists()
    assert start("--streams", "plain") == 0
    assert not path.exists()


@pytest.mark.parametrize("respect", [False, True])
def test_a_start_with_intent_ends_a_stop_on_purpose(home: Settings, respect: bool) -> None:
    path = marker(home)
    assert session_of(home, [plain], answers={} if respect else stop_request.requests(home)).run() == 0
    assert path.exists() == respect


@pytest.mark.parametrize("before", [None, "asked by recourse streams stop"])
def test_a_stop_that_is_asked_for_while_a_session_starts_is_obeyed(home: Settings, before: str | None) -> None:
    """Be it in the same words as one that the start was made to end."""
    if before is not None:
        stop_request.ask(home, "plain", before)

    def preflight(stream: Stream) -> None:
        if stream is plain:
            stop_request.ask(home, "plain", "asked by recourse streams stop")

    queries = Queries(home, at_preflight=preflight)
    session = session_of(home, [plain, parity], answers=stop_request.requests(home), queries=queries)
    assert session.run() == 0
    assert stop_request.asked(home, "plain") and state(home, "plain") == "stopped"
    assert queries.launched == ["parity"]


@pytest.mark.parametrize(("asked_at", "obeyed"), [(None, False), (0.0, True), (9e9, False)])
def test_a_stop_of_before_the_process_and_after_its_start_was_asked_for_is_obeyed(
    home: Settings, start: Callable[..., int], asked_at: float | None, obeyed: bool
) -> None:
    stop_request.ask(home, "plain", "asked by recourse streams stop")
    assert start("--streams", "plain", *([] if asked_at is None else ["--asked-at", str(asked_at)])) == 0
    assert stop_request.asked(home, "plain") == obeyed


def test_a_recovery_that_asks_while_a_session_starts_gets_the_stream(home: Settings) -> None:
    runtime = MemoryRuntime()
    queries = Queries(home, at_preflight=lambda stream: stop_request.ask_for(home, stream.name, "p-0001"))
    answers = stop_request.requests(home)
    assert session_of(home, [plain], answers=answers, runtime=runtime, queries=queries).run() == 0
    assert stop_request.for_recovery(home, "plain") and holder(home, "plain") is None
    assert not runtime.names, "there is nothing to start"


def test_a_request_is_ended_by_whoever_has_seen_it_and_no_other_one(home: Settings) -> None:
    stop_request.ask(home, "plain", "somebody")
    first = stop_request.request(home, "plain")
    stop_request.ask(home, "plain", "somebody")
    assert first is not None
    stop_request.clear(home, "plain", first)
    assert stop_request.asked(home, "plain")
    stop_request.ask_for(home, "plain", "p-0001")
    stop_request.clear_for(home, "plain", "p-0001")
    second = stop_request.requests(home)["plain"]
    assert second.who == "somebody" and second != first
    stop_request.clear(home, "plain", second)
    assert stop_request.requests(home) == {}


def test_an_error_of_the_session_itself_is_told_by_each_stream(home: Settings) -> None:
    class NoJava(MemoryRuntime):
        def start(self, name: str, inherited: Sequence[int] = ()) -> SparkSession:
            raise TransientError("no Java")

    with pytest.raises(TransientError):
        session_of(home, [plain], runtime=NoJava()).run()
    assert state(home, "plain") == "failed"


@pytest.mark.parametrize("supervised", [True, False])
def test_a_session_makes_way_after_the_recovery_of_one_of_its_streams(home: Settings, supervised: bool) -> None:
    """If it can be started again in its place: the code in this process is the code that was wrong."""
    session = session_of(home, [plain, parity], handover=Handover(home) if supervised else None)
    session.run()
    session.running[0].status.state, session.running[0].status.error = "failed", {"permanent": True}
    stop = marker(home)
    for text, ends in (
        ("by hand", False),
        (None, False),
        ("stopped for recovery plan plain-0001", False),
        (None, True),
    ):
        if text is None:
            stop.unlink()
        else:
            stop.write_text(text)
        session._look_at_recoveries()
        assert session.superseded == (ends and supervised)
    assert not session.stop_all.is_set(), "nobody has asked it to end"
    assert session._exit_code() == (0 if supervised else 78), "what failed before is for the next session to find out"


@dataclass
class Watch:
    """Code on disk: other code for the streams among `changed`."""

    changed: set[str] = field(default_factory=set)
    same: bool = True
    closed: bool = False

    def untouched(self) -> bool:
        return self.same

    def newer(self, streams: Iterable[str]) -> bool:
        return not self.changed.isdisjoint(streams)

    def close(self) -> None:
        self.closed = True


def test_a_recovered_stream_starts_again_in_a_session_that_has_the_code_on_disk(home: Settings) -> None:
    """The others run on, untouched; and whoever takes the stream first keeps it."""
    watch, queries = Watch(), Queries(home)
    session = session_of(home, [plain, parity], handover=Handover(home, watch=watch), queries=queries)
    session.run()
    queries.launched.clear()
    before, other = session.running
    for running in (before, other):
        running.lease = acquire(home, running.stream.name, purpose="session")
        running.lease.record_jvm(os.getpid())
    session._detach(before)
    stop_request.ask_for(home, "plain", "plain-0001")
    session._look_at_recoveries()
    with take(home, "plain", purpose="recovery plan plain-0001"):
        stop_request.clear_for(home, "plain", "plain-0001")
        session._look_at_recoveries()
        assert not queries.launched and not session.superseded, "the recovery lets go in a moment"
    session._look_at_recoveries()
    assert queries.launched == ["plain"]
    again = session.running[0]
    assert session.running == [again, other] and again is not before and again.stream is plain
    assert not session.superseded and not again.detached
    owner = holder(home, "plain")
    assert owner is not None and owner.pid == os.getpid(), "it is this session's again"
    session._look_at_recoveries()
    assert len(queries.launched) == 1

    session._detach(again)
    stop_request.ask_for(home, "plain", "plain-0002")
    session._look_at_recoveries()
    stop_request.clear_for(home, "plain", "plain-0002")
    watch.same = False
    session._look_at_recoveries()
    assert session.superseded and len(queries.launched) == 1, "corrected code needs a new process"
    for running in session.running:
        running.lease.release()


class OnAFullDisk(MemoryLease):
    """A lease whose owner cannot be written."""

    def lock_again(self) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("fault", ["moved away", "unwritable"])
def test_a_recovered_stream_whose_folder_is_another_one_makes_the_session_start_again(
    home: Settings, fault: str
) -> None:
    """The lock of a file that was moved away excludes nobody; and a fault of one stream ends no other one."""
    queries = Queries(home)
    session = session_of(home, [plain, parity], handover=Handover(home, watch=Watch()), queries=queries)
    session.run()
    queries.launched.clear()
    before, other = session.running
    for running in (before, other):
        running.lease = acquire(home, running.stream.name, purpose="session")
    if fault == "unwritable":
        owner = before.lease.owner
        before.lease.release()
        before.lease = OnAFullDisk("plain", owner, MemoryLeases())
    session._detach(before)
    stop_request.ask_for(home, "plain", "plain-0001")
    session._look_at_recoveries()
    stop_request.clear_for(home, "plain", "plain-0001")
    if fault == "moved away":
        (home.state / "plain").rename(home.state / "before")
    session._look_at_recoveries()
    assert session.superseded and session.running == [before, other]
    assert not queries.launched, "it is not this session's to start"
    if fault == "moved away":
        acquire(home, "plain", purpose="session", wait=0).release()
    for running in session.running:
        running.lease.release()


def test_a_stop_file_that_cannot_be_read_stops_its_stream_and_no_other_one(home: Settings) -> None:
    (home.state / "plain" / "stop").mkdir(parents=True)
    with pytest.raises(OSError):
        stop_request.request(home, "plain")
    assert stop_request.asked(home, "plain") and not stop_request.for_recovery(home, "plain")


def test_a_stream_that_a_recovery_had_stopped_before_the_session_began_is_started_when_it_is_over(
    home: Settings,
) -> None:
    """Unless somebody else runs it by then, or wants it to stay stopped."""
    stop = marker(home)
    stop.write_text("stopped for recovery plan plain-0001")
    session = session_of(home, [parity], handover=Handover(home, left_out=["plain"]))
    session.run()

    def makes_way() -> bool:
        session._look_at_recoveries()
        return session.superseded

    assert not makes_way()
    stop.unlink()
    with take(home, "plain", purpose="session"):
        assert not makes_way(), "another session runs it"
    assert makes_way()
    session.superseded = False
    stop.write_text("by hand")
    assert not makes_way()
    stop.unlink()
    assert not makes_way(), "whoever stopped it starts it"


@pytest.mark.parametrize("option", ["--respect-stop", "--again"])
def test_a_session_is_told_which_of_its_streams_a_recovery_has_stopped(
    home: Settings, start: Callable[..., int], option: str
) -> None:
    made: list[list[str]] = []

    def make(settings: Settings, streams: Sequence[Stream], **options: Any) -> Session:
        made.append([s.name for s in streams])
        assert options["answers"] == {}
        return session_of(settings, streams, **options)

    def left_out() -> Sequence[str]:
        options = session_options.parse(["--streams", "plain,parity", option])
        return session_options.select(options, home, [plain, parity], stop_request.requests(home)).left_out

    stop_request.ask_for(home, "plain", "plain-0001")
    assert start("--streams", "plain,parity", option, make=make) == 0
    assert (made[0], left_out()) == (["parity"], ["plain"])
    stop_request.clear_for(home, "plain", "plain-0001")
    stop_request.ask(home, "plain", "by hand")
    assert start("--streams", "plain,parity", option, make=make) == 0
    assert (made[1], left_out()) == (["parity"], [])


def test_a_start_that_preflight_refuses_leaves_the_marker(home: Settings) -> None:
    stop = marker(home)
    stop.write_text("by hand")

    def run(error: Exception | None = None) -> int:
        def preflight(_: Stream) -> None:
            if error is not None:
                raise error

        queries = Queries(home, at_preflight=preflight)
        session = session_of(home, [plain], answers=stop_request.requests(home), queries=queries)
        if isinstance(error, TransientError):
            session.stop_all.set()  # while it waits for its next try
        return session.run()

    assert run(PreflightRefused("fenced", "resume it")) == 78
    assert stop.exists()
    run(TransientError("away", "wait"))
    assert not stop.exists(), "what may pass is tried again"
    stop.write_text("by hand")
    assert run() == 0 and not stop.exists()
    stop.write_text("stopped for recovery plan plain-0001")
    assert run() == 0
    assert stop.exists(), "a recovery's request is ended by the recovery"


def test_a_stream_that_is_over_is_left_while_others_go_on_once_that_is_written(home: Settings) -> None:
    looks: list[int] = []

    def fails(query: MemoryQuery) -> None:
        unwritable(home, "plain")
        query.active, query.failure = False, PermanentError("a table is gone", "put it back")

    def goes_on(query: MemoryQuery) -> None:
        looks.append(1)
        if len(looks) == 4:
            assert holder(home, "plain") is not None, "its end is not written yet"
            writable(home, "plain")
        if len(looks) == 6:
            assert holder(home, "plain") is None and holder(home, "parity") is not None
            assert state(home, "plain") == "failed"
            query.active = False

    queries = Queries(home, look={"plain": fails, "parity": goes_on})
    session = session_of(home, [plain, parity], queries=queries)
    assert session.run() == 78 and len(looks) == 6
    assert [running.detached for running in session.running] == [True, False], "the last one keeps its lease to the end"


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
        jvm = subprocess.Popen(["sleep", "60"], pass_fds=tuple(keep_open))
        return SimpleNamespace(sparkContext=SimpleNamespace(_gateway=SimpleNamespace(proc=jvm)), stop=self.stop)

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


def test_a_replan_that_given_queries_would_not_get_is_refused(home: Settings) -> None:
    with pytest.raises(ValueError, match="give replan to the queries"):
        session_of(home, [plain], replan=lambda *_: None)


STUCK = """
import os, sys, threading
from streaming_jobs.session import Patience, main
from tests.unit.streaming_jobs import test_session

def make(settings, streams, **options):
    patience = Patience(lease=0, look=0.001, jvm=0, batch=0.05)
    queries = getattr(test_session, os.environ["QUERIES"])(settings)
    return test_session.session_of(settings, streams, queries=queries, patience=patience, **options)

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


@pytest.mark.parametrize(
    ("changed", "state", "makes_way"),
    [("plain", "failed", True), ("parity", "failed", False), ("plain", "stopped", False), ("plain", "running", False)],
)
def test_a_session_makes_way_for_other_code_of_a_stream_that_failed_and_of_no_other(
    home: Settings, changed: str, state: Any, makes_way: bool
) -> None:
    watch = Watch({changed})
    session = session_of(home, [plain, parity], handover=Handover(home, watch=watch))
    session.run()
    session.running[0].status.state = state
    session._look_at_code()
    assert (session.superseded, watch.closed) == (makes_way, True)


def test_a_failed_stream_that_runs_or_was_stopped_elsewhere_is_nobodys_reason_to_start_again(home: Settings) -> None:
    session = session_of(home, [plain, parity], handover=Handover(home, watch=Watch({"plain"})))
    session.run()
    session.running[0].status.state, session.running[0].detached = "failed", True
    with take(home, "plain", purpose="session"):
        session._look_at_code()
    path = marker(home)
    session._look_at_code()
    assert not session.superseded
    path.unlink()
    session._look_at_code()
    assert session.superseded


def test_a_stream_that_used_up_its_tries_is_tried_again_as_long_as_another_one_runs(home: Settings) -> None:
    looks: list[int] = []

    def fails(_: MemoryQuery) -> None:
        running: StreamRunner = session.running[0]
        for _try in range(home.for_stream("plain").max_restarts + 1):
            running.fail(TransientError("away"))
        running.query = None

    def runs(query: MemoryQuery) -> None:
        looks.append(1)
        if len(looks) == 3:
            assert holder(home, "plain") is not None, "it is this session that tries again"
            query.active = False

    queries = Queries(home, look={"plain": fails, "parity": runs})
    session = session_of(home, [plain, parity], queries=queries)
    assert session.run() == 1
    assert len(looks) == 3, "nothing else runs: who keeps sessions running starts the next one sooner"
    assert (state(home, "plain"), state(home, "parity")) == ("failed", "stopped")


def test_a_wrong_trigger_is_one_line_before_anything_is_started(
    start: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    code = start("--streams", "plain", "--trigger", "sometimes", make=lambda *_, **__: pytest.fail("it was started"))
    assert code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "session failed" in line and "--trigger: 'sometimes' is not a trigger" in line
