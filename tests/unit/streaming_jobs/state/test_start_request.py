"""Start requests: the newest one counts, and only a start that came after it ends it."""

from __future__ import annotations

import time

from streaming_jobs.state import start_request, supervisors
from streaming_jobs.state.stream_folder import StreamFolder
from tests.conftest import SettingsFactory


def test_a_start_ends_the_requests_from_before_it_and_no_newer_one(settings: SettingsFactory) -> None:
    home = settings()
    assert start_request.request(home, "orders") is None and not start_request.pending(home, "orders", 0.0)
    start_request.clear(home, "orders", time.time())
    asked = start_request.ask(home, "orders", "anna")
    found = start_request.request(home, "orders")
    assert found == asked and found.who == "anna"
    assert start_request.pending(home, "orders", asked.since - 1)
    assert not start_request.pending(home, "orders", asked.since), "a process that began then has the code of then"
    start_request.clear(home, "orders", asked.since - 1)
    assert start_request.request(home, "orders") == asked
    start_request.clear(home, "orders", asked.since)
    assert start_request.request(home, "orders") is None
    StreamFolder.of(home, "orders").start.write_text("by hand")
    by_hand = start_request.request(home, "orders")
    assert by_hand is not None and by_hand.who == "by hand"


def test_a_note_of_a_supervisor_counts_while_it_is_fresh(settings: SettingsFactory) -> None:
    home = settings()
    assert supervisors.notes(home, "orders") == []
    supervisors.note(home, "shop", ["orders"], "run 1 is started", starts=True)
    (note,) = supervisors.notes(home, "orders")
    assert (note.job, note.verdict) == ("shop", "run 1 is started") and supervisors.notes(home, "totals") == []
    path = home.home / "supervisors" / "shop.json"
    path.write_text(path.read_text().replace(str(note.at)[:6], "100000"))
    assert supervisors.notes(home, "orders") == []
    path.write_text("{")
    assert supervisors.notes(home, "orders") == []


def test_a_full_disk_keeps_no_supervisor_from_working(settings: SettingsFactory) -> None:
    home = settings()
    home.home.mkdir(parents=True, exist_ok=True)
    (home.home / "supervisors").write_text("in the way")
    supervisors.note(home, "shop", ["orders"], "starts a session", starts=True)
    (home.home / "supervisors").unlink()
    assert supervisors.notes(home, "orders") == []
