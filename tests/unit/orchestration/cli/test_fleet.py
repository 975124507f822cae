"""The fleet: runs as their events tell, and a budget that is used by each stale second."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from orchestration.cli.fleet import Freshness, session_runs, stale_seconds, streams_of
from orchestration.cli.progress import observe_all
from streaming_jobs.settings import Settings
from streaming_jobs.state.status import Status, TableAge, write_status
from streaming_jobs.state.stream_history import SessionEvent
from tests.conftest import SettingsFactory
from tests.support.timelines import lay_ledger, lay_sessions, ledger_line
from tests.support.worlds import STREAM
from tests.unit.orchestration.cli.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_folder")]

SHOP = ("--set", "flows=streaming_jobs.examples.shop.streams")


@pytest.mark.parametrize(
    ("events", "live", "runs"),
    [
        ([], False, []),
        ([(1, "started")], True, [(1, None, "running", 0)]),
        ([(1, "started")], False, [(1, None, "killed", 0)]),
        ([(1, "started"), (5, "stopped")], True, [(1, 5, "stopped", 0)]),
        ([(1, "started"), (3, "restarted"), (4, "restarted"), (9, "failed")], False, [(1, 9, "failed", 2)]),
        ([(1, "started"), (5, "started"), (6, "slice")], True, [(1, None, "killed", 0), (5, None, "running", 0)]),
        ([(2, "stopped"), (3, "started")], True, [(3, None, "running", 0)]),
    ],
)
def test_runs_are_what_their_events_tell(events: list[Any], live: bool, runs: list[Any]) -> None:
    made = session_runs([SessionEvent(at, what) for at, what in events], live=live)
    assert [(run.began, run.ended, run.outcome, run.restarts) for run in made] == runs


@pytest.mark.parametrize(
    ("times", "stale"),
    [([100.0], 0.0), ([0.0], 40.0), ([0.0, 50.0], 0.0), ([0.0, 80.0], 20.0), ([0.0, 10.0, 100.0], 30.0)],
)
def test_a_second_is_stale_when_the_newest_rows_are_older_than_the_objective(times: list[float], stale: float) -> None:
    assert stale_seconds(times, 60.0, 0.0, 100.0) == stale


def test_an_outage_that_began_before_the_window_counts_in_all_of_it() -> None:
    assert stale_seconds([0.0], 60.0, 1000.0, 1500.0) == 500.0
    assert stale_seconds([0.0, 1400.0], 60.0, 1000.0, 1500.0) == 400.0 + 40.0


def test_a_budget_that_is_used_up_is_below_zero() -> None:
    kept = Freshness("t", 60.0, 5.0, used=1.0, window=1000.0, share=0.99)
    assert kept.budget == pytest.approx(10.0) and kept.left == pytest.approx(0.9)
    assert Freshness("t", 60.0, 5.0, used=25.0, window=1000.0, share=0.99).left == pytest.approx(-1.5)
    assert Freshness("t", 60.0, 5.0, used=0.0, window=0.0, share=0.99).left == 1.0


def laid(home: Settings) -> None:
    """A stream whose table got rows 1,000 to 910, 600 and 20 seconds ago; its objective is a minute."""
    now = time.time()
    lay_ledger(home, [ledger_line(n, now - ago) for n, ago in enumerate((1000, 970, 940, 910, 600, 20))])
    lay_sessions(home, (now - 2000, "started"), (now - 1500, "failed"), (now - 1400, "started"))
    tables = {"totals": TableAge(now - 2000, now - 20, 60.0)}
    write_status(home, Status(STREAM, "stopped", started_at=now - 1400, heartbeat=now, tables=tables))


def test_a_stream_shows_its_budget_and_its_last_runs(settings: SettingsFactory) -> None:
    home = settings()
    laid(home)
    (one,) = streams_of(home, observe_all(home, [STREAM]))
    (fresh,) = one.freshness
    assert fresh.age == pytest.approx(20, abs=2) and fresh.window == pytest.approx(1000, abs=2)
    assert fresh.used == pytest.approx((310 - 60) + (580 - 60), abs=2)
    assert [run.outcome for run in one.runs] == ["failed", "killed"]


def test_fleet_prints_a_line_for_each_stream_and_writes_a_page(run: Run, tmp_path: Path) -> None:
    code, text, _ = run(*SHOP, "fleet", "--page", str(tmp_path / "fleet.html"))
    assert code == 0 and "availability" in text and "never" in text
    assert "availability" in (tmp_path / "fleet.html").read_text()
    printed = run(*SHOP, "fleet", "availability", "-o", "json")
    assert [stream["stream"] for stream in printed.value] == ["availability"]


def test_events_of_a_home_in_which_nothing_has_run_are_none(run: Run) -> None:
    printed = run(*SHOP, "events", "-o", "json")
    assert printed.code == 0 and printed.value == []


def test_a_kind_that_there_is_not_is_refused_with_the_nearest(run: Run) -> None:
    code, _, said = run(*SHOP, "events", "--kind", "recovry")
    assert code == 2 and "recovry" in said and "recovery" in said
