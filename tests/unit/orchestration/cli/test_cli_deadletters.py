"""`recourse deadletters` and `quarantine` as they are typed, without Kafka or Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestration.cli import deadletters, slices
from reprocessing.redrive.redrive import RedriveReport
from reprocessing.replay.difference import Difference
from reprocessing.slices.quarantine import settled
from reprocessing.slices.rebuild import SliceReport
from streaming_jobs.errors import UsageError
from streaming_jobs.ledger.positions import OffsetRange
from tests.support.days import Days, declared
from tests.support.redrives import asked, carry_out, quarantine_rows, record, with_letters
from tests.unit.orchestration.cli.conftest import Declare, Run

READ = OffsetRange("days", "id", {0: 0}, {0: 99})


@pytest.fixture
def life(tmp_path: Path, declare: Declare) -> Days:
    declare(declared())
    return with_letters(Days.of(tmp_path, 2), 100, 101, 102)


def test_dead_letters_are_listed_by_reason_and_shown_one_by_one(life: Days, run: Run) -> None:
    (listed,) = run.json("deadletters", "list")
    assert (listed["reason"], listed["topic"], listed["number"]) == ("malformed_json", "days", 3)
    assert "malformed_json" in run("deadletters", "list", "days").out
    shown = run.json("deadletters", "show", "days", "--offsets", "days/0:101-102")
    assert [each["offset"] for each in shown] == [101, 102]
    code, out, said = run("deadletters", "show", "days", "--limit", "1")
    assert code == 0 and "days/0:100  malformed_json" in out and "value: {" in out and "1 of 3" in said


def test_redrives_are_listed_with_what_became_of_each_record(life: Days, run: Run) -> None:
    asked(life, "a", [record(100), record(101, "dead again", reason_now="null_key")])
    carry_out(life)
    asked(life, "b", [record(102)])
    listed = run.json("deadletters", "list", "--redrives")
    assert [(each["id"], each["state"], each["outcomes"]) for each in listed] == [
        ("a", "committed", {"row": 1, "dead again": 1}),
        ("b", "waiting", {"row": 1}),
    ]
    shown = run.json("deadletters", "show", "days", "--redrive", "a")
    assert [(each["offset"], each["outcome"], each["reason_now"]) for each in shown] == [
        (100, "row", ""),
        (101, "dead again", "null_key"),
    ]
    assert "null_key" in run("deadletters", "show", "days", "--redrive", "a").out
    assert run.json("quarantine", "list", "--redrives") == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("deadletters", "show", "days", "--redrive", "c"),
        ("deadletters", "show", "days", "--offsets", "days/0:"),
        ("deadletters", "replay", "weeks"),
        ("quarantine", "show", "days"),
    ],
)
def test_what_cannot_be_is_refused_before_a_broker_is_looked_for(
    life: Days, run: Run, arguments: tuple[str, ...]
) -> None:
    code, _, said = run(*arguments)
    assert code == UsageError.exit_code and "REC-001" in said and not (life.settings.home / "broker").exists()


def test_what_a_rebuilt_slice_changes_in_the_quarantine_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    same = Difference("hours", 3, 2, 2, 0, 1, {}, ())
    aside = settled(quarantine_rows(1, 2), quarantine_rows(2, 3, 4))
    rebuilt = SliceReport("a", "s", "hours", "1 May", "committed", 4, 5, 99, 1, 0, 0, 1, 0.5, same, READ, aside)
    assert slices.as_json(rebuilt)["quarantine_came"] == 2
    deadletters._print(RedriveReport("s", "s_dead_letters", "committed", id="a", slices=(rebuilt,)))
    said = capsys.readouterr().err
    assert "of table hours: committed, 3 rows before, 2 after; 1 row leaves its quarantine, 2 rows come" in said
