"""`recourse chaos` of both subjects: what it prints, how it ends, and what becomes of the home."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from orchestration import cli
from streaming_jobs.errors import UsageError
from streaming_jobs.examples.flights.truth import TruthCheck
from streaming_jobs.verification.chaos.flight_damages import DamageOutcome
from streaming_jobs.verification.chaos.flight_subject import FLIGHTS, RuleCheck, TableFindings
from streaming_jobs.verification.chaos.kill_loop import LoopPlan, LoopReport, plan_of
from streaming_jobs.verification.chaos.number_subject import NUMBERS, TopicFindings
from streaming_jobs.verification.chaos.numbers import WrittenTopicCheck
from streaming_jobs.verification.chaos.sessions import ChaosFailed, Tally
from streaming_jobs.verification.ledger_chain import TableFault
from streaming_jobs.verification.offset_ranges import Span
from streaming_jobs.verification.verifier import OverallVerdict, verify
from tests.support.proofs import BATCHES, CLEAN, SUBJECTS, make_tables, topic

pytestmark = pytest.mark.slow

TablesReport = LoopReport[TableFindings]
TopicsReport = LoopReport[TopicFindings]
RULES = RuleCheck("flights_judged", 60, 40, 15, 5, ())
COPIED = WrittenTopicCheck("chaos_copied", 1500, 1500, 0, 0, 0, 0)
FIGURES = WrittenTopicCheck("chaos_figures", 1500, 120, 0, 0, 0, 0, closed=40, groups=40)
FAULT = TableFault(CLEAN, 7, "rows", "3 offsets are in more than one row")


@pytest.fixture
def verdict(tmp_path: Path) -> OverallVerdict:
    return verify(SUBJECTS, make_tables(tmp_path / "tables"), topic(), finished=True)


@pytest.fixture
def report(verdict: OverallVerdict, tmp_path: Path) -> TablesReport:
    tally = Tally(
        kills=3,
        points=Counter({"flights_clean:staged": 1, "carrier_totals:staged": 1}),
        victims=Counter({"jvm": 1}),
        broker_kills=1,
        sessions=4,
        replayed={("flights_clean", 1, 3)},
    )
    checks = tuple(TruthCheck(subject.table, True, 5, 5, "every row is equal") for subject in SUBJECTS)
    findings = TableFindings(15, 0, (), checks, (RULES,))
    return LoopReport(plan_of(FLIGHTS, 3, 7), tmp_path, 12.3, tally, verdict, findings)


@pytest.fixture
def topics(report: TablesReport) -> TopicsReport:
    """The outcome of a run over topics."""
    tally = replace(
        report.tally,
        points=Counter({"numbers_copied:transaction_open": 1, "numbers_added_up:transaction_open": 1}),
        broker_kills=2,
        transactions_cut=1,
        zombies=1,
    )
    findings = TopicFindings(1500, 40, (), (COPIED, FIGURES), 3120, ())
    return LoopReport(plan_of(NUMBERS, 3, 7), report.home, 12.3, tally, report.verdict, findings)


@dataclass
class Chaos:
    """The command with a loop that ends as the test says, in a home of the test's."""

    home: Path
    capsys: pytest.CaptureFixture[str]
    outcome: LoopReport[Any] | Exception | None = None
    plans: list[LoopPlan] = field(default_factory=list)
    out: str = ""
    err: str = ""

    def run(self, subject: Any, plan: LoopPlan, folder: Path, base: Any, tell: Any) -> LoopReport[Any]:
        self.plans.append(plan)
        (folder / "touched").touch()
        if isinstance(self.outcome, LoopReport):
            return replace(self.outcome, plan=plan)
        assert self.outcome is not None
        raise self.outcome

    def __call__(self, outcome: LoopReport[Any] | Exception | None, *arguments: str) -> int:
        self.outcome = outcome
        of = ["--subject", "topics"] if isinstance(outcome, LoopReport) and outcome.plan.rate == NUMBERS.rate else []
        code = cli.main(["chaos", *of, "--home", str(self.home), *arguments])
        self.out, self.err = self.capsys.readouterr()
        return code

    @property
    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.out.splitlines()]


@pytest.fixture
def chaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chaos:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("orchestration.cli.preparations.fetch_jars", lambda *_, **__: None)
    made = Chaos(tmp_path / "chaos", capsys)
    monkeypatch.setattr("streaming_jobs.verification.chaos.kill_loop.run", made.run)
    return made


def test_a_run_that_proves_it_ends_with_0_and_takes_its_home_away(chaos: Chaos, report: TablesReport) -> None:
    assert chaos(report, "--kills", "3", "--seed", "7") == 0
    equation = "60 records = 40 good + 15 quarantined + 5 dropped"
    assert ["flights_judged", *equation.split(), "the", "same"] in chaos.lines
    for row in (["lost", "0"], ["doubled", "0"], ["at", "staged", "2", "on", "2", "streams"], ["seed", "7"]):
        assert row in chaos.lines
    assert "--kills 3 --seed 7 repeats these faults" in chaos.err
    assert "every offset is in its table exactly once" in chaos.err
    assert not chaos.home.exists()


