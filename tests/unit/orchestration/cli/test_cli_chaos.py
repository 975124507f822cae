"""`recourse chaos`: what it prints, how it ends, and what becomes of the home."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from orchestration import cli
from streaming_jobs.errors import UsageError
from streaming_jobs.examples.flights.truth import TruthCheck
from streaming_jobs.verification.chaos.damages import Outcome
from streaming_jobs.verification.chaos.kill_loop import Plan, Report
from streaming_jobs.verification.chaos.rule_truth import RuleCheck
from streaming_jobs.verification.chaos.session_runner import ChaosFailed, Tally
from streaming_jobs.verification.chaos.subjects import FLIGHTS
from streaming_jobs.verification.ledger_chain import Fault
from streaming_jobs.verification.offset_ranges import Span
from streaming_jobs.verification.verdict import Verdict
from streaming_jobs.verification.verifier import verify
from tests.support.proofs import BATCHES, CLEAN, make_tables, topic

RULES = RuleCheck("flights_judged", 60, 40, 15, 5, ())
FAULT = Fault(CLEAN, 7, "rows", "3 offsets are in more than one row")


@pytest.fixture
def verdict(tmp_path: Path) -> Verdict:
    return verify(FLIGHTS, make_tables(tmp_path / "tables"), topic(), finished=True)


@pytest.fixture
def report(verdict: Verdict, tmp_path: Path) -> Report:
    tally = Tally(
        kills=3,
        points=Counter({"flights_clean:staged": 1, "carrier_totals:staged": 1}),
        victims=Counter({"jvm": 1}),
        broker_kills=1,
        sessions=4,
        replayed={("flights_clean", 1, 3)},
    )
    checks = tuple(TruthCheck(subject.table, True, 5, 5, "every row is equal") for subject in FLIGHTS)
    return Report(Plan(3, 7), tmp_path, 12.3, tally, 12, 15, 0, (), verdict, checks, (RULES,))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("orchestration.cli.preparations.fetch_jars", lambda *_, **__: None)
    return tmp_path / "chaos"


def runs(monkeypatch: pytest.MonkeyPatch, outcome: Report | Exception) -> None:
    def run(plan: Plan, folder: Path, base: Any, tell: Any) -> Report:
        (folder / "touched").touch()
        if isinstance(outcome, Exception):
            raise outcome
        return replace(outcome, plan=plan)

    monkeypatch.setattr("streaming_jobs.verification.chaos.kill_loop.run", run)


def test_a_run_that_proves_it_ends_with_0_and_takes_its_home_away(
    home: Path, report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(monkeypatch, report)
    assert cli.main(["chaos", "--kills", "3", "--seed", "7", "--home", str(home)]) == 0
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines()]
    equation = "60 records = 40 good + 15 quarantined + 5 dropped"
    assert ["flights_judged", *equation.split(), "the", "same"] in lines
    for row in (["lost", "0"], ["doubled", "0"], ["at", "staged", "2", "on", "2", "streams"], ["seed", "7"]):
        assert row in lines
    assert "--kills 3 --seed 7 repeats these faults" in printed.err
    assert "every offset is in its table exactly once" in printed.err
    assert not home.exists()


def test_keep_leaves_the_home_and_says_where(
    home: Path, report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(monkeypatch, report)
    assert cli.main(["chaos", "--kills", "3", "--home", str(home), "--keep"]) == 0
    assert (home / "touched").exists() and f"the home is kept: {home}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"faults": (FAULT,)}, "not whole: flights_clean version 7: 3 offsets are in more than one row"),
        ({"versions_unseen": 1}, "cleaned up unread"),
        ({"truth": (TruthCheck("carrier_totals", False, 1, 2, "1 rows missing"),)}, "carrier_totals: 1 rows missing"),
        ({"rules": (replace(RULES, differences=("1 rows missing",)),)}, "not as the rules say: 1 rows missing"),
        ({"rules": (replace(RULES, dropped=4),)}, "other rows or numbers"),
        ({"scenarios": (Outcome("checkpoint deleted", False, 0, "it started", ""),)}, "NO: it started"),
    ],
)
def test_anything_that_is_not_right_ends_with_1_and_keeps_the_home(
    home: Path,
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    message: str,
) -> None:
    runs(monkeypatch, replace(report, **change))
    assert cli.main(["chaos", "--home", str(home)]) == 1
    printed = capsys.readouterr()
    assert message in printed.out + printed.err and "NOT PROVED" in printed.err
    assert home.exists()


def test_offsets_that_were_lost_are_listed(
    home: Path, report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = report.verdict.streams
    lost = replace(report.verdict, streams=(replace(first, lost=(Span("flights", 1, 5, 9),)), *others))
    runs(monkeypatch, replace(report, verdict=lost))
    assert cli.main(["chaos", "--home", str(home)]) == 1
    assert "flights_clean: lost: flights-1 5..8 (4 offsets)" in capsys.readouterr().err


def test_a_run_that_cannot_go_on_says_why_and_keeps_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(monkeypatch, ChaosFailed("a driver refused to go on (exit code 78)", "its log is there"))
    assert cli.main(["chaos", "--home", str(home)]) == 1
    printed = capsys.readouterr().err
    assert "REC-031 a driver refused to go on" in printed and "the home is kept" in printed


def test_a_folder_that_is_in_use_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    (home / "mine").touch()
    assert cli.main(["chaos", "--home", str(home)]) == UsageError.exit_code
    assert "is not empty" in capsys.readouterr().err and (home / "mine").exists()


def test_json_has_stable_keys(
    home: Path, report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs(monkeypatch, report)
    assert cli.main(["chaos", "--seed", "7", "--home", str(home), "-o", "json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["ok"] is True and value["seed"] == 7
    assert value["points"] == {"carrier_totals:staged": 1, "flights_clean:staged": 1}
    assert (value["batches_replayed"], value["batches_skipped"], value["lost"], value["doubled"]) == (1, 0, 0, 0)
    assert value["offsets_verified"] == 3 * value["records"] == 3 * 15 * BATCHES
    assert value["rules"] == [{**asdict(RULES), "differences": [], "ok": True}]
    assert [stream["proved"] for stream in value["streams"]] == [True] * 3
