"""The session around its streams: whatever goes wrong with one thing, leases are released and the others go on."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streaming_jobs import session as module
from streaming_jobs.errors import LeaseBusy, TransientError
from streaming_jobs.lease import holder, take
from streaming_jobs.progress import read_status
from streaming_jobs.running import RunningStream
from streaming_jobs.session import STOPPED_FOR_RECOVERY, Session
from streaming_jobs.settings import Settings
from tests.conftest import SettingsFactory
from tests.unit.worlds import parity, plain


@pytest.fixture
def home(settings: SettingsFactory, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings of a session whose streams end as soon as they are started; nothing starts Spark."""
    monkeypatch.setattr(module, "_LEASE_WAIT", 0)
    monkeypatch.setattr(Session, "_start_spark", lambda self, _: [r._stopped() for r in self.running if not r.ended])
    monkeypatch.setattr(Session, "_loop", lambda _: None)
    monkeypatch.setattr(RunningStream, "preflight", lambda _: None)
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
    def preflight(running: RunningStream) -> None:
        if running.stream is plain:
            raise RuntimeError("the log is garbled")

    monkeypatch.setattr(RunningStream, "preflight", preflight)
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

    monkeypatch.setattr(RunningStream, "refresh_status", gone)
    monkeypatch.setattr(Session, "_end_spark", end)
    with pytest.raises(ConnectionError):
        Session(home, [plain, parity]).run()
    assert ended == [1]
    assert (holder(home, "plain"), holder(home, "parity")) == (None, None)


def test_a_start_that_is_refused_leaves_a_stop_on_purpose_as_it_is(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load", lambda *_, **__: SimpleNamespace(settings=home))
    monkeypatch.setattr(module, "Topology", SimpleNamespace(load=lambda _: SimpleNamespace(select=lambda _: [plain])))
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
    assert Session(home, [plain], respect_stop=respect).run() == 0
    assert path.exists() == respect


def test_an_error_of_the_session_itself_is_told_by_each_stream(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_java(*_: Any) -> None:
        raise TransientError("no Java")

    monkeypatch.setattr(Session, "_start_spark", no_java)
    with pytest.raises(TransientError):
        Session(home, [plain]).run()
    assert state(home, "plain") == "failed"


@pytest.mark.parametrize("supervised", [True, False])
def test_a_session_ends_with_the_recovery_of_one_of_its_streams(home: Settings, supervised: bool) -> None:
    """If somebody starts the next one: the code in this process is the code that was wrong."""
    session = Session(home, [plain, parity], supervised=supervised)
    session.run()
    stop = marker(home)
    for text, ends in (("by hand", False), (None, False), (f"{STOPPED_FOR_RECOVERY}plain-0001", False), (None, True)):
        if text is None:
            stop.unlink()
        else:
            stop.write_text(text)
        session._look_at_recoveries()
        assert session.stop_all.is_set() == (ends and supervised)
