"""The file of session events: append-only, bounded, and no reason for a stream to stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from streaming_jobs.settings import Settings
from streaming_jobs.state import stream_history
from streaming_jobs.state.status import Status
from streaming_jobs.state.stream_folder import StreamFolder
from streaming_jobs.state.stream_history import note_session_event as note


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


def test_events_are_read_back_in_order_and_a_line_that_was_cut_off_takes_no_other_along(settings: Settings) -> None:
    status = Status("s", pid=7, generation=2, batch=40, code_version="abc (0.1)", run_id="r")
    note(settings, status, "started")
    note(settings, status, "failed", "x" * 5_000)
    started, failed = stream_history.session_events(settings, "s")
    assert (started.what, started.pid, started.run_id, started.generation, started.batch, started.code) == (
        ("started", 7, "r", 2, 40, "abc (0.1)")
    )
    assert failed.what == "failed" and len(failed.reason) == 300
    assert stream_history.session_events(settings, "nobody") == []
    note(settings, Status("s", pid=1), "started")
    path = StreamFolder.of(settings, "s").sessions
    path.write_text(path.read_text() + '\n{"at": 17')
    note(settings, Status("s", pid=2), "started")
    assert [event.pid for event in stream_history.session_events(settings, "s")] == [7, 7, 1, 2]


def test_the_file_stays_small_and_keeps_the_newest(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_history, "LIMIT", 4_000)
    for number in range(200):
        note(settings, Status("s", pid=number + 1), "started")
    events = stream_history.session_events(settings, "s")
    assert StreamFolder.of(settings, "s").sessions.stat().st_size <= 4_000
    assert [event.pid for event in events] == list(range(201 - len(events), 201))
    assert len(events) > 10


def test_a_file_that_cannot_be_written_stops_nothing(settings: Settings) -> None:
    StreamFolder.of(settings, "s").make().sessions.mkdir()
    note(settings, Status("s"), "started")
