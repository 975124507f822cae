"""`recourse chaos --subject topics`: what it prints, and which findings end it with 1."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestration import cli
from streaming_jobs.errors import UsageError
from streaming_jobs.verification.chaos.session_runner import Tally
from streaming_jobs.verification.subject import Subject
from streaming_jobs.verification.topic_chaos.checks import TopicCheck
from streaming_jobs.verification.topic_chaos.run import Plan, Report
from streaming_jobs.verification.verifier import verify
from tests.support.proofs import CLEAN, make_tables, topic

COPIED = TopicCheck("chaos_copied", 1500, 1500, 0, 0, 0, 0)
FIGURES = TopicCheck("chaos_figures", 1500, 120, 0, 0, 0, 0, closed=40, groups=40)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    tally = Tally(
        kills=3,
        points=Counter({"numbers_copied:transaction_open": 1, "numbers_added_up:transaction_open": 1}),
        victims=Counter({"jvm": 1}),
        broker_kills=2,
        transactions_cut=1,
        zombies=1,
        sessions=7,
    )
    verdict = verify((Subject(CLEAN, CLEAN, "flights"),), make_tables(tmp_path / "tables"), topic(), finished=True)
    return Report(Plan(3, 7), tmp_path, 12.3, tally, 1500, 40, (), (COPIED, FIGURES), 3120, (), verdict)


@pytest.fixture
def plans(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("orchestration.cli.preparations.fetch_jars", lambda *_, **__: None)
    return returns(monkeypatch, report)


def returns(monkeypatch: pytest.MonkeyPatch, report: Report) -> list[Plan]:
    seen: list[Plan] = []

    def run(plan: Plan, folder: Path, base: Any, tell: Any) -> Report:
        seen.append(plan)
        return replace(report, plan=plan)

    monkeypatch.setattr("streaming_jobs.verification.topic_chaos.run.run", run)
    return seen


def chaos(*arguments: str) -> int:
    return cli.main(["chaos", "--subject", "topics", *arguments])


def test_the_report_has_kills_by_kind_and_each_topic(plans: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos("--kills", "3", "--seed", "7") == 0
    printed = capsys.readouterr()
    assert "chaos --kills 3 --seed 7 --subject topics repeats these faults" in printed.err
    lines = [line.split() for line in printed.out.splitlines()]
    for row in (
        ["at", "transaction_open", "2", "on", "2", "streams"],
        ["in", "an", "open", "transaction", "1"],
        ["zombies,", "each", "refused", "1"],
        ["records", "fed", "1,500"],
        ["chaos_copied", "1,500", "1,500", "0", "0", "0", "0", "-", "ok"],
        ["chaos_figures", "1,500", "120", "0", "0", "0", "0", "40", "of", "40", "ok"],
    ):
        assert row in lines, printed.out
    assert plans == [Plan(3, 7, 150.0, 1000)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checks": (replace(COPIED, missing=1),)}, "WRONG"),
        ({"checks": (replace(COPIED, disordered=1),)}, "WRONG"),
        ({"checks": (replace(FIGURES, closed=39),)}, "39 of 40"),
        ({"checks": ()}, "NOT PROVED"),
        ({"fed": 0}, "NOT PROVED"),
        ({"unlike": ("chaos_copied",)}, "topic chaos_copied is not what the reader outside saw"),
        ({"feed_faults": ("key 1:2..3 has 1 numbers",)}, "not fed as it should be: key 1:2..3 has 1 numbers"),
    ],
)
def test_anything_that_is_not_right_ends_with_1(
    plans: list[Plan],
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    message: str,
) -> None:
    returns(monkeypatch, replace(report, **change))
    assert chaos() == 1
    printed = capsys.readouterr()
    assert message in printed.out + printed.err and "NOT PROVED" in printed.err


def test_json_has_stable_keys(plans: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos("--seed", "7", "-o", "json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["ok"] is True and (value["records_fed"], value["keys"], value["zombies"]) == (1500, 40, 1)
    assert (value["broker_kills"], value["broker_kills_in_transactions"]) == (2, 1)
    assert [(one["topic"], one["ok"], one["closed"]) for one in value["topics"]] == [
        ("chaos_copied", True, 0),
        ("chaos_figures", True, 40),
    ]


def test_scenarios_are_for_tables(plans: list[Plan], capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos("--scenarios") == UsageError.exit_code
    assert "--scenarios damages streams that write tables" in capsys.readouterr().err and plans == []