def test_the_report_of_topics_has_kills_by_kind_and_each_topic(chaos: Chaos, topics: TopicsReport) -> None:
    assert chaos(topics, "--kills", "3", "--seed", "7") == 0
    assert "chaos --kills 3 --seed 7 --subject topics repeats these faults" in chaos.err
    for row in (
        ["at", "transaction_open", "2", "on", "2", "streams"],
        ["in", "an", "open", "transaction", "1"],
        ["zombies,", "each", "refused", "1"],
        ["records", "fed", "1,500"],
        ["chaos_copied", "1,500", "1,500", "0", "0", "0", "0", "-", "ok"],
        ["chaos_figures", "1,500", "120", "0", "0", "0", "0", "40", "of", "40", "ok"],
    ):
        assert row in chaos.lines, chaos.out
    assert chaos.plans == [plan_of(NUMBERS, 3, 7)] and (chaos.plans[0].rate, chaos.plans[0].max_offsets) == (
        150.0,
        1000,
    )


def test_keep_leaves_the_home_and_says_where(chaos: Chaos, report: TablesReport) -> None:
    assert chaos(report, "--kills", "3", "--keep") == 0
    assert (chaos.home / "touched").exists() and f"the home is kept: {chaos.home}" in chaos.err


@pytest.mark.parametrize(
    ("of", "change", "message"),
    [
        ("report", {"faults": (FAULT,)}, "not whole: flights_clean version 7: 3 offsets are in more than one row"),
        ("report", {"versions_unseen": 1}, "cleaned up unread"),
        ("report", {"truth": (TruthCheck("totals", False, 1, 2, "1 rows missing"),)}, "totals: 1 rows missing"),
        ("report", {"rules": (replace(RULES, differences=("1 missing",)),)}, "not as the rules say: 1 missing"),
        ("report", {"rules": (replace(RULES, dropped=4),)}, "other rows or numbers"),
        ("report", {"scenarios": (DamageOutcome("deleted", False, 0, "it started", ""),)}, "NO: it started"),
        ("topics", {"checks": (replace(COPIED, missing=1),)}, "WRONG"),
        ("topics", {"checks": (replace(COPIED, disordered=1),)}, "WRONG"),
        ("topics", {"checks": (replace(FIGURES, closed=39),)}, "39 of 40"),
        ("topics", {"checks": ()}, "NOT PROVED"),
        ("topics", {"fed": 0}, "NOT PROVED"),
        ("topics", {"unlike": ("chaos_copied",)}, "topic chaos_copied is not what the reader outside saw"),
        ("topics", {"feed_faults": ("key 1:2..3 is cut",)}, "not fed as it should be: key 1:2..3 is cut"),
    ],
)
def test_anything_that_is_not_right_ends_with_1_and_keeps_the_home(
    chaos: Chaos, request: pytest.FixtureRequest, of: str, change: dict[str, Any], message: str
) -> None:
    right = request.getfixturevalue(of)
    assert chaos(replace(right, findings=replace(right.findings, **change))) == 1
    assert message in chaos.out + chaos.err and "NOT PROVED" in chaos.err
    assert chaos.home.exists()


def test_offsets_that_were_lost_are_listed(chaos: Chaos, report: TablesReport) -> None:
    first, *others = report.verdict.streams
    lost = replace(report.verdict, streams=(replace(first, lost=(Span("flights", 1, 5, 9),)), *others))
    assert chaos(replace(report, verdict=lost)) == 1
    assert "flights_clean: lost: flights-1 5..8 (4 offsets)" in chaos.err


def test_a_run_that_cannot_go_on_says_why_and_keeps_the_home(chaos: Chaos) -> None:
    assert chaos(ChaosFailed("a driver refused to continue (exit code 78)", "its log is there")) == 1
    assert "REC-031 a driver refused to continue" in chaos.err and "the home is kept" in chaos.err


def test_a_folder_that_is_in_use_is_refused(chaos: Chaos) -> None:
    chaos.home.mkdir()
    (chaos.home / "mine").touch()
    assert chaos(None) == UsageError.exit_code
    assert "is not empty" in chaos.err and (chaos.home / "mine").exists() and chaos.plans == []


def test_json_has_stable_keys(chaos: Chaos, report: TablesReport) -> None:
    assert chaos(report, "--seed", "7", "-o", "json") == 0
    value = json.loads(chaos.out)
    assert value["ok"] is True and value["seed"] == 7
    assert value["points"] == {"carrier_totals:staged": 1, "flights_clean:staged": 1}
    assert (value["batches_replayed"], value["batches_skipped"], value["lost"], value["doubled"]) == (1, 0, 0, 0)
    assert value["offsets_verified"] == 3 * value["records"] == 3 * 15 * BATCHES
    assert value["rules"] == [{**asdict(RULES), "differences": [], "ok": True}]
    assert [stream["proved"] for stream in value["streams"]] == [True] * 3


def test_json_of_topics_has_stable_keys(chaos: Chaos, topics: TopicsReport) -> None:
    assert chaos(topics, "--seed", "7", "-o", "json") == 0
    value = json.loads(chaos.out)
    assert value["ok"] is True and (value["records_fed"], value["keys"], value["zombies"]) == (1500, 40, 1)
    assert (value["broker_kills"], value["broker_kills_in_transactions"]) == (2, 1)
    assert [(one["topic"], one["ok"], one["closed"]) for one in value["topics"]] == [
        ("chaos_copied", True, 0),
        ("chaos_figures", True, 40),
    ]


def test_scenarios_are_for_tables(chaos: Chaos, topics: TopicsReport) -> None:
    assert chaos(topics, "--scenarios") == UsageError.exit_code
    assert "--scenarios damages streams that write tables" in chaos.err and chaos.plans == []
