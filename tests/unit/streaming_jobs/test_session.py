"""The session around its streams: whatever goes wrong with one thing, leases are released and the others go on."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from streaming_jobs import session as module
from streaming_jobs.errors import LeaseBusy, PreflightRefused, TransientError
from streaming_jobs.runtime.stream_runner import StreamRunner
from streaming_jobs.session import Session
from streaming_jobs.settings import Settings
from streaming_jobs.state import stop_request
from streaming_jobs.state.lease import acquire, holder, take
from streaming_jobs.state.status import Status, read_status, write_status
from tests.conftest import SettingsFactory
from tests.support.worlds import parity, plain


@pytest.fixture
def looping() -> Callable[[Session], None]:
    """The loop itself, which `home` replaces."""
    return Session._loop


@pytest.fixture
def home(looping: Callable[[Session], None], settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a session whose streams end as soon as they are started; nothing starts Spark."""
    monkeypatch.setattr(module, "_LEASE_WAIT", 0)
    monkeypatch.setattr(Session, "_start_spark", lambda self, _: [r._stopped() for r in self.running if not r.ended])
    monkeypatch.setattr(Session, "_loop", lambda _: None)
    monkeypatch.setattr(StreamRunner, "preflight", lambda _: None)
    return settings({"kafka.bootstrap_servers": "127.0.0.1:1"})


def marker(home: Settings) -> Path:
    path = home.state / "plain" / "stop"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def state(home: Settings, stream: str) -> str:
    status = read_status(home, stream)
    assert status is not None
    return status.state


