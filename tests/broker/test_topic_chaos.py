"""The kill loop from topic to topic, in short forms and in full: what is written is what arithmetic says."""

from __future__ import annotations

from pathlib import Path

import pytest

from streaming_jobs.settings import Settings
from streaming_jobs.verification.chaos.faults import Freeze, Lane, Phase, PointKill, Steps
from streaming_jobs.verification.chaos.kill_loop import LoopPlan, LoopReport, plan_of, run
from streaming_jobs.verification.chaos.number_subject import NUMBERS, TopicFindings

COPIES = ("numbers_copied", "numbers_copied_again")
FIGURES = ("numbers_copied", "numbers_added_up", "numbers_in_windows", "number_differences")
LONG_SEED, LONG_KILLS = 5, 60


def ran(home: Path, plan: LoopPlan, chosen: Steps | None = None) -> LoopReport[TopicFindings]:
    lines: list[str] = []
    report = run(NUMBERS, plan, home, Settings.load(), lines.append, chosen)
    found = report.findings
    assert report.ok, (lines, found, report.verdict)
    assert report.tally.unplanned == [], lines
    assert {check.topic for check in found.checks} and all(check.records_out > 0 for check in found.checks)
    assert all(check.records_in == found.fed for check in found.checks)
    assert found.seen == found.fed + sum(check.records_out for check in found.checks)
    return report


def test_a_zombie_in_an_open_transaction_changes_nothing_in_a_chain_of_two_streams(tmp_path: Path) -> None:
    """Kills in open transactions are in test_topic_sink_kills.py."""
    chosen = [Freeze(COPIES, COPIES[0], 1, "zombie")]
    report = ran(tmp_path / "home", plan_of(NUMBERS, 0, 3, rate=80, streams=COPIES), chosen)
    assert (report.tally.kills, report.tally.zombies) == (0, 1)
    copied, again = report.findings.checks
    assert copied.records_out == again.records_out == report.findings.fed


@pytest.mark.long
def test_figures_through_two_topics_are_what_arithmetic_says_after_a_kill_and_a_dead_broker(tmp_path: Path) -> None:
    """Minimum, maximum, difference, total, count, average and windowed counts of numbers in random order."""
    chosen = [
        Phase((Lane(FIGURES, (PointKill("numbers_added_up", "secondary_committed", 2),)),)),
        Freeze(FIGURES, "numbers_in_windows", 1, "broker"),
    ]
    report = ran(tmp_path / "home", plan_of(NUMBERS, 1, 4, rate=80, streams=FIGURES), chosen)
    assert (report.tally.kills, report.tally.transactions_cut, report.tally.broker_kills) == (1, 1, 1)
    closed = {check.topic: (check.closed, check.groups) for check in report.findings.checks if check.groups}
    assert closed.keys() == {"chaos_figures", "chaos_differences", "chaos_windows"}
    assert closed["chaos_figures"] == closed["chaos_differences"] == (report.findings.keys, report.findings.keys)
    assert all(right == groups >= 40 for right, groups in closed.values())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_sixty_kills_from_topic_to_topic_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    report = ran(tmp_path / "home", plan_of(NUMBERS, LONG_KILLS, LONG_SEED))
    tally = report.tally
    assert tally.kills + tally.not_made.total() == LONG_KILLS
    assert tally.processes["planner"] >= 3 and tally.processes["worker"] >= 3, tally.not_made
    assert tally.transactions_cut == tally.zombies == 5 and tally.broker_kills > 5
