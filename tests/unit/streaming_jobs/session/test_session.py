"""The session around its streams: whatever goes wrong with one thing, leases are released and the others continue."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from streaming_jobs.errors import PermanentError, TransientError
from streaming_jobs.runtime.lag import Ends
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.settings import Settings
from streaming_jobs.state.health import HealthLimits, judge, look
from streaming_jobs.state.lease import holder
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_history import session_events
from streaming_jobs.stream import Stream
from streaming_jobs.testing import MemoryQuery, MemoryRuntime
from tests.conftest import SettingsFactory
from tests.support.objects import path_of
from tests.support.sessions import Queries, session_of, state
from tests.support.store_server import StoreServer
from tests.support.worlds import parity, plain


def unwritable(home: Settings, stream: str) -> None:
    """From now on the stream's status cannot be written."""
    path = path_of(StreamFolder.of(home, stream).status)
    if path.is_file():
        path.unlink()
        path.mkdir()


def writable(home: Settings, stream: str) -> None:
    path_of(StreamFolder.of(home, stream).status).rmdir()


def test_a_table_that_cannot_be_read_fails_its_stream_alone(home: Settings) -> None:
    def preflight(stream: Stream) -> None:
        if stream is plain:
            raise RuntimeError("the log is garbled")

    home = home.model_copy(update={"stream": home.stream.model_copy(update={"max_restarts": 0})})
    assert session_of(home, [plain, parity], queries=Queries(home, at_preflight=preflight)).run() == 1
    assert (state(home, "plain"), state(home, "parity")) == ("failed", "stopped")


def test_after_a_stop_no_stream_is_checked_or_started_any_more(home: Settings) -> None:
    checked: list[str] = []

    def preflight(stream: Stream) -> None:
        checked.append(stream.name)
        session.stop_all.set()

    runtime = MemoryRuntime()
    session = session_of(home, [plain, parity], runtime=runtime, queries=Queries(home, at_preflight=preflight))
    assert session.run() == 0 and checked == ["plain"] and session.spark is None
    assert (state(home, "plain"), state(home, "parity")) == ("stopped", "stopped")
    assert runtime.ends == ["stop"]


@pytest.mark.parametrize(("signalled_by", "verdict"), [("a signal to its process", "stopped"), ("", "red")])
def test_who_ended_a_session_by_a_signal_is_on_file(home: Settings, signalled_by: str, verdict: str) -> None:
    session = session_of(home, [plain], queries=Queries(home, at_preflight=lambda _: session.stop_all.set()))
    session.signalled_by = signalled_by
    assert session.run() == 0
    seen = look(home, "plain")
    assert seen.status is not None and seen.status.ended_by == signalled_by
    later = replace(seen, at=seen.at + 100)
    assert judge(later, HealthLimits()).verdict == verdict


def test_starts_and_ends_are_on_file_for_later(home: Settings) -> None:
    def preflight(stream: Stream) -> None:
        if stream is plain:
            raise PermanentError("the log is garbled", "mend it")

    assert (
        session_of(home, [plain, parity], queries=Queries(home, at_preflight=preflight)).run()
        == PermanentError.exit_code
    )
    assert [(event.what, event.reason) for event in session_events(home, "plain")] == [("failed", "the log is garbled")]
    started, stopped = session_events(home, "parity")
    assert (started.what, stopped.what) == ("started", "stopped")
    assert started.pid == os.getpid() and started.at <= stopped.at


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


def test_an_error_of_the_session_itself_is_told_by_each_stream_and_a_replan_that_queries_would_not_get_is_refused(
    home: Settings,
) -> None:
    class NoJava(MemoryRuntime):
        def start(self, name: str, inherited: Sequence[int] = ()) -> SparkSession:
            raise TransientError("no Java")

    with pytest.raises(TransientError):
        session_of(home, [plain], runtime=NoJava()).run()
    assert state(home, "plain") == "failed"
    with pytest.raises(ValueError, match="give replan to the queries"):
        session_of(home, [plain], replan=lambda *_: None)


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


def test_a_replay_of_tables_on_a_store_asks_the_store_for_its_promises_beside_the_tables(
    settings: SettingsFactory, tables_on_a_store: dict[str, Any], object_store: StoreServer
) -> None:
    stored = settings({"kafka.bootstrap_servers": "127.0.0.1:1", **tables_on_a_store})
    assert session_of(stored.with_tables(stored.tables / "*/staged-1"), [plain]).run() == 0
    keys = {each.key for each in object_store.requests() if each.method == "PUT"}
    assert keys and all(key.startswith(f"{stored.tables}/.promises/".removeprefix("s3://")) for key in keys)
