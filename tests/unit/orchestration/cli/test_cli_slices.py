"""`recourse slices` as it is typed, without Kafka or Spark: what was rebuilt, and refusals ahead of any start."""

from __future__ import annotations

from pathlib import Path

import pytest

from streaming_jobs.errors import UsageError
from streaming_jobs.runtime.slice_commits import carry_out
from streaming_jobs.sinks.tables import open_tables
from tests.support.days import Days, declared
from tests.unit.orchestration.cli.conftest import Declare, Run


@pytest.fixture
def life(tmp_path: Path, declare: Declare) -> Days:
    declare(declared())
    return Days.of(tmp_path, 3)


def test_rebuilt_slices_are_listed_with_those_that_wait(life: Days, run: Run) -> None:
    life.requests.ask(life.rebuilt("a", 1, 77))
    carry_out(life.requests, open_tables(life.settings, life.stream))
    life.requests.ask(life.rebuilt("b", 2, 78))
    listed = run.json("slices", "list", "days")
    assert [(each["id"], each["state"]) for each in listed] == [("a", "committed"), ("b", "waiting")]
    assert "committed" in run("slices", "list").out


@pytest.mark.parametrize("arguments", [("days", "--table", "nights"), ("weeks",)])
def test_what_cannot_be_sliced_is_refused_before_a_broker_is_looked_for(
    life: Days, run: Run, arguments: tuple[str, ...]
) -> None:
    code, _, said = run("slices", "rebuild", *arguments, "--from", "2013-03-01")
    assert code == UsageError.exit_code and "REC-001" in said and not (life.settings.home / "broker").exists()
