"""Notes of supervisors: the fresh ones count, and none keeps its supervisor from working."""

from __future__ import annotations

from streaming_jobs.state import supervisors
from tests.conftest import SettingsFactory


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