def test_a_table_that_cannot_be_read_fails_its_stream_alone(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def preflight(running: StreamRunner) -> None:
        if running.stream is plain:
            raise RuntimeError("the log is garbled")

    monkeypatch.setattr(StreamRunner, "preflight", preflight)
    session = Session(
        home.model_copy(update={"stream": home.stream.model_copy(update={"max_restarts": 0})}), [plain, parity]
    )
    assert session.run() == 1
    assert (state(home, "plain"), state(home, "parity")) == ("failed", "stopped")


def test_a_full_disk_stops_no_stream_and_is_told_once(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    told, ended = [], []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_status", full)
    monkeypatch.setattr(module.log, "warning", lambda said, **_: told.append(said))
    monkeypatch.setattr(Session, "_end_spark", lambda _: ended.append(1))
    assert Session(home, [plain, parity]).run() == 0
    assert told == ["the status could not be written"]
    assert ended == [1]
    assert holder(home, "plain") is None


def test_whatever_fails_at_the_end_spark_is_ended_and_the_leases_are_released(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def gone(*_: object) -> None:
        raise ConnectionError("the JVM is gone")

    def end(_: object) -> None:
        ended.append(1)
        gone()

    monkeypatch.setattr(StreamRunner, "refresh_status", gone)
    monkeypatch.setattr(Session, "_end_spark", end)
    with pytest.raises(ConnectionError):
        Session(home, [plain, parity]).run()
    assert ended == [1]
    assert (holder(home, "plain"), holder(home, "parity")) == (None, None)


def test_a_start_that_is_refused_leaves_a_stop_on_purpose_as_it_is(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load", lambda *_, **__: SimpleNamespace(settings=home))
    monkeypatch.setattr(
        module, "Topology", SimpleNamespace(of_settings=lambda _: SimpleNamespace(select=lambda _: [plain]))
    )
    monkeypatch.setattr(module, "_log_to_stderr", lambda: None)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    path = marker(home)
    with take(home, "plain", purpose="session"):
        assert module.main(["--streams", "plain"]) == LeaseBusy.exit_code
    assert path.exists()
    assert module.main(["--streams", "plain"]) == 0
    assert not path.exists()


@pytest.mark.parametrize("respect", [False, True])
def test_a_start_with_intent_ends_a_stop_on_purpose(home: Settings, respect: bool) -> None:
    path = marker(home)
    assert Session(home, [plain], answers={} if respect else stop_request.requests(home)).run() == 0
    assert path.exists() == respect


@pytest.mark.parametrize("before", [None, "asked by recourse streams stop"])
def test_a_stop_that_is_asked_for_while_a_session_starts_is_obeyed(
    home: Settings, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """Be it in the same words as one that the start was made to end."""
    if before is not None:
        stop_request.ask(home, "plain", before)
    session, started = Session(home, [plain, parity], answers=stop_request.requests(home)), []

    def preflight(running: StreamRunner) -> None:
        if running.stream is plain:
            stop_request.ask(home, "plain", "asked by recourse streams stop")

    monkeypatch.setattr(StreamRunner, "preflight", preflight)
    monkeypatch.setattr(
        Session,
        "_start_spark",
        lambda self, _: (
            started.extend(r.stream.name for r in self.running if not r.ended) or self.running[1]._stopped()
        ),
    )
    assert session.run() == 0
    assert stop_request.asked(home, "plain") and state(home, "plain") == "stopped"
    assert started == ["parity"]


@pytest.mark.parametrize(("asked_at", "obeyed"), [(None, False), (0.0, True), (9e9, False)])
def test_a_stop_of_before_the_process_and_after_its_start_was_asked_for_is_obeyed(
    home: Settings, monkeypatch: pytest.MonkeyPatch, asked_at: float | None, obeyed: bool
) -> None:
    monkeypatch.setattr(module, "load", lambda *_, **__: SimpleNamespace(settings=home))
    monkeypatch.setattr(
        module, "Topology", SimpleNamespace(of_settings=lambda _: SimpleNamespace(select=lambda _: [plain]))
    )
    monkeypatch.setattr(module, "_log_to_stderr", lambda: None)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    stop_request.ask(home, "plain", "asked by recourse streams stop")
    assert module.main(["--streams", "plain", *([] if asked_at is None else ["--asked-at", str(asked_at)])]) == 0
    assert stop_request.asked(home, "plain") == obeyed


def test_a_recovery_that_asks_while_a_session_starts_gets_the_stream(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamRunner, "preflight", lambda r: stop_request.ask_for(home, r.stream.name, "p-0001"))
    monkeypatch.setattr(Session, "_start_spark", lambda *_: pytest.fail("there is nothing to start"))
    assert Session(home, [plain], answers=stop_request.requests(home)).run() == 0
    assert stop_request.for_recovery(home, "plain") and holder(home, "plain") is None


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


def test_an_error_of_the_session_itself_is_told_by_each_stream(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_java(*_: Any) -> None:
        raise TransientError("no Java")

    monkeypatch.setattr(Session, "_start_spark", no_java)
    with pytest.raises(TransientError):
        Session(home, [plain]).run()
    assert state(home, "plain") == "failed"


@pytest.mark.parametrize("supervised", [True, False])
def test_a_session_makes_way_after_the_recovery_of_one_of_its_streams(home: Settings, supervised: bool) -> None:
    """If it can be started again in its place: the code in this process is the code that was wrong."""
    session = Session(home, [plain, parity], supervised=supervised)
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


def test_a_recovered_stream_starts_again_in_a_session_that_has_the_code_on_disk(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others run on, untouched; and whoever takes the stream first keeps it."""
    untouched, started = [True], []
    monkeypatch.setattr(StreamRunner, "start", lambda running, _: started.append(running))
    watch = SimpleNamespace(untouched=lambda: untouched[0], close=lambda: None)
    session = Session(home, [plain, parity], supervised=True, watch=watch)  # type: ignore[arg-type]
    session.run()
    session.spark = object()  # type: ignore[assignment]
    left, other = session.running
    for running in (left, other):
        running.lease = acquire(home, running.stream.name, purpose="session")
        running.lease.record_jvm(os.getpid())
    session._leave(left)
    stop_request.ask_for(home, "plain", "plain-0001")
    session._look_at_recoveries()
    with take(home, "plain", purpose="recovery plan plain-0001"):
        stop_request.clear_for(home, "plain", "plain-0001")
        session._look_at_recoveries()
        assert not started and not session.superseded, "the recovery lets go in a moment"
    session._look_at_recoveries()
    assert [running.stream.name for running in started] == ["plain"]
    assert session.running == [started[0], other] and started[0] is not left
    assert not session.superseded and not started[0].left
    owner = holder(home, "plain")
    assert owner is not None and owner.pid == os.getpid(), "it is this session's again"
    session._look_at_recoveries()
    assert len(started) == 1

    session._leave(started[0])
    stop_request.ask_for(home, "plain", "plain-0002")
    session._look_at_recoveries()
    stop_request.clear_for(home, "plain", "plain-0002")
    untouched[0] = False
    session._look_at_recoveries()
    assert session.superseded and len(started) == 1, "corrected code needs a new process"
    for running in session.running:
        running.lease.release()


@pytest.mark.parametrize("fault", ["moved away", "unwritable"])
def test_a_recovered_stream_whose_folder_is_another_one_makes_the_session_start_again(
    home: Settings, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The lock of a file that was moved away excludes nobody; and a fault of one stream ends no other one."""
    monkeypatch.setattr(StreamRunner, "start", lambda *_: pytest.fail("it is not this session's to start"))
    watch = SimpleNamespace(untouched=lambda: True, close=lambda: None)
    session = Session(home, [plain, parity], supervised=True, watch=watch)  # type: ignore[arg-type]
    session.run()
    session.spark = object()  # type: ignore[assignment]
    left, other = session.running
    for running in (left, other):
        running.lease = acquire(home, running.stream.name, purpose="session")
    session._leave(left)
    stop_request.ask_for(home, "plain", "plain-0001")
    session._look_at_recoveries()
    stop_request.clear_for(home, "plain", "plain-0001")
    if fault == "moved away":
        (home.state / "plain").rename(home.state / "before")
    else:
        monkeypatch.setattr("streaming_jobs.state.lease._write", lambda *_: (_ for _ in ()).throw(OSError("full")))
    session._look_at_recoveries()
    assert session.superseded and session.running == [left, other]
    monkeypatch.undo()
    if fault == "moved away":
        acquire(home, "plain", purpose="session", wait=0).release()
    for running in session.running:
        running.lease.release()


def test_a_stop_file_that_cannot_be_read_stops_its_stream_and_no_other_one(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker(home)
    monkeypatch.setattr(stop_request, "request", lambda *_: (_ for _ in ()).throw(PermissionError("root wrote it")))
    assert stop_request.asked(home, "plain") and not stop_request.for_recovery(home, "plain")


def test_a_stream_that_a_recovery_had_stopped_before_the_session_began_is_started_when_it_is_over(
    home: Settings,
) -> None:
    """Unless somebody else runs it by then, or wants it to stay stopped."""
    stop = marker(home)
    stop.write_text("stopped for recovery plan plain-0001")
    session = Session(home, [parity], supervised=True, left_out=["plain"])
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
    home: Settings, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    made: list[dict[str, Any]] = []

    class Made(Session):
        def __init__(self, settings: Settings, streams: Any, **options: Any) -> None:
            made.append({"streams": [s.name for s in streams], **options})
            super().__init__(settings, streams, **options)

    monkeypatch.setattr(module, "Session", Made)
    monkeypatch.setattr(module, "load", lambda *_, **__: SimpleNamespace(settings=home))
    monkeypatch.setattr(
        module, "Topology", SimpleNamespace(of_settings=lambda _: SimpleNamespace(select=lambda _: [plain, parity]))
    )
    monkeypatch.setattr(module, "_log_to_stderr", lambda: None)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    stop_request.ask_for(home, "plain", "plain-0001")
    assert module.main(["--streams", "plain,parity", option]) == 0
    assert (made[0]["streams"], made[0]["left_out"], made[0]["answers"]) == (["parity"], ["plain"], {})
    stop_request.clear_for(home, "plain", "plain-0001")
    stop_request.ask(home, "plain", "by hand")
    assert module.main(["--streams", "plain,parity", option]) == 0
    assert (made[1]["streams"], made[1]["left_out"]) == (["parity"], [])


def test_a_start_that_preflight_refuses_leaves_the_marker(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = marker(home)
    stop.write_text("by hand")

    def refused(_: StreamRunner) -> None:
        raise PreflightRefused("fenced", "resume it")

    with monkeypatch.context() as patched:
        patched.setattr(StreamRunner, "preflight", refused)
        assert Session(home, [plain], answers=stop_request.requests(home)).run() == 78
    assert stop.exists()
    with monkeypatch.context() as patched:
        patched.setattr(StreamRunner, "preflight", lambda _: (_ for _ in ()).throw(TransientError("away", "wait")))
        Session(home, [plain], answers=stop_request.requests(home)).run()
        assert not stop.exists(), "what may pass is tried again"
    stop.write_text("by hand")
    assert Session(home, [plain], answers=stop_request.requests(home)).run() == 0 and not stop.exists()
    stop.write_text("stopped for recovery plan plain-0001")
    assert Session(home, [plain], answers=stop_request.requests(home)).run() == 0
    assert stop.exists(), "a recovery's request is ended by the recovery"


def test_a_stream_that_is_over_is_left_while_others_go_on_once_that_is_written(
    home: Settings, monkeypatch: pytest.MonkeyPatch, looping: Callable[[Session], None]
) -> None:
    polls: list[str] = []
    full = [True]

    def write(settings: Settings, status: Status) -> None:
        if full[0] and status.stream == "plain" and status.state == "failed":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_status(settings, status)

    def poll(running: StreamRunner, _: object) -> None:
        polls.append(running.stream.name)
        if len(polls) == 2:
            running_of["plain"].status.state = "failed"
        if len(polls) == 6:
            assert holder(home, "plain") is not None, "its end is not written yet"
            full[0] = False
        if len(polls) == 10:
            assert holder(home, "plain") is None and holder(home, "parity") is not None
            assert state(home, "plain") == "failed"
            running_of["parity"].status.state = "stopped"

    monkeypatch.setattr(module, "write_status", write)
    monkeypatch.setattr(StreamRunner, "poll", poll)
    monkeypatch.setattr(Session, "_start_spark", lambda self, _: setattr(self, "spark", object()))
    monkeypatch.setattr(Session, "_end_spark", lambda _: None)
    monkeypatch.setattr(module, "_LOOK_EVERY", 0.001)
    session = Session(home, [plain, parity])
    running_of: dict[str, StreamRunner] = {}
    monkeypatch.setattr(
        Session,
        "_loop",
        lambda self: (running_of.update({r.stream.name: r for r in self.running}), looping(self)),
    )
    session.run()
    assert [running.left for running in session.running] == [True, False], "the last one keeps its lease to the end"


def stuck_session(home: Settings, monkeypatch: pytest.MonkeyPatch, looping: Callable[[Session], None]) -> Session:
    """One whose stream `plain` has a batch that never ends; a process that sleeps stands for the JVM."""

    def start(self: Session, leases: Any) -> None:
        self.spark = SimpleNamespace(stop=lambda: pytest.fail("it would wait for the batch"))  # type: ignore[assignment]
        self.jvm = subprocess.Popen(["sleep", "60"])
        for lease in leases:
            lease.record_jvm(self.jvm.pid)
        self.running[0].pipeline = SimpleNamespace(in_batch=True)  # type: ignore[assignment]

    monkeypatch.setattr(Session, "_start_spark", start)
    monkeypatch.setattr(Session, "_loop", looping)
    monkeypatch.setattr(StreamRunner, "poll", lambda self, _: self._ending(-1000.0))
    return Session(home, [plain])


def test_a_batch_that_never_ends_ends_the_session_and_its_jvm_and_keeps_the_lease_until_the_process_is_gone(
    home: Settings, monkeypatch: pytest.MonkeyPatch, looping: Callable[[Session], None]
) -> None:
    session = stuck_session(home, monkeypatch, looping)
    with pytest.raises(TransientError, match="stream plain did not end within 300 s"):
        session.run()
    assert session.jvm is not None and session.jvm.returncode == -9
    assert state(home, "plain") == "failed" and session.in_batch
    assert holder(home, "plain") is not None, "the batch may still commit"


def test_a_process_with_a_batch_that_never_ends_ends_at_once(
    home: Settings, monkeypatch: pytest.MonkeyPatch, looping: Callable[[Session], None]
) -> None:
    session, ended = stuck_session(home, monkeypatch, looping), []
    monkeypatch.setattr(module, "load", lambda *_, **__: SimpleNamespace(settings=home))
    monkeypatch.setattr(
        module, "Topology", SimpleNamespace(of_settings=lambda _: SimpleNamespace(select=lambda _: [plain]))
    )
    monkeypatch.setattr(module, "Session", lambda *_, **__: session)
    monkeypatch.setattr(module, "_log_to_stderr", lambda: None)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(module.os, "_exit", ended.append)
    assert module.main(["--streams", "plain"]) == 1
    assert ended == [1]


def test_a_jvm_that_is_gone_is_told_as_that(
    home: Settings, monkeypatch: pytest.MonkeyPatch, looping: Callable[[Session], None]
) -> None:
    def start(self: Session, _: Any) -> None:
        self.spark = SimpleNamespace(stop=lambda: None)  # type: ignore[assignment]
        self.jvm = subprocess.Popen(["sleep", "60"])

    def poll(running: StreamRunner, _: object) -> None:
        assert session.jvm is not None
        session.jvm.kill()
        raise RuntimeError("An error occurred while calling o87.isActive")

    monkeypatch.setattr(Session, "_start_spark", start)
    monkeypatch.setattr(Session, "_loop", looping)
    monkeypatch.setattr(StreamRunner, "poll", poll)
    session = Session(home, [plain])
    with pytest.raises(TransientError, match="Spark's JVM is gone: killed by signal 9, perhaps because memory ran out"):
        session.run()
    status = read_status(home, "plain")
    assert status is not None and status.error is not None
    assert status.error["found"].startswith("Spark's JVM is gone") and holder(home, "plain") is None


class Watch:
    """Says that the streams it is asked for have other code, if they are among `changed`."""

    def __init__(self, *changed: str) -> None:
        self.changed = set(changed)
        self.closed = False

    def newer(self, streams: Iterable[str]) -> bool:
        return not self.changed.isdisjoint(streams)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("changed", "state", "makes_way"),
    [("plain", "failed", True), ("parity", "failed", False), ("plain", "stopped", False), ("plain", "running", False)],
)
def test_a_session_makes_way_for_other_code_of_a_stream_that_failed_and_of_no_other(
    home: Settings, changed: str, state: str, makes_way: bool
) -> None:
    watch: Any = Watch(changed)
    session = Session(home, [plain, parity], supervised=True, watch=watch)
    session.run()
    session.running[0].status.state = state  # type: ignore[assignment]
    session._look_at_code()
    assert (session.superseded, watch.closed) == (makes_way, True)


def test_a_failed_stream_that_runs_or_was_stopped_elsewhere_is_nobodys_reason_to_start_again(home: Settings) -> None:
    watch: Any = Watch("plain")
    session = Session(home, [plain, parity], supervised=True, watch=watch)
    session.run()
    session.running[0].status.state, session.running[0].left = "failed", True
    with take(home, "plain", purpose="session"):
        session._look_at_code()
    path = marker(home)
    session._look_at_code()
    assert not session.superseded
    path.unlink()
    session._look_at_code()
    assert session.superseded


def test_a_stream_that_used_up_its_tries_is_tried_again_as_long_as_another_one_runs(
    home: Settings, monkeypatch: pytest.MonkeyPatch, looping: Callable[[Session], None]
) -> None:
    polls: list[str] = []

    def poll(running: StreamRunner, _: object) -> None:
        polls.append(running.stream.name)
        if len(polls) == 1:
            for _try in range(home.for_stream("plain").max_restarts + 1):
                running.fail(TransientError("away"))
        if len(polls) == 6:
            assert holder(home, "plain") is not None, "it is this session that tries again"
            session.running[1].status.state = "stopped"

    def start(self: Session, _: object) -> None:
        self.spark = SimpleNamespace(stop=lambda: None)  # type: ignore[assignment]

    monkeypatch.setattr(StreamRunner, "poll", poll)
    monkeypatch.setattr(Session, "_start_spark", start)
    monkeypatch.setattr(Session, "_loop", looping)
    monkeypatch.setattr(module, "_LOOK_EVERY", 0.001)
    session = Session(home, [plain, parity])
    assert session.run() == 1
    assert len(polls) == 6, "nothing else runs: who keeps sessions running starts the next one sooner"
    assert (state(home, "plain"), state(home, "parity")) == ("failed", "stopped")


def test_a_wrong_trigger_is_one_line_before_anything_is_started(
    home: Settings, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Session, "run", lambda _: pytest.fail("it was started"))
    try:
        assert module.main(["--streams", "plain", "--trigger", "sometimes"]) == 2
    finally:
        structlog.reset_defaults()
    (line,) = capfd.readouterr().err.splitlines()
    assert "session failed" in line and "--trigger: 'sometimes' is not a trigger" in line
