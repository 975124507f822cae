"""`recourse fleet` and `recourse events`: what they print of a home in which nothing has run, and of wrong requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.orchestration.cli.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("empty_folder")]

SHOP = ("--set", "flows=streaming_jobs.examples.shop.streams")


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
