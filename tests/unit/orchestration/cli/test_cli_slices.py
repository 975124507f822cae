"""`recourse slices` as it is typed, without Kafka or Spark: what was rebuilt, and refusals ahead of any start."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from orchestration import cli
from streaming_jobs.errors import UsageError
from streaming_jobs.runtime.slice_commits import carry_out
from streaming_jobs.sinks.tables import open_tables
from tests.support.days import Days, declared


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Days:
    for name in [name for name in os.environ if name.startswith("RECOURSE_") and name != "RECOURSE_DEMO"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    flows = ModuleType("slice_test_flows")
    flows.STREAM = declared()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, flows.__name__, flows)
    monkeypatch.setenv("RECOURSE_HOME", str(tmp_path))
    monkeypatch.setenv("RECOURSE_FLOWS", f'["{flows.__name__}"]')
    return Days.of(tmp_path, 3)


def test_rebuilt_slices_are_listed_with_those_that_wait(life: Days, capsys: pytest.CaptureFixture[str]) -> None:
    life.requests.ask(life.rebuilt("a", 1, 77))
    carry_out(life.requests, open_tables(life.settings, life.stream))
    life.requests.ask(life.rebuilt("b", 2, 78))
    capsys.readouterr()  # what a driver logs
    assert cli.main(["slices", "list", "days", "-o", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(each["id"], each["state"]) for each in listed] == [("a", "committed"), ("b", "waiting")]
    assert cli.main(["slices", "list"]) == 0
    assert "committed" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("days", "--table", "nights"), ("weeks",)])
def test_what_cannot_be_sliced_is_refused_before_a_broker_is_looked_for(
    life: Days, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert cli.main(["slices", "rebuild", *arguments, "--from", "2013-03-01"]) == UsageError.exit_code
    assert "REC-001" in capsys.readouterr().err and not (life.settings.home / "broker").exists()
